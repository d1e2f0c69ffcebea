"""A simulated job is resumed from a snapshot, and coordinators die while members gather: the same bytes, and it ends.

A launcher says --resume once; a person's command says it each time, on the job's journal, with a new one, or for
another job, which only reads the first one's snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Origin
from rallypoint.core.cluster.succession import Succession
from rallypoint.testing.simulation.operating import resuming
from rallypoint.testing.simulation.operating.resuming import RESUME, WAYS, Resuming
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.run import simulate
from rallypoint.testing.simulation.store import SimulatedStore
from support.failing import first_failure

KINDS = (
    "sync", "quorum:2", "ssp:1", "async", "fragments:2", "all-reduce", "codec-state", "inner:3", "delay:1", "tables",
    "stopped", "scaled", "decided", "carrying", "store",
)  # fmt: skip


@pytest.mark.some("0", "12")
@pytest.mark.parametrize("seed", range(16))
def test_a_job_that_is_resumed_ends_with_the_same_bytes(seed: int) -> None:
    simulate(seed, parse_policy(f"resumed:{KINDS[seed % len(KINDS)]}"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1064))
def test_many_jobs_that_are_resumed(seed: int) -> None:
    simulate(seed, parse_policy(f"resumed:{KINDS[seed % len(KINDS)]}"))


def test_they_are_resumed_in_each_way_and_coordinators_die_before_the_first_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the tests above would be as well if nothing happened."""
    begun, gathering = Counter[str](), Counter[bool]()
    begins, recovers = Resuming._begin, ClusterMachine._recover

    def begin(self: Resuming, way: str, store: SimulatedStore, command: str) -> None:
        begun[way] += store.newest()[1] > 0
        begins(self, way, store, command)

    def recover(self: ClusterMachine, state: ClusterState) -> None:
        recovers(self, state)
        gathering[self.view is None and state.origin is not None and self.resume is None] += 1

    monkeypatch.setattr(Resuming, "_begin", begin)
    monkeypatch.setattr(ClusterMachine, "_recover", recover)
    for seed in (2, 4, 6, 9):
        simulate(seed, Play("resumed"))
    assert set(begun) == set(WAYS)
    assert sum(begun.values()) >= 4, f"they begin with version 0, most of them: {begun}"
    assert gathering[True] >= 2, "too few coordinators die before the first view"


def _begins_anew(self: Succession) -> Any:
    return self.new_generation("")


def _forgets(state: Any, command: str) -> bool:
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name", "instead", "first", "said"), [
    (Succession, "begin", _begins_anew, 1000, "begins with first weights of"),
    (Origin, "is_elsewhere", False, 1130, "aborted: "),
    (resuming, "begun_by", _forgets, 1000, "the same command goes back to step"),
], ids=["first-weights", "a-fork-without-a-way-back", "back-to-the-snapshot"])  # fmt: skip
def test_a_planted_defect_is_found(
    what: Any, name: str, instead: Callable[..., Any] | bool, first: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what, name, instead)
    assert said in first_failure(Play("resumed"), range(first, first + 20))


def test_plans_have_a_word_and_are_played_again_as_what_they_are() -> None:
    for word in ("resumed", *(f"resumed:{kind}" for kind in KINDS[1:])):
        played = parse_policy(word)
        assert word_for(played) == word
        plan = make_plan(3, played)
        assert plan.played == played
        assert any(fault.kind == RESUME for fault in plan.faults)
    for word in ("resumed:resumed", "resumed:paused", "paused:resumed", "uneven:resumed"):
        with pytest.raises(ValueError, match="no policy"):
            parse_policy(word)
