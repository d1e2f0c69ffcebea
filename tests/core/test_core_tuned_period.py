"""How often to take snapshots, by Daly's rule, from what the job has seen: only where nobody has said it."""

from __future__ import annotations

import pytest
from test_core_stop import _begun

from rallypoint.core.cluster.terms import SnapshotPeriod
from rallypoint.core.plan.failures import LONGEST_S, PRIOR_S, SHORTEST_S, TunedPeriod, daly_period


class Played:
    """A job of steps of a second, of which every tenth lasts `cost` longer, because a snapshot is under way."""

    def __init__(self, cost: float) -> None:
        self.period, self.cost, self.now, self.step = TunedPeriod(), cost, 0.0, 0

    def play(self, steps: int) -> list[str]:
        said = []
        for _ in range(steps):
            self.step += 1
            taken = self.step % 10 == 0
            if taken:
                self.period.look(self.step - 1, self.now, taking=True)
            self.now += 1.0 + (self.cost if taken else 0.0)
            said.append(self.period.look(self.step, self.now, taking=False))
        return [line for line in said if line]


def test_the_period_is_dalys_for_what_a_snapshot_costs_and_a_loss_in_an_hour_before_any_was_seen() -> None:
    played = Played(cost=2.0)
    (said,) = played.play(60)
    assert played.period.seconds == pytest.approx(daly_period(2.0, PRIOR_S + 36.0), rel=0.02)
    assert said.startswith(f"a snapshot is due every {played.period.seconds:.3g} s from now on (Daly): one costs 2 s")
    assert "and the state was lost never in" in said


def test_losses_make_the_period_shorter_and_it_says_their_number() -> None:
    played = Played(cost=2.0)
    played.play(60)
    before = played.period.seconds
    for _ in range(3):
        played.period.went_back()
    (said,) = played.play(20)
    assert played.period.seconds == pytest.approx(before / 2, rel=0.05), "four losses in place of one"
    assert "the state was lost 3 times in" in said


def test_the_time_in_which_the_job_went_back_is_no_snapshots_cost() -> None:
    played = Played(cost=2.0)
    played.play(45)
    played.period.went_back()
    played.now += 500.0
    played.play(60)
    assert played.period.seconds < daly_period(3.0, PRIOR_S)


@pytest.mark.parametrize(("cost", "bound"), [(0.0, SHORTEST_S), (50_000.0, LONGEST_S)])
def test_a_period_has_bounds(cost: float, bound: float) -> None:
    played = Played(cost)
    played.play(40)
    assert played.period.seconds == pytest.approx(bound, rel=0.2 if cost == 0.0 else 0.0)


def test_nothing_changes_before_three_snapshots_were_seen() -> None:
    played = Played(cost=2.0)
    assert played.play(29) == []
    assert played.period.seconds == 0.0


@pytest.mark.parametrize(
    ("tune", "told", "counts"), [("auto", True, 123.0), ("auto", False, 60.0), ("off", True, 60.0)]
)
def test_a_chosen_period_counts_only_where_nobody_has_said_another(tune: str, told: bool, counts: float) -> None:
    job = _begun(snapshots=True, snapshot_seconds=60.0, snapshot_tuned=told)
    course = job.machine.course
    assert course.record is not None
    course.record.config["tune"] = tune
    course.tuned_period.seconds = 123.0
    assert course.snapshot_period == SnapshotPeriod(0, counts)
