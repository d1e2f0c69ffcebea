"""Evaluation leases as the coordinator gives them: to whom, how far training may go, what the job's end waits for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import msgspec
import pytest
from test_core_cluster import STEPS, _Job, _of, _record, _terms

from rallypoint.core.cluster.effects import PublishView
from rallypoint.core.cluster.events import Computed, From, Left
from rallypoint.core.cluster.state import ClusterState, Origin, Phase
from rallypoint.core.policy import AllReduce, Async, Sync
from rallypoint.core.protocol import Aborted, Done, Evaluated, Evaluates, Finished, GiveUp, Leaving, Resize, Say
from rallypoint.core.view import Assignment, Lease, Member, StandingOrders, View, ViewNumber
from rallypoint.core.worker.ending import LeasedVersion
from rallypoint.core.worker.shell import shell_for
from rallypoint.core.worker.slots import Compute, Evaluate, SlotMachine
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.worker.exchange.exchange import worker_plan

EVERY = 4


def _begun(*workers: str, computing: int = 2, terms: dict | None = None, **config: object) -> _Job:
    """A job that has begun; its script evaluates every 4 steps of 20. The workers after the first two stand by."""
    workers = workers or ("w0", "w1", "w2")
    job = _Job(_terms(computing, 2, **(terms or {})), record=_record(**config))  # type: ignore[arg-type]
    job.come("s0", "s1", *workers)
    _reported(job, 0)
    for worker in workers:
        job.play(From(worker, Evaluates((EVERY,))))
    return job


def _reported(job: _Job, step: int) -> None:
    """All workers have computed the steps up to this one."""
    for reached in range(max(0, job.machine.course.furthest), step + 1):
        for worker in job.view.assigned(reached):
            job.play(Computed(worker, reached, 0, 0.1, job.view.generation))


def _result(job: _Job, worker: str, version: int, figures: Mapping[str, float] | None = None) -> Evaluated:
    return From(worker, Evaluated(version, job.view.generation, figures or {"loss": 1.0 / version}))


def _end(job: _Job, *workers: str) -> list:
    _reported(job, STEPS - 1)
    return job.done(*workers)


def test_what_a_script_evaluates_may_be_said_before_the_first_view() -> None:
    job = _Job(_terms(2, 2), record=_record())
    job.come("w0", "w1", "w2")
    for worker in ("w0", "w1", "w2"):
        job.play(From(worker, Evaluates((EVERY,))))
    job.come("s0", "s1")
    _reported(job, 0)
    assert job.view.orders.lease == Lease(4, "w2", until=STEPS)


def test_without_a_standby_the_lead_gets_it() -> None:
    job = _begun("w0", "w1")
    for version in range(EVERY, STEPS, EVERY):
        assert job.view.orders.lease == Lease(version, "w0", until=STEPS)
        _reported(job, version - 1)
        job.play(_result(job, "w0", version))


def test_the_next_version_is_leased_when_the_one_before_has_its_result() -> None:
    job = _begun()
    _reported(job, 7)
    assert job.view.orders.lease == Lease(4, "w2", until=STEPS), "one version at a time: servers keep it"
    job.play(_result(job, "w2", 4))
    assert job.view.orders.lease == Lease(8, "w2", until=STEPS)


def test_a_standby_that_comes_gets_the_lease_of_the_lead() -> None:
    job = _begun("w0", "w1")
    _reported(job, 3)
    job.come("w2")
    job.play(From("w2", Evaluates((EVERY,))))
    assert job.view.orders.lease == Lease(4, "w2", until=STEPS)


def test_a_script_that_says_it_late_evaluates_no_earlier_version() -> None:
    job = _Job(_terms(2, 2), record=_record())
    job.come("s0", "s1", "w0", "w1")
    job.play(From("w0", Evaluates(())), From("w1", Evaluates(())))
    _reported(job, 9)
    assert job.view.orders.lease is None
    job.play(From("w0", Evaluates((EVERY,))))
    assert job.view.orders.lease == Lease(12, "w0", until=STEPS)


@pytest.mark.parametrize(("workers", "loss", "holder"), [
    (4, Left("w2", "killed"), "w3"), (4, From("w2", Leaving()), "w3"), (3, Left("w2", "killed"), "w0"),
    (4, Left("w0", "killed"), "w3"), (3, Left("w0", "killed"), "w2"),
], ids=["to another standby", "also when it leaves", "or to the lead", "a standby that is to train leaves it",
        "or keeps it if nobody else stands by"])  # fmt: skip
def test_a_lease_whose_holder_is_lost_or_has_to_train_goes_to_another(
    workers: int, loss: Left | From, holder: str
) -> None:
    job = _begun(*(f"w{number}" for number in range(workers)))
    _reported(job, 5)
    job.play(loss)
    assert ("w2" in job.view.assigned(6)) == (loss == Left("w0", "killed"))
    assert job.view.orders.lease == Lease(4, holder, until=STEPS)


def test_if_nobody_is_here_who_could_training_goes_on_and_the_version_is_kept() -> None:
    job = _Job(_terms(1, 1), record=_record())
    job.come("s0", "w0", "w1")
    job.play(From("w1", Evaluates((EVERY,))), Left("w1", "killed"))
    assert job.view.orders.lease == Lease(4, "", until=STEPS)


def test_the_view_that_replaces_a_lead_lost_in_its_evaluation_leases_that_version_to_another() -> None:
    job = _begun("w0", "w1")
    _reported(job, 3)
    job.play(_result(job, "w0", 4))
    _reported(job, 7)
    for worker in ("w1",):  # it has computed step 8; the lead evaluates version 8
        job.play(Computed(worker, 8, 3, 0.1, job.view.generation))
    (publish,) = _of(PublishView, job.play(Left("w0", "killed")))
    assert publish.view.orders.lease == Lease(8, "w1", until=STEPS)


def test_a_lead_that_is_told_to_go_ends_its_evaluation_and_if_it_dies_another_makes_it() -> None:
    job = _begun("w0", "w1")
    _reported(job, 7)
    job.play(_result(job, "w0", 4))
    job.play(Computed("w1", 8, 3, 0.1, job.view.generation), From("w0", Leaving()))
    assert job.view.orders.lease == Lease(8, "w0", until=STEPS)
    job.play(Left("w0", "killed"))
    assert job.view.orders.lease == Lease(8, "w1", until=STEPS)


def test_the_job_ends_when_the_last_version_has_its_result() -> None:
    job = _begun()
    for version in (4, 8, 12):
        _reported(job, version)
        job.play(_result(job, "w2", version))
    assert job.view.orders.lease == Lease(16, "w2", until=STEPS)
    job.play(_result(job, "w2", 16))
    assert job.view.orders.lease == Lease(20, "w2", until=STEPS)
    assert not _of(Finished, _end(job, "w0", "w1", "w2"))
    assert job.machine.waiting_for() == "the evaluation of step 20 by w2"
    assert _of(Finished, job.play(_result(job, "w2", 20)))


def test_if_the_lead_is_lost_in_the_last_evaluation_another_makes_it() -> None:
    job = _begun("w0", "w1")
    for version in (4, 8, 12, 16):
        _reported(job, version)
        job.play(_result(job, "w0", version))
    _end(job, "w1")
    effects = job.play(Left("w0", "killed"))
    assert not _of(Finished, effects)
    assert job.view.orders.lease == Lease(20, "w1", until=STEPS)
    assert _of(Finished, job.play(_result(job, "w1", 20)))


def test_a_result_counts_once_and_of_this_generation_only() -> None:
    job = _begun()
    _reported(job, 5)
    old = msgspec.structs.replace(job.view.generation, count=0)
    job.play(From("w2", Evaluated(4, old, {"loss": 9.0})), From("x", Evaluated(4, job.view.generation, {"loss": 9.0})))
    assert job.view.orders.lease == Lease(4, "w2", until=STEPS)
    job.play(_result(job, "w2", 4), _result(job, "w0", 4, {"loss": 9.0}))
    assert job.machine.course.evaluations.results == {4: {"loss": 0.25}}


def test_a_new_coordinator_knows_the_lease_and_the_results() -> None:
    job = _begun()
    _reported(job, 5)
    before = job.machine.revision
    job.play(_result(job, "w2", 4))
    assert job.machine.revision > before
    state = msgspec.json.decode(msgspec.json.encode(job.machine.state()), type=ClusterState)
    assert state.results == {4: {"loss": 0.25}}
    new = _Job(job.machine.terms, recovered=state, record=job.record)
    assert new.view.orders.lease == Lease(8, "w2", until=STEPS)
    for worker in ("w0", "w1", "w2"):
        new.play(From(worker, Evaluates((EVERY,))), _result(new, "w2", 4))
    assert new.view.orders.lease == Lease(8, "w2", until=STEPS)
    assert new.machine.course.evaluations.results == {4: {"loss": 0.25}}


def test_after_a_roll_back_what_is_made_again_is_evaluated_again() -> None:
    job = _begun(terms={"snapshots": False})
    _reported(job, 9)
    job.play(_result(job, "w2", 4), _result(job, "w2", 8))
    job.play(Left("s0", "killed"))
    assert job.machine.phase is Phase.RECOVERING
    job.play(Origin("snapshot", 5))
    assert job.machine.course.evaluations.results == {4: {"loss": 0.25}}
    assert job.view.orders.lease == Lease(8, "w2", until=STEPS)


def test_a_version_that_was_lost_with_its_server_is_named_at_the_end() -> None:
    job = _begun()
    _reported(job, 9)
    job.play(Left("s0", "killed"), Origin("snapshot", 6))
    assert job.machine.course.evaluations.results == {4: None}
    _reported(job, 18)
    for version in (8, 12, 16, 20):
        job.play(_result(job, "w2", version))
    effects = _end(job, "w0", "w1", "w2")
    assert _of(Finished, effects)
    assert [said.text for said in _of(Say, effects)] == [
        "without an evaluation: step 4; whoever had that version was lost"
    ]


def test_a_version_that_no_server_keeps_holds_nothing_up() -> None:
    job = _begun()
    _reported(job, 6)
    job.play(From("w2", Evaluated(8, job.view.generation, None)))
    assert job.view.orders.lease == Lease(4, "w2", until=STEPS), "it was not asked for that one"
    job.play(From("w2", Evaluated(4, job.view.generation, None)))
    assert job.view.orders.lease == Lease(8, "w2", until=STEPS)
    job.play(_result(job, "w0", 4))
    assert job.machine.course.evaluations.results == {4: {"loss": 0.25}}, "its word came later"


def test_an_evaluation_that_fails_on_a_standby_ends_the_job() -> None:
    job = _begun()
    _reported(job, 5)
    job.play(From("w2", GiveUp("ValueError: no data")))
    assert job.machine.last_word == Aborted("w2: ValueError: no data")


@pytest.mark.parametrize(
    "config", [{"sync": AllReduce()}, {"sync": Async()}, {"sync": Sync(quorum=3)}, {"down": {"type": "bf16"}}]
)
def test_elsewhere_the_lead_evaluates_and_the_end_waits_for_no_result(config: dict) -> None:
    job = _begun(**config)
    _reported(job, 6)
    assert job.view.orders.lease is None
    _reported(job, STEPS - 1)
    job.done("w0")
    generation = job.view.generation
    assert _of(Finished, job.play(*(From(worker, Done(generation)) for worker in ("w0", "w1", "w2"))))


def test_a_standby_whose_script_evaluates_otherwise_gets_no_lease() -> None:
    job = _begun("w0", "w1")
    job.come("w2")
    job.play(From("w2", Evaluates((EVERY + 1,))))
    assert job.view.orders.lease == Lease(4, "w0", until=STEPS)


def test_more_workers_that_train_leave_no_standby_and_the_lease_goes_on() -> None:
    job = _begun()
    _reported(job, 5)
    job.play(Resize(3))
    assert job.view.orders.lease == Lease(4, "w2", until=STEPS)
    job.play(_result(job, "w2", 4))
    assert job.view.orders.lease == Lease(8, "w0", until=STEPS)


def test_a_worker_evaluates_again_when_a_view_gives_it_a_lease_once_more() -> None:
    """The result was heard, and lost: the journal was full when the coordinator died."""
    record = SimulatedJob(replicas=1)
    shell = shell_for("w1", worker_plan(record.config, record.layout, frozenset()))
    number = itertools.count(1)

    def seen(lease: Lease | None) -> None:
        server = Member("s0", "here", "there", incarnation=1)
        shell.adopt(
            View(
                ViewNumber(1, next(number)), ViewNumber(1, 1), (), (server,), (Assignment(0, {"w0": (0,), "w1": ()}),),
                dict.fromkeys(range(record.shards), "s0"), orders=StandingOrders(lease=lease),
            ),
            (),
        )  # fmt: skip

    for _ in range(2):
        seen(Lease(2, "w1", until=6))
        assert shell.next_action() == Evaluate(2)
        shell.leased.over(shell.view.generation, 2)
        assert shell.next_action() is None, "once for each lease"
        seen(None)


@dataclass
class _Trains:
    """What `LeasedVersion` asks of a worker's machine."""

    me: str
    step: int
    takes_part: bool = True


@pytest.mark.parametrize(
    ("worker", "until", "evaluates"), [("w0", STEPS, True), ("w1", STEPS, False), ("w0", 8, False)]
)
def test_the_lead_evaluates_what_it_passes_while_an_earlier_version_is_leased(
    worker: str, until: int, evaluates: bool
) -> None:
    """A slow standby, or a coordinator that is away, holds nobody up; where evaluations decide, all wait for it."""
    leased = LeasedVersion(cast(SlotMachine, _Trains(worker, 8)))
    leased.periods = (EVERY,)
    view = View(
        ViewNumber(1, 1), ViewNumber(1, 1), (), (), (Assignment(0, {"w0": (0,), "w1": (1,)}),), {},
        orders=StandingOrders(lease=Lease(4, "w2", until)),
    )  # fmt: skip
    compute = Compute(8, 0)
    assert leased.due(view, compute) == (Evaluate(8) if evaluates else None)
    assert leased.holds_back(view, compute) == (until == 8)
    leased.over(view.generation, 8)
    leased.adopt(view, back=False)
    assert leased.due(view, compute) is None, "once"
    assert leased.due(view, Compute(9, 0)) is None, "no version that the model does not hold"
