"""How a constrained choice ends, and that nobody else ends with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.constraints.grammars import GrammarStore
from engine.constraints.vocabulary import Vocabulary
from engine.core.plan import SeqId
from engine.types import FinishReason
from server.text.tokenizer import Tokenizer
from tests.choices import Outcome, request
from tests.constraints.conftest import by_lark
from tests.runner.harness import Harness

Make = Callable[..., Harness]
Ask = Callable[[str], list[int]]


@pytest.fixture
def run(make: Make, ask: Ask) -> Callable[..., Outcome]:
    def run_one(grammar: str, *, fast_forward: bool = True, max_tokens: int = 20, **options: object) -> Outcome:
        one = request(0, ask("Say something."), max_tokens, constraint=grammar, **options)  # type: ignore[arg-type]
        return make(fast_forward=fast_forward).run(one)[SeqId(0, 0)]

    return run_one


@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_complete_grammar_ends_with_its_last_token(
    run: Callable[..., Outcome], tokenizer: Tokenizer, fast_forward: bool, ignore_eos: bool
) -> None:
    """No end token is drawn, so there need be none."""
    stop = () if ignore_eos else tokenizer.eos_token_ids
    outcome = run(by_lark('start: "yes" | "no"'), fast_forward=fast_forward, stop=stop)
    assert tokenizer.decode(outcome.token_ids, skip_special_tokens=False) in ("yes", "no")
    assert (outcome.finish_reason, outcome.stop_token_id, outcome.error) == (FinishReason.STOP, None, None)


def test_complete_with_the_last_token_allowed_is_no_cut(run: Callable[..., Outcome]) -> None:
    assert run(by_lark('start: "yes"'), max_tokens=1).finish_reason is FinishReason.STOP
    assert run(by_lark('start: "yes" " please"'), max_tokens=1).finish_reason is FinishReason.LENGTH


def test_a_grammar_that_could_go_on_ends_by_a_stop_token(run: Callable[..., Outcome], tokenizer: Tokenizer) -> None:
    """Which is the request's, be it an end token of the vocabulary or not."""
    digits = by_lark("start: /[0-9]+/")
    [letter] = tokenizer.encode("x", add_special_tokens=False)
    for stop in (tokenizer.eos_token_ids, (letter,)):
        bias = tuple((token_id, 100.0) for token_id in stop)
        outcome = run(digits, stop=stop, logit_bias=bias)
        assert outcome.stop_token_id == outcome.token_ids[-1]
        assert outcome.stop_token_id in stop
        assert tokenizer.decode(outcome.token_ids[:-1], skip_special_tokens=False).isdigit()


def test_without_stop_tokens_a_grammar_without_end_goes_on(run: Callable[..., Outcome], tokenizer: Tokenizer) -> None:
    """Though the model would end it at once."""
    bias = tuple((token_id, 100.0) for token_id in tokenizer.eos_token_ids)
    outcome = run(by_lark("start: /[0-9]+/"), logit_bias=bias)
    assert len(outcome.token_ids) == 20
    assert outcome.finish_reason is FinishReason.LENGTH
    assert tokenizer.decode(outcome.token_ids, skip_special_tokens=False).isdigit()


def test_min_tokens_holds_an_end_back_where_the_grammar_can_go_on(
    run: Callable[..., Outcome], tokenizer: Tokenizer
) -> None:
    stop = tokenizer.eos_token_ids
    bias = tuple((token_id, 100.0) for token_id in stop)
    outcome = run(by_lark("start: /[0-9]+/"), stop=stop, logit_bias=bias, min_tokens=7)
    assert len(outcome.token_ids) == 8
    assert outcome.finish_reason is FinishReason.STOP


def test_min_tokens_cannot_lengthen_what_is_complete(run: Callable[..., Outcome], tokenizer: Tokenizer) -> None:
    outcome = run(by_lark('start: "yes"'), stop=tokenizer.eos_token_ids, min_tokens=10)
    assert tokenizer.decode(outcome.token_ids, skip_special_tokens=False) == "yes"
    assert outcome.finish_reason is FinishReason.STOP


