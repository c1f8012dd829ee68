"""The division of the KV memory among groups of layers."""

from __future__ import annotations

import pytest

from engine.runner.kv_memory import GroupDemand, divide_kv_memory


def divide(num_bytes: int, *groups: tuple[int, int | None]) -> tuple[int, ...]:
    """Blocks of 16 tokens, 4 sequences, 32 tokens a step."""
    return divide_kv_memory(num_bytes, [GroupDemand(*group) for group in groups], 16, 4, 32)


def test_one_group_gets_everything() -> None:
    assert divide(1050, (100, None)) == (10,)
    assert divide(1050, (100, 64)) == (10,)


def test_with_little_memory_all_groups_get_equally_many_blocks() -> None:
    assert divide(3000, (100, None), (200, 64)) == (10, 10)


def test_a_window_group_gets_what_all_sequences_can_use_and_the_rest_goes_to_the_other() -> None:
    """Per sequence 64 / 16 + 1 blocks, and 2 for the tokens of a step: 4 · 5 + 2 = 22."""
    assert divide(100_000, (100, None), (200, 64)) == ((100_000 - 22 * 200) // 100, 22)


def test_two_windows_are_limited_one_after_the_other() -> None:
    assert divide(100_000, (100, 64), (100, None), (100, 320)) == (22, (100_000 - 2200 - 8600) // 100, 86)
    # enough for the small window's limit, not for the large one's
    assert divide(14_200, (100, 64), (100, None), (100, 320)) == (22, 60, 60)


def test_windows_alone_share_everything() -> None:
    assert divide(100_000, (100, 64), (100, 320)) == (500, 500)


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 12_345, 99_999, 1_000_000])
def test_the_memory_is_never_exceeded_and_hardly_left(num_bytes: int) -> None:
    sizes = (100, 200, 50)
    blocks = divide(num_bytes, (100, None), (200, 64), (50, 640))
    used = sum(count * size for count, size in zip(blocks, sizes, strict=True))
    assert num_bytes - sum(sizes) < used <= num_bytes
