"""Pinned assignments: a replica stays with its worker, and waits for a process that takes its place."""

from __future__ import annotations

from rallypoint.core.placing.pinned import lost_place, lost_step, pinned_assignments, pins_after
from rallypoint.core.view import Assignment, View, ViewNumber


def view(**replicas: tuple[int, ...]) -> View:
    number = ViewNumber(1, 1)
    assignments = (Assignment(0, replicas),) if replicas else ()
    return View(number, number, (), (), assignments, {}, contributors=replicas)


def test_at_first_replicas_go_by_the_workers_names() -> None:
    workers = [f"worker{n}" for n in (10, 2, 0)]
    assert pinned_assignments({}, workers, 3) == (Assignment(0, {"worker0": (0,), "worker10": (2,), "worker2": (1,)}),)


def test_nobody_computes_while_a_replica_has_no_worker() -> None:
    assert pinned_assignments({0: "a", 1: "b"}, ["b"], 2) == ()


def test_who_comes_takes_the_free_replica_and_the_others_keep_theirs() -> None:
    assert pinned_assignments({0: "a", 1: "b", 2: "c"}, ["c", "d", "b"], 3) == (
        Assignment(0, {"b": (1,), "c": (2,), "d": (0,)}),
    )


def test_a_worker_that_comes_back_under_its_name_has_its_replica_again() -> None:
    pins = {0: "a", 1: "b"}
    assert pinned_assignments(pins, ["b", "a"], 2) == (Assignment(0, {"a": (0,), "b": (1,)}),)


def test_the_same_workers_keep_the_same_replicas_in_a_new_generation() -> None:
    pins = pins_after({}, view(a=(1,), b=(0,)))
    pins = pins_after(pins, view())  # nobody computes
    assert pinned_assignments(pins, ["a", "b"], 2) == (Assignment(0, {"a": (1,), "b": (0,)}),)


def test_after_a_restart_of_the_coordinator_the_pins_are_those_of_the_view() -> None:
    """Also if nobody computes in it: who may still contribute keeps its replica."""
    waiting = View(ViewNumber(1, 3), ViewNumber(1, 1), (), (), (), {}, contributors={"b": (0,)})
    assert pins_after({}, waiting) == {0: "b"}


def test_a_worker_whose_replica_was_taken_cannot_go_on() -> None:
    assert "replica 1 is computed by c now" in lost_place(view(a=(0,), c=(1,)), "b", 1)
    assert lost_place(view(a=(0,), b=(1,)), "b", 1) == ""
    assert lost_place(view(), "b", 1) == ""  # nobody computes: it may get it back


def test_a_loop_goes_on_with_its_step_or_the_next_and_with_no_other() -> None:
    assert lost_step(7, 1, 7, 1) == lost_step(7, 1, 8, 1) == ""
    assert lost_step(7, 1, 5, 1) == "the job has gone back to step 5, and this process is at step 7"
    assert lost_step(7, 1, 9, 1) == "the job has gone on to step 9, and this process is at step 7"
    assert "is to compute replica 0" in lost_step(7, 1, 7, 0)
