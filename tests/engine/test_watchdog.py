"""When an engine counts as stuck; the test is the clock."""

from __future__ import annotations

from engine.watchdog import Limits, Verdict, Watchdog

LIMITS = Limits(start_seconds=100, first_step_seconds=50, step_seconds=20, ping_interval_seconds=5, pong_seconds=10)


def at_work(now: float = 0.0) -> Watchdog:
    """An engine that has loaded and run a first step."""
    watchdog = Watchdog(LIMITS, now)
    watchdog.ready()
    watchdog.step_begun()
    watchdog.step_done()
    watchdog.check(now)
    return watchdog


def run_until(watchdog: Watchdog, now: float, end: float) -> Verdict:
    """Check as often as the verdicts ask for; the first verdict that is not "wait", or the last before `end`."""
    verdict = watchdog.check(now)
    while not verdict.ping and verdict.stuck is None and verdict.next_check_at < end:
        now = verdict.next_check_at
        verdict = watchdog.check(now)
    return verdict


def test_loading_may_take_long_if_it_moves() -> None:
    watchdog = Watchdog(LIMITS, 0)
    assert run_until(watchdog, 0, 99).stuck is None
    watchdog.heard(99)
    assert run_until(watchdog, 99, 198).stuck is None
    assert run_until(watchdog, 198, 200).stuck == "loading stands still"


def test_the_first_step_has_a_limit_of_its_own() -> None:
    watchdog = Watchdog(LIMITS, 0)
    watchdog.ready()
    watchdog.step_begun()
    assert run_until(watchdog, 0, 49).stuck is None
    assert run_until(watchdog, 49, 51).stuck == "a step has not ended within 50 s"


def test_a_step_that_does_not_end_is_stuck() -> None:
    watchdog = at_work()
    watchdog.heard(1)
    watchdog.step_begun()
    assert run_until(watchdog, 1, 20).stuck is None
    assert run_until(watchdog, 20, 22).stuck == "a step has not ended within 20 s"


def test_a_long_step_is_not_pinged() -> None:
    watchdog = at_work()
    watchdog.step_begun()
    assert not run_until(watchdog, 0, 19).ping


def test_an_idle_engine_is_pinged_and_lives_if_it_answers() -> None:
    watchdog = at_work()
    assert watchdog.check(4.9) == Verdict(next_check_at=5.0)
    assert watchdog.check(5.0) == Verdict(next_check_at=15.0, ping=True)
    watchdog.heard(5.1)
    assert watchdog.check(6.0) == Verdict(next_check_at=10.1)


def test_an_idle_engine_that_does_not_answer_is_stuck() -> None:
    watchdog = at_work()
    assert watchdog.check(5.0).ping
    assert watchdog.check(10.0).stuck is None
    assert watchdog.check(15.0).stuck == "no answer to a ping"


def test_any_frame_answers_a_ping() -> None:
    watchdog = at_work()
    assert watchdog.check(5.0).ping
    watchdog.heard(6.0)
    watchdog.step_begun()
    assert watchdog.check(15.0).stuck is None


def test_a_server_that_was_stopped_itself_does_not_blame_the_engine() -> None:
    watchdog = at_work()
    watchdog.step_begun()
    due = watchdog.check(0).next_check_at
    assert watchdog.check(due + 3600).stuck is None
    assert run_until(watchdog, due + 3605, due + 3621).stuck is not None


def test_with_two_steps_under_way_the_end_of_one_restarts_the_clock() -> None:
    watchdog = at_work()
    watchdog.step_begun()
    watchdog.step_begun()
    assert run_until(watchdog, 0, 19).stuck is None
    watchdog.heard(19)
    watchdog.step_done()
    assert run_until(watchdog, 19, 38).stuck is None
    assert run_until(watchdog, 38, 40).stuck is not None
