"""Decisions as the coordinator makes them: how far training may go, what views say, what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_core_cluster import SHARDS, STEPS, _Job, _of, _record, _terms

from rallypoint.config import Evaluation
from rallypoint.core.cluster.effects import Commit, Refuse
from rallypoint.core.cluster.evaluations import KEPT, EvaluationLedger
from rallypoint.core.cluster.events import Captured, Computed, From, Left
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Origin, Resumed
from rallypoint.core.decisions import Best, Decided, KeepBest, ReduceOnPlateau, Rules, StopWhen
from rallypoint.core.protocol import Aborted, Capture, Done, Evaluated, Evaluates, Finished, Say, Snapshotted
from rallypoint.core.view import EarlyEnd, Lease, StandingOrders
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.ending import LeasedVersion

EVERY = 4
RULE = StopWhen(metric="loss", patience=2)


def _begun(
    workers: int = 2, standby: int = 1, stops: tuple[StopWhen, ...] = (RULE,), terms: dict[str, Any] | None = None,
    **config: Any,
) -> _Job:  # fmt: skip
    """A job of 20 steps that evaluates every 4 steps, and whose evaluations decide."""
    job = _Job(_terms(workers, 2, **(terms or {})), record=_record(**config))
    names = [f"w{i}" for i in range(workers + standby)]
    for capture in _of(Capture, job.come("s0", "s1", *names)):
        _store(job, capture)
    for name in names:
        job.play(From(name, Evaluates((EVERY,), stops=stops)))
    _reported(job, 0)
    return job


def _store(job: _Job, capture: Capture) -> list[Any]:
    effects = job.play(*(Captured(writer, capture.snapshot, tuple(SHARDS)) for writer in capture.writers))
    committed = [Snapshotted(commit.snapshot, 0, 0, 0.0) for commit in _of(Commit, effects)]
    return [*effects, *job.play(*committed)]


def _reported(job: _Job, step: int) -> list[Any]:
    effects: list[Any] = []
    for reached in range(max(0, job.machine.course.furthest), step + 1):
        for worker in job.view.assigned(reached):
            effects += job.play(Computed(worker, reached, 0, 0.1, job.view.generation))
    return effects


def _result(job: _Job, version: int, loss: float, worker: str = "w2") -> list[Any]:
    return job.play(From(worker, Evaluated(version, job.view.generation, {"loss": loss})))


def test_training_may_come_to_the_version_after_the_one_that_is_evaluated_and_no_further() -> None:
    job = _begun()
    assert job.view.orders.lease == Lease(4, "w2", until=8)
    _result(job, 4, 1.0)
    assert job.view.orders.lease == Lease(8, "w2", until=12)


def test_without_a_standby_each_version_is_leased_too_so_it_can_be_evaluated_again() -> None:
    job = _begun(standby=0)
    assert job.view.orders.lease == Lease(4, "w0", until=8)
    _reported(job, 4)
    assert job.view.orders.lease == Lease(4, "w0", until=8)
    job.play(Left("w0", "killed"))
    assert job.view.orders.lease == Lease(4, "w1", until=8)
    _result(job, 4, 1.0, "w1")
    assert job.view.orders.lease == Lease(8, "w1", until=12)


def test_nothing_is_computed_before_it_is_known_what_the_script_evaluates() -> None:
    job = _Job(_terms(1, 1), record=_record(evaluation=Evaluation(plateau=ReduceOnPlateau(metric="loss"))))
    job.come("s0", "w0")
    assert job.view.orders.lease is None, "workers wait for one"
    job.play(From("w0", Evaluates((EVERY,))))
    assert job.view.orders.lease == Lease(4, "w0", until=8)


def test_a_rule_ends_the_job_with_the_version_that_is_due_next() -> None:
    job = _begun()
    for version, loss in ((4, 1.0), (8, 2.0)):
        _reported(job, version)
        _result(job, version, loss)
    assert job.view.orders.stop is None
    _reported(job, 12)
    effects = _result(job, 12, 3.0)
    assert job.view.orders.stop == EarlyEnd(16, "loss has not become lower than 1 in 2 evaluations", "run.stop_when")
    assert Say(f"the job ends with step 16: {job.view.orders.stop.reason}") in effects
    _reported(job, 15)
    _result(job, 16, 1.0)
    generation = job.view.generation
    effects = job.play(*(From(worker, Done(generation, 16)) for worker in ("w0", "w1", "w2")))
    assert effects[-1] == Finished("w0", 16, job.view.orders.stop.reason)


def test_a_result_that_comes_early_waits_for_those_of_earlier_versions() -> None:
    job = _begun(standby=0, stops=(StopWhen(metric="loss", below=0.5),))
    _reported(job, 7)
    _result(job, 8, 0.1, "w0")
    assert job.view.orders.stop is None
    _result(job, 4, 0.2, "w0")
    assert job.view.orders.stop.version == 8


def test_a_version_that_no_server_keeps_counts_as_one_without_a_result() -> None:
    job = _begun()
    job.play(From("w2", Evaluated(4, job.view.generation, None)))
    assert job.view.orders.lease == Lease(8, "w2", until=12)
    assert job.machine.course.evaluations.decided == Decided(4)


def test_a_new_coordinator_decides_on_with_what_the_journal_says() -> None:
    job = _begun()
    _result(job, 4, 1.0)
    _reported(job, 8)
    _result(job, 8, 2.0)
    kept = msgspec.json.decode(msgspec.json.encode(job.machine.state()), type=ClusterState)
    machine = ClusterMachine(job.machine.terms, kept)
    assert machine.course.evaluations.decided == job.machine.course.evaluations.decided
    assert machine.course.views.orders.lease == Lease(12, "w2", until=16)


def test_a_job_that_goes_back_to_a_snapshot_decides_what_that_says() -> None:
    job = _begun()
    for version, loss in ((4, 1.0), (8, 2.0)):
        _reported(job, version)
        _result(job, version, loss)
    _reported(job, 10)
    after4 = Decided().after(Rules((RULE,)), 4, {"loss": 1.0}, 8)
    job.play(Left("s0", "x"), Left("s1", "x"))
    job.come("s2", "s3")
    job.play(Origin("step-00000006-1", 6, None, after4))
    assert job.machine.course.evaluations.decided == after4
    assert job.view.orders.lease == Lease(8, "w2", until=12)


def test_a_job_that_goes_back_to_its_first_snapshot_does_not_end_as_the_run_did_that_it_goes_on_from() -> None:
    record, name = _record(), "step-00000010-1"
    job = _Job(_terms(1, 1), record=record, resume=Resumed(record, name, 10, decided=Decided(8)))
    job.come("s0", "w0")
    job.play(From("w0", Evaluates((EVERY,), stops=(RULE,))), Left("s0", "x"))
    job.come("s1")
    end = EarlyEnd(10, "the run before")
    job.play(Origin(name, 10, end, Decided(8, stop=end)))
    assert job.view.orders.stop is None
    assert job.machine.course.evaluations.decided == Decided(8)


def test_what_a_snapshot_says_goes_on_in_a_run_that_is_resumed() -> None:
    rules = Rules(plateau=ReduceOnPlateau("loss", patience=0))
    decided = Decided().after(rules, 4, {"loss": 1.0}, 8).after(rules, 8, {"loss": 1.0}, 12)
    record = _record(evaluation=Evaluation(plateau=ReduceOnPlateau(metric="loss", patience=0)))
    job = _Job(_terms(1, 1), record=record, resume=Resumed(record, "step-00000010-1", 10, None, decided))
    job.come("s0", "w0")
    assert job.view.orders.reductions == (12,)
    job.play(From("w0", Evaluates((EVERY,))))
    assert job.view.orders.lease == Lease(12, "w0", until=16)


def _evaluated(
    end: int, resume: Decided | None = None, start: int = 0, stops: tuple[StopWhen, ...] = ()
) -> Decided:  # fmt: skip
    """Play a job to its last version `end`. Returns what its last snapshot says. No result is an improvement."""
    record = _record(steps=end, evaluation=Evaluation(plateau=ReduceOnPlateau(metric="loss", patience=0)))
    resumed = None if resume is None else Resumed(record, f"step-{start:08d}-1", start, resume.stop, resume)
    job = _Job(_terms(1, 1), record=record, resume=resumed)
    job.come("s0", "w0")
    job.play(From("w0", Evaluates((EVERY,), stops=stops)))
    ledger = job.machine.course.evaluations
    for version in range(max(1, start), end + 1):
        if version > job.machine.course.last:
            break
        if ledger.is_due(record, version, job.machine.course.last) and version > ledger.decided.version:
            _reported(job, version)
            _result(job, version, 1.0, "w0")
            assert ledger.decided.version == version
    return ledger.told_by(end)


@pytest.mark.parametrize("end", range(1, 20))
def test_a_run_that_ends_and_is_resumed_with_more_steps_reduces_the_rates_as_an_undisturbed_one(end: int) -> None:
    undisturbed = _evaluated(40)
    assert undisturbed.reductions == (12, 16, 20, 24, 28, 32, 36, 40)
    assert _evaluated(40, _evaluated(end), end) == undisturbed


@pytest.mark.parametrize("end", range(1, 17))
def test_a_run_that_ends_and_is_resumed_with_more_steps_ends_early_as_an_undisturbed_one(end: int) -> None:
    undisturbed = _evaluated(40, stops=(RULE,)).stop
    assert undisturbed is not None
    assert undisturbed.version == 16
    stop = _evaluated(40, _evaluated(end, stops=(RULE,)).going_on(end), end, stops=(RULE,)).stop
    assert stop is not None
    if end < 16:
        assert stop == undisturbed
    else:
        assert stop.version == 28, "the rule has ended it: it begins anew with the evaluation of step 16"


def test_what_was_decided_before_its_version_became_the_last_one_is_not_decided_again() -> None:
    """All scripts leave the loop at version 8, after it was evaluated as one of many."""
    rules = Rules(plateau=ReduceOnPlateau(metric="loss", patience=0))
    ledger = EvaluationLedger(periods=(EVERY,), results={4: {"loss": 1.0}, 8: {"loss": 1.0}})
    ledger.decide(rules, 4, 8)
    ledger.decide(rules, 8, 12)
    assert ledger.told_by(8) == ledger.decided
    assert ledger.told_by(8).version == 8
    assert ledger.told_by(8).reductions == (12,)


def test_a_last_snapshot_says_what_was_decided_before_it_where_a_version_is_a_round_of_several_steps() -> None:
    rules = Rules(plateau=ReduceOnPlateau(metric="loss", patience=0))
    ledger = EvaluationLedger(periods=(20,), results={version: {"loss": 1.0} for version in (2, 4, 5)})
    for version, following in ((2, 4), (4, 6), (5, None), (6, None)):  # rounds of ten steps
        ledger.decide(rules, version, following)
        assert ledger.told_by(version).version == min(version, 4)
    assert ledger.told_by(6).reductions == (6,)


def test_what_a_run_s_last_snapshot_says_does_not_depend_on_the_coordinator_that_is_asked() -> None:
    record = _record(steps=10, evaluation=Evaluation(plateau=ReduceOnPlateau(metric="loss", patience=0)))
    job = _Job(_terms(1, 1), record=record)
    job.come("s0", "w0")
    job.play(From("w0", Evaluates((EVERY,))))
    for version in (4, 8, 10):
        _reported(job, version)
        _result(job, version, 1.0, "w0")
    new = EvaluationLedger()
    new.recovered(msgspec.msgpack.decode(msgspec.msgpack.encode(job.machine.state()), type=ClusterState))
    assert new.told_by(10) == job.machine.course.evaluations.told_by(10)


def test_a_snapshot_is_complete_only_when_all_before_its_version_is_decided() -> None:
    job = _begun(terms={"snapshots": True, "snapshot_steps": 6})
    (capture,) = _of(Capture, _reported(job, 4))
    assert capture.version == 6
    assert not _of(Commit, _store(job, capture)), "nobody could evaluate version 4 any more after going back to 6"
    assert [commit.version for commit in _of(Commit, _result(job, 4, 1.0))] == [6]


def test_where_the_best_is_kept_each_version_that_is_evaluated_gets_a_snapshot_before_it_is_passed() -> None:
    job = _begun(stops=(), terms={"snapshots": True}, evaluation=Evaluation(keep_best="loss"))
    assert job.view.orders.lease == Lease(4, "w2", until=4), "its snapshot is not asked for"
    (capture,) = _of(Capture, _reported(job, 1))
    assert capture.version == 4
    assert job.view.orders.lease == Lease(4, "w2", until=8)
    _reported(job, 4)
    _store(job, capture)
    assert Say("step 4 has the lowest loss so far, 1: its snapshot is kept") in _result(job, 4, 1.0)
    ledger = job.machine.course.evaluations
    assert ledger.decided.best == Best(4, 1.0, KeepBest("loss"))
    assert job.machine.course.kept == (4, 4)
    assert job.machine.course.rules.best == KeepBest("loss")


def test_a_worker_with_another_script_is_refused() -> None:
    job = _begun()
    effects = job.come("w3")
    effects = job.play(From("w3", Evaluates((EVERY + 1,), stops=(RULE,))))
    (refused,) = _of(Refuse, effects)
    assert refused.member == "w3"
    assert "other evaluations" in refused.reason
    assert job.machine.last_word is None


def test_rules_without_evaluations_end_the_job_with_a_sentence() -> None:
    job = _Job(_terms(1, 1), record=_record())
    job.come("s0", "w0")
    (abort,) = _of(Aborted, job.play(From("w0", Evaluates((), stops=(RULE,)))))
    assert "write @run.every(100)" in abort.reason


def test_a_job_that_waits_says_for_which_evaluation() -> None:
    job = _begun()
    _reported(job, 8)
    assert job.machine.waiting_for() == "the evaluation of step 4 by w2"


def test_a_worker_that_is_refused_keeps_no_replicas() -> None:
    job = _begun(standby=0, terms={"workers_max": 3})
    job.come("w2")
    assert "w2" in job.view.assignments[-1].replicas
    job.play(From("w2", Evaluates((EVERY + 1,), stops=(RULE,))))
    assert all("w2" not in assignment.replicas for assignment in job.view.assignments)
    assert "w2" not in {member.id for member in job.view.workers}


def test_a_standby_ends_no_job_with_rules_that_it_cannot_have() -> None:
    job = _begun(stops=(), down={"type": "bf16"})
    (refused,) = _of(Refuse, job.play(From("w2", Evaluates((EVERY,), stops=(RULE,)))))
    assert "run.stop_when is not supported together with a lossy down=" in refused.reason
    assert job.machine.last_word is None
    (abort,) = _of(Aborted, job.play(From("w1", Evaluates((EVERY,), stops=(RULE,)))))
    assert "run.stop_when is not supported together with a lossy down=" in abort.reason


def test_a_standby_ends_no_job_with_rules_without_evaluations() -> None:
    job = _Job(_terms(2, 2), record=_record())
    job.come("s0", "s1", "w0", "w1", "w2")
    _reported(job, 1)
    (refused,) = _of(Refuse, job.play(From("w2", Evaluates((), stops=(RULE,)))))
    assert "write @run.every(100)" in refused.reason
    assert job.machine.last_word is None
    assert job.view.orders.lease is None, "nobody waits for what it said"


def test_a_job_that_has_begun_without_rules_gets_none() -> None:
    job = _Job(_terms(2, 2), record=_record())
    job.come("s0", "s1", "w0", "w1", "w2")
    job.play(From("w0", Evaluates(())), From("w1", Evaluates(())))
    _reported(job, 1)
    assert _of(Refuse, job.play(From("w2", Evaluates((1,), stops=(RULE,)))))
    assert job.view.orders.lease is None


def test_who_is_left_alone_cannot_change_the_rules_of_a_job_that_has_begun() -> None:
    job = _begun(workers=1, standby=0)
    job.play(Left("w0", "killed"))
    job.come("w1")
    assert _of(Refuse, job.play(From("w1", Evaluates((EVERY,), stops=(StopWhen(metric="loss", below=1e9),)))))
    job.come("w2")
    assert not _of(Refuse, job.play(From("w2", Evaluates((EVERY,), stops=(RULE,)))))


def test_a_job_that_waits_for_a_snapshot_to_begin_names_no_evaluation() -> None:
    job = _begun(stops=(), terms={"snapshots": True}, evaluation=Evaluation(keep_best="loss"))
    job.machine.course.applied = 3  # all of them came to version 4 before the servers could be asked
    assert job.view.orders.lease == Lease(4, "w2", until=4)
    sentence = "a snapshot of step 4 to begin, because it is evaluated"
    assert job.machine.waiting_for() == sentence
    leased = LeasedVersion(WorkerMachine("w0", 1, frozenset(), STEPS))
    assert leased.awaited(job.view) == sentence
    later = msgspec.structs.replace(job.view, orders=StandingOrders(lease=Lease(4, "w2", until=8)))
    assert leased.awaited(later) == "the evaluation of step 4 by w2, before step 8"


def _taken_over(job: _Job) -> _Job:
    """The job with a new coordinator, after all members have come back; nobody has said what the script evaluates."""
    kept = msgspec.json.decode(msgspec.json.encode(job.machine.state()), type=ClusterState)
    after = _Job(job.machine.terms, kept, record=job.record)
    for name, incarnation in job.incarnations.items():
        after.join(name, incarnation=incarnation)
    return after


def test_a_new_coordinator_knows_what_the_script_evaluates() -> None:
    """Else whoever comes first would say so, and the honest ones would be refused."""
    job = _taken_over(_begun())
    assert _of(Refuse, job.play(From("w2", Evaluates((EVERY,), stops=(StopWhen(metric="loss", below=1e9),)))))
    for name in ("w0", "w1"):
        assert not _of(Refuse, job.play(From(name, Evaluates((EVERY,), stops=(RULE,)))))
    _reported(job, 4)
    _result(job, 4, 1.0, "w0")
    assert job.machine.course.evaluations.decided.version == 4


def test_a_coordinator_that_does_not_know_what_is_evaluated_completes_no_snapshot() -> None:
    job = _begun(terms={"snapshots": True, "snapshot_steps": 6})
    after = _taken_over(job)
    ledger = after.machine.course.evaluations
    ledger.periods, ledger.stops, ledger.registered = (), (), False  # the journal had no room for it
    after.machine.course.furthest = job.machine.course.furthest
    (capture,) = _of(Capture, _reported(after, 4))
    assert not _of(Commit, _store(after, capture))
    for name in ("w0", "w1", "w2"):
        after.play(From(name, Evaluates((EVERY,), stops=(RULE,))))
    assert [commit.version for commit in _of(Commit, _result(after, 4, 1.0))] == [6]


def test_results_of_versions_that_are_not_due_do_not_count() -> None:
    job = _begun()
    _result(job, 5, 1.0)
    assert job.machine.course.evaluations.results == {}


def test_results_of_versions_that_do_not_exist_yet_displace_no_others() -> None:
    job = _begun(steps=2000)
    for version in range(1000, 1400, EVERY):
        _result(job, version, 1.0)
    for version in (4, 8, 12):
        _reported(job, version)
        _result(job, version, 1.0)
        assert job.machine.course.evaluations.decided.version == version
    assert len(job.machine.course.evaluations.results) <= KEPT


def test_what_a_snapshot_in_progress_needs_is_known_however_long_it_takes() -> None:
    ledger = EvaluationLedger(periods=(1,), asked=3)
    for version in range(1, 3 + 2 * KEPT):
        ledger.add(version, {"loss": 1.0}, version)
        ledger.decide(Rules((RULE,)), version, version + 1)
    assert ledger.decided_at(3) == Decided().after(Rules((RULE,)), 1, {"loss": 1.0}, 2).after(
        Rules((RULE,)), 2, {"loss": 1.0}, 3).after(Rules((RULE,)), 3, {"loss": 1.0}, 4)  # fmt: skip
