"""Grammars are compiled beside the steps: nobody waits for a grammar that is not their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig, FakeOptions
from engine.constraints import grammars as grammars_module
from engine.constraints.grammars import GrammarStore
from engine.constraints.vocabulary import Vocabulary
from engine.core.scheduler import Scheduler
from engine.fake_executor import build_fake_executor
from engine.loop import EngineLoop
from engine.types import ErrorKind, FinishReason, RequestUpdate
from engine.wire import Abort, Command, Event, News, StepDone, Submit, UseVocabulary
from tests.choices import request
from tests.constraints.conftest import by_lark


class Link:
    """Commands are put in, events come out."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.events: list[Event] = []

    def receive(self, timeout_seconds: float | None) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, event: Event) -> None:
        self.events.append(event)


class Bench:
    """A loop with a scripted executor, driven by hand."""

    def __init__(self, words: Vocabulary | None) -> None:
        config = EngineConfig("", executor="fake", fake=FakeOptions(vocab_size=49152))
        store = GrammarStore()
        executor, info = build_fake_executor(config, lambda progress: None, 1, store)
        scheduler = Scheduler(
            executor.capacity(), max_num_batched_tokens=512, max_num_seqs=8, max_model_len=info.max_model_len
        )
        self.link = Link()
        self.loop = EngineLoop(scheduler, executor, self.link, grammars=store)
        if words is not None:
            self.link.commands.append(UseVocabulary(words))

    def step(self, *commands: Command) -> None:
        self.link.commands += commands
        self.loop.step()

    def until_ended(self, request_id: int, num_choices: int = 1) -> list[RequestUpdate]:
        """All news of a request, when so many of its choices have ended."""
        for _ in range(1_000_000):
            events = [event for event in self.link.events if isinstance(event, StepDone | News)]
            news = [update for event in events for update in event.updates if update.request_id == request_id]
            if sum(update.finish_reason is not None for update in news) == num_choices:
                return news
            self.loop.step()
        raise AssertionError(f"it never ended: {news}")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars with the word `slow` are compiled once this is set."""
    event = threading.Event()
    compile_now = grammars_module._compile

    def compile_later(tokenizer: object, grammar: str) -> object:
        if "slow" in grammar:
            assert event.wait(60)
        return compile_now(tokenizer, grammar)  # type: ignore[arg-type]

    monkeypatch.setattr(grammars_module, "_compile", compile_later)
    yield event
    event.set()


def test_others_run_while_a_grammar_is_compiled(words: Vocabulary, gate: threading.Event) -> None:
    bench = Bench(words)
    slow = request(1, 5, 20, constraint=by_lark('start: "slow"'))
    quick = request(2, 5, 20, constraint=by_lark('start: "quick"'))
    bench.step(Submit(slow), Submit(quick), Submit(request(3, 5, 4)))
    bench.until_ended(2)
    bench.until_ended(3)
    assert bench.until_ended(1, num_choices=0) == []
    assert not bench.loop.busy
    gate.set()
    assert bench.until_ended(1)[-1].finish_reason is FinishReason.STOP


def test_aborted_while_its_grammar_is_compiled(words: Vocabulary, gate: threading.Event) -> None:
    """One choice of three, then all of another request: each gets one terminal update, when the grammar is there."""
    bench = Bench(words)
    bench.step(Submit(request(1, 5, 20, n=3, constraint=by_lark('start: "slow"'))), Abort(1, 1))
    bench.step(Submit(request(2, 5, 20, n=2, constraint=by_lark('start: "slower"'))), Abort(2))
    gate.set()
    news = bench.until_ended(1, num_choices=3) + bench.until_ended(2, num_choices=2)
    ends = {(update.request_id, update.choice_index): update.finish_reason for update in news if update.finish_reason}
    stop, abort = FinishReason.STOP, FinishReason.ABORT
    assert ends == {(1, 0): stop, (1, 1): abort, (1, 2): stop, (2, 0): abort, (2, 1): abort}


def test_an_abort_is_for_the_choices_that_are_there(words: Vocabulary, gate: threading.Event) -> None:
    """Choice 0 comes again after its abort, as one on trial does, while choice 1 of the request is still waiting."""
    bench = Bench(words)
    grammar = by_lark('start: "slow"')
    bench.step(Submit(request(1, 5, 20, choice_index=1, constraint=grammar)), Abort(1, 0))
    bench.step(Submit(request(1, 5, 20, choice_index=0, constraint=grammar)))
    gate.set()
    news = bench.until_ended(1, num_choices=2)
    assert [update.finish_reason for update in news if update.finish_reason] == [FinishReason.STOP] * 2


def test_a_grammar_that_cannot_be_compiled_is_refused_alone(words: Vocabulary) -> None:
    bench = Bench(words)
    bench.step(Submit(request(1, 5, 20, n=2, constraint=by_lark("start: nowhere"))), Submit(request(2, 5, 3)))
    refusals = bench.until_ended(1, num_choices=2)
    assert len(bench.until_ended(2)[-1].new_token_ids) == 1
    assert [(update.choice_index, update.finish_reason, update.error_kind) for update in refusals] == [
        (0, FinishReason.ERROR, ErrorKind.REJECTED),
        (1, FinishReason.ERROR, ErrorKind.REJECTED),
    ]
    assert "nowhere" in (refusals[0].error or "")


def test_an_engine_that_was_told_no_tokenizer_refuses_grammars() -> None:
    bench = Bench(None)
    bench.step(Submit(request(1, 5, 20, constraint=by_lark('start: "a"'))))
    [refusal] = bench.until_ended(1)
    assert refusal.error == "this engine has no tokenizer to match a grammar by"
