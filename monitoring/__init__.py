"""Metrics of server and engine."""
