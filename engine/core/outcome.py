"""What came of a step, told to the sequences and to the client."""

from __future__ import annotations

from engine.core.plan import ScheduledSeq, SeqResult
from engine.core.request import Sequence, Status
from engine.core.roster import Roster
from engine.types import FinishReason, RequestUpdate


def absorb(
    roster: Roster, seq: Sequence, planned: ScheduledSeq, result: SeqResult, updates: list[RequestUpdate]
) -> None:
    """Take in the result of one sequence's share of a step that is no longer under way; its news go to `updates`.

    The tokens of a choice that has ended meanwhile are dropped and counted as overrun.
    """
    if seq.children:
        _tell_children(roster, seq, planned, result, updates)
    if seq.status is Status.ENDED:
        roster.counters.overrun_tokens += len(result.token_ids)
    else:
        error = result.error
        if error is None and len(result.token_ids) != planned.sample:
            error = _broken_promise(seq, planned, result)
        if error is None:
            _advance(roster, seq, planned, result, updates)
        else:
            _fail(roster, seq, error, updates)
    roster.settle(seq)


def _fail(roster: Roster, seq: Sequence, error: str, updates: list[RequestUpdate]) -> None:
    """End a sequence, and the choices it stands for, with an error."""
    updates += terminal_updates(seq, FinishReason.ERROR, error)
    roster.end(seq)


def terminal_updates(seq: Sequence, reason: FinishReason, error: str | None = None) -> list[RequestUpdate]:
    """The last words, without tokens, of all choices that a sequence stands for."""
    request_id, choice_index = seq.seq_id
    return [
        RequestUpdate(request_id, k, num_cached_tokens=seq.num_cached_tokens or 0, finish_reason=reason, error=error)
        for k in (choice_index, *seq.forkable_choices)
    ]


def _broken_promise(seq: Sequence, planned: ScheduledSeq, result: SeqResult) -> str | None:
    """Why a sequence cannot go on with a result that has not the one token that was asked for, or none."""
    if not planned.sample:
        return "the executor sampled a token that nobody asked for"
    if not result.token_ids:
        return None if result.finished else "the executor sampled no token"
    if seq.num_in_flight:
        return "the executor gave several tokens while the next was being sampled"
    return None


def _advance(
    roster: Roster, seq: Sequence, planned: ScheduledSeq, result: SeqResult, updates: list[RequestUpdate]
) -> None:
    num_computed = planned.start_position + len(planned.token_ids)
    token_ids = result.token_ids
    reason: FinishReason | None = None
    if planned.sample:
        seq.num_pending -= 1
        count, reason = seq.accept(token_ids)
        if count < len(token_ids):
            roster.counters.overrun_tokens += len(token_ids) - count
            token_ids = token_ids[:count]
        elif result.finished:
            reason = FinishReason.STOP
        roster.queue.served(seq, count)
    elif num_computed == seq.num_prompt_tokens and not seq.samples:
        reason = FinishReason.LENGTH
    roster.kv.commit(roster.tables_of(seq), seq.token_ids, num_computed)
    seq.num_prompt_logprobs += len(result.prompt_logprobs)
    if seq.children and num_computed >= seq.num_prompt_tokens:
        seq.children = []
    by_token = reason is FinishReason.STOP and token_ids and token_ids[-1] in seq.stop_token_ids
    if token_ids or reason is not None or result.prompt_logprobs:
        request_id, choice_index = seq.seq_id
        for k in (choice_index, *seq.forkable_choices):
            updates.append(
                RequestUpdate(
                    request_id,
                    k,
                    token_ids,
                    result.logprobs[: len(token_ids)],
                    result.prompt_logprobs,
                    seq.num_cached_tokens or 0,
                    result.embedding,
                    reason,
                    token_ids[-1] if by_token else None,
                )
            )
    if reason is not None:
        roster.end(seq)


def _tell_children(
    roster: Roster, parent: Sequence, planned: ScheduledSeq, result: SeqResult, updates: list[RequestUpdate]
) -> None:
    """The choices forked off while this step computed the prompt they share have their part in its outcome."""
    if planned.start_position >= parent.num_prompt_tokens - 1:
        return  # the parent's own last prompt token
    for child in parent.children:
        if child.status is Status.ENDED:
            continue
        if result.error is not None:
            _fail(roster, child, result.error, updates)
        elif result.prompt_logprobs:
            request_id, choice_index = child.seq_id
            cached = child.num_cached_tokens or 0
            updates.append(
                RequestUpdate(request_id, choice_index, (), (), result.prompt_logprobs, num_cached_tokens=cached)
            )
