"""Tokenizer, chat template, detokenizer, stop strings."""
