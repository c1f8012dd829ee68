"""Structured output: schemas, tools and grammars to one llguidance grammar; constrained answers back to their parts."""
