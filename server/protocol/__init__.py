"""OpenAI wire models."""
