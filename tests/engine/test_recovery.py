"""Back-off and circuit breaker."""

from __future__ import annotations

from engine.recovery import Decision, Recovery, RecoveryOptions

OPTIONS = RecoveryOptions(
    first_delay_seconds=1, max_delay_seconds=3, max_deaths=5, window_seconds=100, open_seconds=30, max_open_seconds=50
)


def test_the_first_restart_is_at_once_and_the_next_ones_back_off() -> None:
    recovery = Recovery(OPTIONS)
    assert [recovery.death(now) for now in range(4)] == [Decision(delay, open=False) for delay in (0.0, 1.0, 2.0, 3.0)]


def test_progress_forgives() -> None:
    recovery = Recovery(OPTIONS)
    for now in range(20):
        assert recovery.death(now) == Decision(0.0, open=False)
        recovery.progress()


def test_the_circuit_opens_for_longer_each_time() -> None:
    recovery = Recovery(OPTIONS)
    decisions = [recovery.death(now) for now in range(7)]
    assert decisions[4:] == [Decision(30.0, open=True), Decision(50.0, open=True), Decision(50.0, open=True)]
    recovery.progress()
    assert recovery.death(8) == Decision(0.0, open=False)


def test_deaths_long_ago_do_not_count() -> None:
    recovery = Recovery(OPTIONS)
    assert not any(recovery.death(now).open for now in range(0, 2000, 30))