def test_an_end_that_only_min_tokens_forbids_ends_all_the_same(
    run: Callable[..., Outcome], tokenizer: Tokenizer
) -> None:
    """The grammar accepts and could go on, but only by what the request's own masks forbid: there is nothing to wait
    for."""
    digits = by_lark("start: /[0-9]+/")
    allowed = tuple(tokenizer.encode("7", add_special_tokens=False))
    outcome = run(digits, stop=tokenizer.eos_token_ids, min_tokens=10, allowed_token_ids=allowed, max_tokens=15)
    assert tokenizer.decode(outcome.token_ids, skip_special_tokens=False) == "7" * 15
    once = by_lark("start: /7[0-9]?/")
    longer = [(allowed[0], *tokenizer.encode(digit, add_special_tokens=False)) for digit in "0123456789"]
    outcome = run(once, stop=tokenizer.eos_token_ids, min_tokens=10, bad_words=tuple(longer))
    assert tokenizer.decode(outcome.token_ids, skip_special_tokens=False) == "7"
    assert (outcome.finish_reason, outcome.error) == (FinishReason.STOP, None)


def test_masks_that_exclude_each_other_end_the_choice_with_an_error(
    run: Callable[..., Outcome], tokenizer: Tokenizer
) -> None:
    allowed = tuple(tokenizer.encode("x", add_special_tokens=False))
    outcome = run(by_lark("start: /[0-9]+/"), allowed_token_ids=allowed)
    assert outcome.finish_reason is FinishReason.ERROR
    assert outcome.error == "the grammar and the request's own masks together leave no token"


@pytest.mark.parametrize("fast_forward", [False, True])
def test_forced_tokens_respect_the_requests_own_masks(
    run: Callable[..., Outcome], tokenizer: Tokenizer, fast_forward: bool
) -> None:
    """The text is forced, its first token may come and its second may not."""
    cut = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    grammar = by_lark('start: "The quick brown fox"')
    outcome = run(grammar, bad_words=((cut[1],),), fast_forward=fast_forward)
    assert (outcome.token_ids, outcome.finish_reason) == (cut[:1], FinishReason.ERROR)


@pytest.mark.parametrize(
    ("grammar", "outputs", "message"),
    [
        ("start: no_such_rule", (), "cannot be compiled"),
        ('start: "yes"', (44, 44), "does not match the grammar"),
    ],
)
def test_an_error_ends_one_choice_and_no_other(
    make: Make, ask: Ask, grammar: str, outputs: tuple[int, ...], message: str
) -> None:
    neighbours = [
        request(1, ask("Tell me a story."), 12, temperature=0.9, seed=1),
        request(2, ask("Say something."), 12, constraint=by_lark("start: /[0-9]+/")),
    ]
    undisturbed = [make().tokens(one)[0] for one in neighbours]
    failing = request(0, ask("Say something."), 12, constraint=by_lark(grammar), outputs=outputs)
    harness = make()
    outcomes = harness.run(neighbours[0], failing, neighbours[1])
    assert outcomes[SeqId(0, 0)].finish_reason is FinishReason.ERROR
    assert message in (outcomes[SeqId(0, 0)].error or "")
    assert [outcomes[SeqId(one.request_id, 0)].token_ids for one in neighbours] == undisturbed


def test_a_grammar_that_grows_too_ambiguous_ends_one_choice(make: Make, ask: Ask) -> None:
    """The bound on a mask's time is met on the way, not when it is compiled."""
    neighbour = request(1, ask("Tell me a story."), 60, temperature=0.9, seed=1)
    undisturbed = make().tokens(neighbour)[0]
    bias = ((81, 100.0),)  # a single letter at a time
    outcomes = make().run(
        request(0, ask("Say a."), 400, constraint=by_lark('start: e\ne: e e | "a" | "b"'), logit_bias=bias), neighbour
    )
    assert outcomes[SeqId(0, 0)].finish_reason is FinishReason.ERROR
    assert "oo many items" in (outcomes[SeqId(0, 0)].error or "")
    assert len(outcomes[SeqId(0, 0)].token_ids) > 10
    assert outcomes[SeqId(1, 0)].token_ids == undisturbed


def test_a_vocabulary_of_another_size_fails_the_choice(make: Make, ask: Ask, words: Vocabulary) -> None:
    """So does none at all."""
    short = replace(words, token_bytes=words.token_bytes[:49100], special_token_ids=(), eos_token_ids=(0,))
    store = GrammarStore()
    one = request(0, ask("Hi"), 4, constraint=by_lark('start: "a"'))
    message = "this engine has no tokenizer to match a grammar by"
    assert make(grammars=store).run(one)[SeqId(0, 0)].error == message
    store.use(short)
    message = "the tokenizer has 49100 tokens, the model 49152"
    assert make(grammars=store).run(one)[SeqId(0, 0)].error == message
