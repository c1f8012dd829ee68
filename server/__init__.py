"""HTTP, the OpenAI protocol and text: everything a client sees."""
