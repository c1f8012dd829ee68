"""What came of a step, told to the sequences and to the client."""

from __future__ import annotations

from engine.core.plan import ScheduledSeq, SeqResult
from engine.core.request import Sequence, Status
from engine.core.roster import Roster
from engine.types import FinishReason, RequestUpdate


def absorb(roster: Roster, seq: Sequence, planned: ScheduledSeq, result: SeqResult) -> list[RequestUpdate]:
    """Take in the result of one sequence's share of a step that is no longer under way; the news it makes.

    The tokens of a choice that has ended meanwhile are dropped and counted as overrun.
    """
    updates = _tell_children(roster, seq, planned, result) if seq.children else []
    if seq.status is Status.ENDED:
        roster.counters.overrun_tokens += len(result.token_ids)
    else:
        error = result.error or _broken_promise(seq, planned, result)
        updates += fail(roster, seq, error) if error else _advance(roster, seq, planned, result)
    roster.settle(seq)
    return updates


def fail(roster: Roster, seq: Sequence, error: str) -> list[RequestUpdate]:
    """End a sequence, and the choices it stands for, with an error."""
    updates = terminal_updates(seq, FinishReason.ERROR, error)
    roster.end(seq)
    return updates


def terminal_updates(seq: Sequence, reason: FinishReason, error: str | None = None) -> list[RequestUpdate]:
    """The last words, without tokens, of all choices that a sequence stands for."""
    request_id, choice_index = seq.seq_id
    return [
        RequestUpdate(request_id, k, num_cached_tokens=seq.num_cached_tokens or 0, finish_reason=reason, error=error)
        for k in (choice_index, *seq.forkable_choices)
    ]


def _broken_promise(seq: Sequence, planned: ScheduledSeq, result: SeqResult) -> str | None:
    """What a result lacks for the sequence to go on."""
    if planned.sample and not result.token_ids:
        return "the executor sampled no token"
    if len(result.token_ids) > 1 and seq.num_in_flight:
        return "the executor gave several tokens while the next was being sampled"
    return None


def _advance(roster: Roster, seq: Sequence, planned: ScheduledSeq, result: SeqResult) -> list[RequestUpdate]:
    num_computed = planned.start_position + len(planned.token_ids)
    token_ids = result.token_ids
    reason: FinishReason | None = None
    if planned.sample:
        seq.num_pending -= 1
        count, reason = seq.accept(token_ids)
        if count < len(token_ids):
            roster.counters.overrun_tokens += len(token_ids) - count
            token_ids = token_ids[:count]
    elif num_computed == seq.num_prompt_tokens and not seq.samples:
        reason = FinishReason.LENGTH
    roster.kv.commit(roster.tables_of(seq), seq.token_ids, num_computed)
    seq.num_prompt_logprobs += len(result.prompt_logprobs)
    if seq.children and num_computed >= seq.num_prompt_tokens:
        seq.children = []
    if not token_ids and reason is None and not result.prompt_logprobs:
        return []
    request_id, choice_index = seq.seq_id
    updates = [
        RequestUpdate(
            request_id,
            k,
            token_ids,
            result.logprobs[: len(token_ids)],
            result.prompt_logprobs,
            seq.num_cached_tokens or 0,
            result.embedding,
            reason,
            token_ids[-1] if reason is FinishReason.STOP else None,
        )
        for k in (choice_index, *seq.forkable_choices)
    ]
    if reason is not None:
        roster.end(seq)
    return updates


def _tell_children(roster: Roster, parent: Sequence, planned: ScheduledSeq, result: SeqResult) -> list[RequestUpdate]:
    """The choices forked off while this step computed the prompt they share have their part in its outcome."""
    updates: list[RequestUpdate] = []
    if planned.start_position >= parent.num_prompt_tokens - 1:
        return updates  # the parent's own last prompt token
    for child in parent.children:
        if child.status is Status.ENDED:
            continue
        if result.error is not None:
            updates += fail(roster, child, result.error)
        elif result.prompt_logprobs:
            request_id, choice_index = child.seq_id
            cached = child.num_cached_tokens or 0
            updates.append(
                RequestUpdate(request_id, choice_index, (), (), result.prompt_logprobs, num_cached_tokens=cached)
            )
    return updates
