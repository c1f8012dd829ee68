"""Model configuration, weights and the one decoder."""
