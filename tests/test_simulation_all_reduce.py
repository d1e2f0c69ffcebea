"""The whole cluster in one process where workers have the state: what is planted is found, what is for free is free."""

from __future__ import annotations

import pytest

from rallypoint.core.policy import AllReduce
from rallypoint.core.view import View
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.worker import SimulatedWorker
from test_simulation import _computed, _plan, _play_all

JOB = SimulatedJob(replicas=3, steps=14, sync=AllReduce())


@pytest.mark.slow
def test_a_model_that_is_still_being_copied_when_all_begin_again_is_whole_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its worker may be the one that brings the state. The simulation looks at every model that is installed."""
    monkeypatch.setattr(SimulatedWorker, "install_s", 0.5)
    job = SimulatedJob(shards=5, buffers=2, replicas=3, steps=14, compute_s=0.02, sync=AllReduce())
    strikes = tuple(Fault(0.3 + 0.25 * at, "crash", "server", 0.1) for at in range(12))
    plans = [_plan(seed, job, 4, 2, *strikes, heartbeat=2.0) for seed in range(16)]
    _play_all(plans)
    monkeypatch.setattr(WorkerMachine, "_rewind", _slots_are_free_at_once)
    with pytest.raises(AssertionError, match="other bytes"):
        _play_all(plans)


def _slots_are_free_at_once(self: WorkerMachine, view: View) -> None:
    _rewind(self, view)
    self._finishing = False


_rewind = WorkerMachine._rewind


@pytest.mark.slow
def test_when_nothing_fails_every_replica_of_every_step_is_computed_once() -> None:
    for workers, servers in ((1, 1), (2, 3), (4, 2)):
        for result in _play_all(_plan(seed, JOB, workers, servers) for seed in range(3)):
            once = [(step, r) for step in range(JOB.steps) for r in range(JOB.replicas)]
            computed, said = _computed(result), result.outcome.said
            assert sorted(set(computed)) == once
            # An idle worker follows no version, so it has to be given the state when it gets a slow one's replica. That
            # begins a new generation from a version that all have reached, and the step in progress is computed again:
            # it is in the nature of the mode (`WorkersHoldState`), not a defect. Workers that all compute lose nothing.
            moved = sum("workers are not equally fast" in sentence for sentence in said) if workers > 3 else 0
            assert len(computed) - len(once) <= moved * JOB.replicas
            assert not any("going back" in sentence for sentence in said)


@pytest.mark.slow
@pytest.mark.parametrize(("role", "every", "times", "down"), [("server", 0.7, 7, 0.5), ("worker", 1.5, 4, 0.3)])
def test_losing_servers_or_one_worker_at_a_time_rolls_nothing_back(
    role: str, every: float, times: int, down: float
) -> None:
    crashes = tuple(Fault(every * at, "crash", role, down) for at in range(1, times + 1))
    for result in _play_all(_plan(seed, JOB, 3, 2, *crashes, snapshots=False) for seed in range(8)):
        assert not any("going back" in said for said in result.outcome.said)


def test_workers_that_stand_by_end_with_the_last_state() -> None:
    """That every one of them is done, and with the right bytes, is checked of each run."""
    for result in _play_all(_plan(seed, JOB, 3, 2, workers_max=2) for seed in range(6)):
        assert len({worker for worker, _, _ in result.outcome.computed}) == 2
