"""Workloads, prompts, sessions, traces, arrivals: the same for the same seed, and as long as they say."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from loadtest.arrivals import gamma_arrivals
from loadtest.counters import FileCounter, WordCounter
from loadtest.errors import BenchError
from loadtest.prompts import load_words, make_prompt_maker
from loadtest.sessions import build_sessions
from loadtest.trace import Arrival, read_trace
from loadtest.workloads import Closed, Intrusion, builtin_workloads, load_workloads, sample

_PEERS = {  # name: (users, sessions, [(shared, prompt, output)])
    "w1": (1, 8, [(0, 128, 128)]),
    "w2": (16, 64, [(0, 128, 64)]),
    "w3": (16, 64, [(512, 32, 32)]),
    "w4": (1, 4, [(0, 2048, 16)]),
    "w5": (8, 9, [(0, 128, 256), (0, 1024, 8)]),
    "w6": (64, 64, [(0, 64, 32)]),
}


@pytest.mark.parametrize("name", _PEERS)
def test_the_workloads_of_the_peers_table_are_as_stated(name: str) -> None:
    workload = builtin_workloads()[name]
    lengths = [(c.shared, c.prompt, c.output) for c in workload.classes]
    assert isinstance(workload.load, Closed | Intrusion)
    assert (workload.load.users, workload.sessions, lengths) == _PEERS[name]


def test_sharegpt_has_the_published_means_and_a_heavy_tail() -> None:
    (chat,) = builtin_workloads()["sharegpt"].classes
    rng = Random(7)
    prompts = [sample(chat.prompt, rng) for _ in range(50_000)]
    outputs = [sample(chat.output, rng) for _ in range(50_000)]
    assert statistics.mean(prompts) == pytest.approx(161, rel=0.03)
    assert statistics.mean(outputs) == pytest.approx(338, rel=0.03)
    assert max(outputs) > 8 * statistics.median(outputs)


def test_every_builtin_workload_makes_its_sessions_again_from_the_seed() -> None:
    maker = make_prompt_maker(WordCounter())
    for workload in builtin_workloads().values():
        first = build_sessions(workload, min(workload.sessions, 20), 3, maker)
        assert first == build_sessions(workload, min(workload.sessions, 20), 3, maker)
        assert first != build_sessions(workload, min(workload.sessions, 20), 4, maker)


def test_classes_with_a_count_come_first_and_the_rest_is_drawn_by_weight() -> None:
    maker = make_prompt_maker(WordCounter())
    labels = [session.label for session in build_sessions(builtin_workloads()["w5"], 9, 1, maker)]
    assert labels == ["stream"] + ["intruder"] * 8
    labels = [session.label for session in build_sessions(builtin_workloads()["adversarial"], 2000, 1, maker)]
    assert labels.count("good") / 2000 == pytest.approx(0.4, abs=0.04)


def test_groups_share_their_prefix_and_nothing_else() -> None:
    maker = make_prompt_maker(WordCounter())
    sessions = build_sessions(builtin_workloads()["few-shot"], 128, 1, maker)
    assert len({session.prefix for session in sessions}) == 8
    assert len({session.turns[0].text for session in sessions}) == 128


def _tokenizer(path: Path, *, begin_token: bool) -> Path:
    """A small BPE trained on half of the bundled words: the others take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>"] if begin_token else []
    trainer = trainers.BpeTrainer(vocab_size=1400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(("the", *load_words()[::2])) for _ in range(3)], trainer)
    if begin_token:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("begin_token", [False, True])
def test_prompts_have_exactly_the_tokens_asked_for(tmp_path: Path, begin_token: bool) -> None:
    counter = FileCounter(_tokenizer(tmp_path / "tokenizer.json", begin_token=begin_token))
    maker, rng = make_prompt_maker(counter), Random(1)
    first = counter.count("the")
    assert first == 1 + begin_token
    assert 100 < len(maker.words) < len(load_words())
    for length in (first, first + 1, 17, 128, 1000):
        assert counter.count(maker.text(length, rng)) == length
    prefix = maker.text(100, rng)
    whole = maker.extend(prefix, 132, rng)
    assert whole.startswith(prefix + " ")
    assert counter.count(whole) == 132
    with pytest.raises(BenchError, match="cannot make a prompt of 99 tokens"):
        maker.extend(prefix, 99, rng)


def test_a_tokenizer_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read the tokenizer file"):
        FileCounter(tmp_path / "missing.json")


def test_poisson_and_bursts_have_the_rate_and_the_spread() -> None:
    for burstiness, variation in ((1.0, 1.0), (0.25, 2.0), (1e9, 0.0)):
        times = gamma_arrivals(40_001, 5.0, burstiness, Random(1))
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert times[0] == 0.0
        assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, abs=0.05)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own.csv", "at_seconds,prompt_tokens,output_tokens\n10,100,5\n12.5,200,6\n"),
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:03.000000,100,5\n2023-11-16 18:17:05.500000,200,6\n",
        ),
        (
            "mooncake.jsonl",
            '{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1]}\n'
            '{"timestamp": 2500, "input_length": 200, "output_length": 6, "hash_ids": [2]}\n',
        ),
    ],
)
def test_traces_of_three_kinds_are_read(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_trace(path) == [Arrival(0.0, 100, 5), Arrival(2.5, 200, 6)]
    assert read_trace(path, speed=2.0, limit=2)[1].at_seconds == 1.25


def test_a_broken_trace_names_the_record(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("at_seconds,prompt_tokens,output_tokens\n1,2,3\n1,x,3\n")
    with pytest.raises(BenchError, match=r"t\.csv, record 2"):
        read_trace(path)


def test_a_workload_file_is_checked_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    good = '[mine]\ndescription = "d"\nsessions = 3\nload = { kind = "closed", users = 2 }\n'
    path.write_text(good + 'classes = [{ name = "a", prompt = 3, output = 4 }]\n')
    assert load_workloads(path)["mine"].load == Closed(users=2)
    for classes, complaint in (
        ('[{ name = "a", prompt = 0, output = 4 }]', r"prompt"),
        ('[{ name = "a", prompt = 1, output = 4, colour = 1 }]', r"unknown field `colour`"),
        ("[]", r"at least one"),
    ):
        path.write_text(good + f"classes = {classes}\n")
        with pytest.raises(BenchError, match=complaint):
            load_workloads(path)
