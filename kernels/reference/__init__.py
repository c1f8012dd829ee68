"""The torch reference: every operation the obvious way, on any device. The oracle and the fallback."""
