"""Trials of other values begin and end while members and coordinators die: the same bytes."""

from __future__ import annotations

import msgspec
import pytest

from rallypoint.core.cluster import course
from rallypoint.core.cluster.storing import snapshots
from rallypoint.core.job import JobRecord
from rallypoint.core.plan import failures as tuned_period
from rallypoint.core.plan import tuning
from rallypoint.core.plan import tuning as tuner
from rallypoint.core.plan.failures import TunedPeriod
from rallypoint.core.plan.tuning import KNOBS, Tuned, Tuning
from rallypoint.core.view import View
from rallypoint.testing.simulation.run import simulate


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Tuned]:
    """Every job is tuned, by trials of a step: a simulated job has few of them. What was decided, in order. How often
    snapshots are taken is chosen too."""
    decided: list[Tuned] = []
    look = Tuning.look

    def tuned(self: Tuning, view: View, record: JobRecord) -> Tuned | None:
        found = look(self, view, msgspec.structs.replace(record, config={**record.config, "tune": "auto"}))
        decided.extend([found] if found else [])
        return found

    monkeypatch.setattr(Tuning, "look", tuned)
    for module, names in ((tuning, ("_FIRST", "_WARM_UP")), (tuner, ("SCREENED", "MEASURED", "WARM_UP"))):
        for name in names:
            monkeypatch.setattr(module, name, 0 if "WARM" in name else 1)
    for module in (course, snapshots):
        monkeypatch.setattr(module, "tunes_period", lambda course: course.terms.snapshots)
    for name, value in (("SNAPSHOTS", 1), ("_LAST", 2), ("SHORTEST_S", 0.2), ("PRIOR_S", 5.0)):
        monkeypatch.setattr(tuned_period, name, value)
    return decided


def play(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of this seed; those of odd ones begin with the pace: few get as far as the second knob."""
    monkeypatch.setattr(tuning, "KNOBS", dict(reversed(KNOBS.items())) if seed % 2 else KNOBS)
    simulate(seed)


@pytest.mark.some("0", "3", "7")
@pytest.mark.parametrize("seed", range(12))
def test_a_job_that_is_tuned_ends_with_the_same_bytes(
    seed: int, quick: list[Tuned], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2200))
def test_many_jobs_that_are_tuned(seed: int, quick: list[Tuned], monkeypatch: pytest.MonkeyPatch) -> None:
    play(seed, monkeypatch)


@pytest.mark.slow
def test_trials_of_each_knob_begin_in_the_middle_of_jobs_and_some_end_with_their_coordinator(
    quick: list[Tuned], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(16):
        play(seed, monkeypatch)
    for knob in KNOBS:
        assert sum(f"{knob} " in said and " is tried" in said for _, said in quick) >= 1, knob
    assert sum("ended with its coordinator" in said for _, said in quick) >= 1


@pytest.mark.slow
def test_periods_are_chosen_in_the_middle_of_jobs(quick: list[Tuned], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    look = TunedPeriod.look

    def noted(self: TunedPeriod, step: int, now: float, *, taking: bool) -> str:
        said = look(self, step, now, taking=taking)
        chosen.extend([said] if said else [])
        return said

    monkeypatch.setattr(TunedPeriod, "look", noted)
    for seed in range(18):
        play(seed, monkeypatch)
    assert len(chosen) >= 2
