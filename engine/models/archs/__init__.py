"""One file per model family: config mapping and weight names, data only."""
