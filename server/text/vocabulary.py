"""What the engine is told about a tokenizer, so that outputs can be made to match a grammar."""

from __future__ import annotations

from engine.constraints.vocabulary import Vocabulary
from server.text.tokenizer import Tokenizer


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """For a model that has logits for `vocab_size` tokens; rows without a token are never drawn under a grammar."""
    ends = [token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size]
    return Vocabulary(
        token_bytes=tuple(map(tokenizer.token_bytes, range(vocab_size))),
        special_token_ids=tuple(sorted(i for i in tokenizer.control_ids.values() if i < vocab_size)),
        eos_token_ids=tuple(ends),
        tokenizer_json=tokenizer.serialized(),
    )
