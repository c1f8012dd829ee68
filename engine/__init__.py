"""Tokens: scheduling, KV memory, model execution."""
