"""Between the wire and tokens: pure functions, no engine, no clock."""
