"""Outputs that must match a grammar. The only place that knows llguidance.

`vocabulary` is what the server tells about its tokenizer; `grammars` compiles and keeps grammars, away from the step
loop; `arrivals` holds requests back until theirs is compiled; `matching` follows sequences, token by token, and makes
the masks of their next ones.
"""
