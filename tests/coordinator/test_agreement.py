"""Workers whose own optimizers are set differently are told apart by their reports of one step."""

from __future__ import annotations

from rallypoint.coordinator.claims import Agreement
from rallypoint.core.protocol import Report
from rallypoint.core.view import ViewNumber

OLD, NEW = ViewNumber(1, 1), ViewNumber(1, 4)


def report(step: int, settings: str, generation: ViewNumber = NEW) -> Report:
    return Report(step, 0, 0.5, 1.0, 8, 0.1, generation, settings)


def test_two_workers_with_other_settings_at_one_step_are_named() -> None:
    agreement = Agreement()
    assert agreement.difference("w0", report(3, "a")) is None
    assert agreement.difference("w1", report(3, "a")) is None
    assert agreement.difference("w0", report(4, "b")) is None
    why = agreement.difference("w1", report(4, "a"))
    assert why.startswith("w1 and w0 do not have the same settings in own_optimizer or own_schedule by step 4")
    assert "change settings by own_schedule" in why


def test_of_a_script_s_own_loop_it_says_what_to_do_there() -> None:
    agreement = Agreement()
    assert agreement.difference("w0", report(5, "a"), own_loop=True) is None
    said = agreement.difference("w1", report(5, "b"), own_loop=True)
    assert said.startswith("w1 and w0 do not have the same learning rate, or another setting of their optimizers, by s")
    assert "rp.wrap(model, optimizer, schedule=scheduler, ...)" in said
    assert "own_schedule" not in said


def test_two_replicas_of_one_worker_may_differ_too() -> None:
    agreement = Agreement()
    agreement.difference("w0", report(3, "a"))
    assert str(agreement.difference("w0", report(3, "b"))).startswith("two replicas on w0 do not have")


def test_what_is_late_or_of_an_older_generation_is_not_compared() -> None:
    agreement = Agreement()
    assert agreement.difference("w0", report(9, "a", OLD)) is None
    assert agreement.difference("w0", report(5, "b")) is None
    assert agreement.difference("w1", report(9, "c", OLD)) is None
    assert agreement.difference("w1", report(5, "b")) is None


def test_a_report_that_comes_after_one_of_the_next_step_is_still_compared() -> None:
    agreement = Agreement()
    agreement.difference("w0", report(2, "a"))
    agreement.difference("w0", report(3, "b"))
    assert "by step 2" in str(agreement.difference("w1", report(2, "c")))


def test_where_servers_step_nothing_is_compared() -> None:
    agreement = Agreement()
    assert [agreement.difference(who, report(1, "")) for who in ("w0", "w1")] == [None, None]
