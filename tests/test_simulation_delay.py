"""The simulation plays a delay: replicas begin rounds before their versions are here, and mix them in later."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core.cluster.terms import Terms
from rallypoint.core.policy import LocalSteps
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.local import Drift, GoneAhead, InnerStates, OwnParameters
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import Play, word_for
from rallypoint.testing.simulation.replicas.inner import DelayedReplicas, Drifting, Inner
from rallypoint.testing.simulation.run import SimulationFailed, play, simulate
from support.failing import first_failure

FIXED = range(18)
ENOUGH = range(200)  # seeds within which a planted bug has to be found
WHOLE = Play("inner", LocalSteps(3, delay=2))
FRAGMENTS = Play("inner", LocalSteps(6, fragments=2, delay=2))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [WHOLE, FRAGMENTS], ids=word_for)
def test_a_delay_gives_the_same_bytes_while_no_worker_dies_and_nothing_rolls_back(policy: Play) -> None:
    """One of three plans promises them: links break, members are slow. In the others the job ends, and a round that is
    computed again on the same worker comes to the same (I2)."""
    plans = [make_plan(seed, policy) for seed in FIXED]
    assert {plan.job.loses_states for plan in plans} == {True, False}
    assert any(plan.faults for plan in plans if not plan.job.loses_states)
    for seed in FIXED:
        simulate(seed, policy)


@pytest.mark.parametrize("seed", [600000591, 600000693, 600000981])
def test_a_worker_whose_links_all_break_goes_ahead_and_keeps_what_its_other_replicas_need(seed: int) -> None:
    """It has two more replicas to compute in this round, and begins the next one with its first meanwhile."""
    simulate(seed, WHOLE)


@pytest.mark.slow
def test_a_shard_that_went_away_and_came_back_in_views_that_a_worker_missed_is_sent_everything_again() -> None:
    """A long pause, through two coordinators' views: its primary is the same one again, and has dropped the step."""
    simulate(600000613, WHOLE)


def test_a_replica_that_goes_ahead_leaves_the_states_of_those_that_are_a_round_behind() -> None:
    states = InnerStates(True, Inner, ahead=True)
    for replica in (0, 1):
        states.begin(0, replica, ViewNumber(1, 1))
        states.made(replica)
    states.begin(1, 0, ViewNumber(1, 1))
    states.made(0)
    behind = states.kept[1]
    states.begin(2, 0, ViewNumber(1, 1))
    assert states.begin(1, 1, ViewNumber(1, 1)) is behind


@pytest.mark.slow
def test_what_is_played_has_replicas_that_go_ahead_and_compute_the_round_before_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = Counter[str]()

    def counted(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any) -> Any:
            result = method(*args)
            counts[name] += result is not False
            return result

        monkeypatch.setattr(owner, name, call)

    counted(DelayedReplicas, "goes_ahead")
    counted(OwnParameters, "resume")
    counted(Drift, "step_back")
    for seed in FIXED:
        simulate(seed, FRAGMENTS)
    assert counts["goes_ahead"] > 100
    assert counts["resume"] > 100
    assert counts["step_back"] > 0


_begin_again = Drifting.step_back


def _resumes_what_is_stale(self: GoneAhead[Any], round: int, replica: int, generation: ViewNumber) -> Any:
    """Also steps of a generation that is over."""
    if self._of is None or self._of[:2] != (round, replica):
        return None
    results, self._of = self._results, None
    return results


def _not_back(self: Drifting) -> None:
    """The round before is computed again from what the steps of the next one have come to."""
    self.round -= 1


def _optimizer_not_back(self: Drifting) -> None:
    """The parameters go back by a round, and the optimizer's state does not."""
    before = self.before
    _begin_again(self)
    self.before = before


def _mixed_by_all(self: OwnParameters[Any, Any], round: int, replica: int) -> bool:
    """A replica that starts from the version mixes it in once more."""
    return True


def _mixed_by_none(self: OwnParameters[Any, Any], round: int, replica: int) -> bool:
    """No version is ever mixed in."""
    return False


def _not_put_away(self: OwnParameters[Any, Any]) -> None:
    """What a replica has come to is not saved before the version is shown."""
    self.in_model = None


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "bug", "sentence"), [
    (Drifting, "step_back", _not_back, "has two values|other bytes"),
    (Drifting, "step_back", _optimizer_not_back, "has two values|other bytes"),
    (OwnParameters, "mixes", _mixed_by_all, "other bytes"),
    (OwnParameters, "mixes", _mixed_by_none, "other bytes"),
    (OwnParameters, "put_away", _not_put_away, "other bytes|two values"),
], ids=["not back", "optimizer not back", "mixed by all", "mixed by none", "not put away"])  # fmt: skip
def test_a_bug_planted_on_purpose_is_found(
    owner: Any, name: str, bug: Callable[..., Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert re.search(sentence, first_failure(FRAGMENTS, ENOUGH))


def test_steps_of_a_generation_that_is_over_are_found_when_they_are_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only server dies while the replica goes ahead: the job goes back to just the version that was on its way."""
    job = SimulatedJob(shards=2, buffers=0, replicas=1, steps=8, sync=WHOLE.of, inner=True, loses_states=True)
    terms = Terms(workers_start=1, workers_max=1, servers=1, snapshot_steps=1, snapshots=True)
    plans = [Plan(seed, job, terms, 1, 1, (Fault(1.0 + seed / 20, "crash", "server", 0.5),)) for seed in range(12)]
    _play_all(plans)
    monkeypatch.setattr(GoneAhead, "resume", _resumes_what_is_stale)
    with pytest.raises(SimulationFailed, match="was begun in"):
        _play_all(plans)


def _play_all(plans: list[Plan]) -> None:
    for plan in plans:
        play(plan)
