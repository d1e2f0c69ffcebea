"""What is decided from the results of evaluations, as a pure function of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import msgspec
import pytest
import torch

from rallypoint.core import decisions
from rallypoint.core.decisions import Best, Decided, KeepBest, ReduceOnPlateau, Rules, StopWhen, reductions_at
from rallypoint.core.view import EarlyEnd
from rallypoint.errors import ConfigError

EVERY = 10


def _decided(rules: Rules, values: Iterable[float | None], decided: Decided | None = None) -> Decided:
    """After evaluations of versions 10, 20, ... with these values of `loss`; None: that version has no result."""
    decided = decided or Decided()
    for value in values:
        version = decided.version + EVERY
        decided = decided.after(rules, version, {} if value is None else {"loss": value}, version + EVERY)
    return decided


def _stops(*values: float | None, **rule: object) -> EarlyEnd | None:
    return _decided(Rules(stops=(StopWhen(metric="loss", **rule),)), values).stop  # type: ignore[arg-type]


def test_patience_counts_evaluations_without_an_improvement() -> None:
    stop = _stops(3.0, 2.0, 2.1, 2.0, patience=2)
    assert stop == EarlyEnd(50, "loss has not become lower than 2 in 2 evaluations", "run.stop_when")
    assert _stops(3.0, 2.0, 2.1, 1.9, 2.0, patience=2) is None
    assert _stops(3.0, 2.9, 2.8, patience=1, min_delta=0.5) == _stops(3.0, 2.9, patience=1, min_delta=0.5)
    assert _stops(0.1, 0.2, 0.1, patience=1, mode="max") == EarlyEnd(
        40, "loss has not become higher than 0.2 in 1 evaluations", "run.stop_when"
    )


def test_it_stops_below_or_above_a_limit_with_the_next_version_that_is_due() -> None:
    assert _stops(3.0, 1.9, below=2.0) == EarlyEnd(30, "loss is 1.9, below 2", "run.stop_when")
    assert _stops(2.0, below=2.0) is None
    assert _stops(0.8, 0.95, above=0.9) == EarlyEnd(30, "loss is 0.95, above 0.9", "run.stop_when")


def test_a_figure_that_is_not_finite_is_no_improvement_and_one_that_is_missing_does_not_count() -> None:
    assert _stops(1.0, math.nan, patience=1) is not None
    assert _stops(1.0, -math.inf, patience=1) is not None
    assert _stops(1.0, None, None, patience=1) is None


def test_nothing_ends_the_job_after_the_last_evaluation_and_the_first_end_counts() -> None:
    rules = Rules(stops=(StopWhen(metric="loss", below=2.0),))
    assert Decided().after(rules, 10, {"loss": 1.0}, None).stop is None
    assert _decided(rules, [1.0, 0.5]).stop == EarlyEnd(20, "loss is 1, below 2", "run.stop_when")


@pytest.mark.parametrize(
    "rule", [{}, {"patience": -1}, {"patience": 1, "min_delta": -1.0}, {"below": math.nan}, {"below": 1.0, "mode": "x"}]
)
def test_a_rule_that_makes_no_sense_is_refused(rule: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"run\.stop_when\('loss'\)"):
        decisions.checked(StopWhen(metric="loss", **rule))  # type: ignore[arg-type]


def test_the_best_is_the_first_with_the_best_value() -> None:
    low, high = Rules(best=KeepBest("loss")), Rules(best=KeepBest("loss", "max"))
    assert _decided(low, [3.0, 1.0, 1.0, math.nan, 2.0]).best == Best(20, 1.0, KeepBest("loss"))
    assert _decided(high, [3.0, 1.0, 3.0]).best == Best(10, 3.0, KeepBest("loss", "max"))
    assert _decided(low, [None, math.nan]).best is None


@pytest.mark.parametrize("seed", range(40))
def test_the_rates_are_those_of_torchs_reduce_lr_on_plateau(seed: int) -> None:
    rng = random.Random(seed)
    rule = ReduceOnPlateau(
        "loss", factor=rng.choice([0.1, 0.5, 0.9]), patience=rng.randint(0, 3), threshold=rng.choice([0.0, 1e-4, 0.1]),
        threshold_mode=rng.choice(["rel", "abs"]), cooldown=rng.randint(0, 3), min_lr=rng.choice([0.0, 1e-3]),
        eps=rng.choice([1e-8, 1e-3]), mode=rng.choice(["min", "max"]),
    )  # fmt: skip
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **{
        name: getattr(rule, name) for name in rule.__struct_fields__ if name != "metric"
    })  # fmt: skip
    decided, value = Decided(), 3.0
    for _ in range(60):
        value = rng.choice([value, value * rng.uniform(0.8, 1.2), math.nan, -value])
        theirs.step(value)
        decided = _decided(Rules(plateau=rule), [value], decided)
        rate = rule.reduced(0.1, reductions_at(decided.reductions, decided.version + EVERY))
        assert rate == optimizer.param_groups[0]["lr"]


def test_a_reduction_counts_from_the_next_version_that_is_due() -> None:
    decided = _decided(Rules(plateau=ReduceOnPlateau("loss", patience=0)), [1.0, 1.0])
    assert decided.reductions == (30,)
    assert [reductions_at(decided.reductions, version) for version in (20, 29, 30, 31)] == [0, 0, 1, 1]


def test_what_is_decided_goes_through_a_journal_and_a_manifest_and_goes_on_the_same() -> None:
    rules = Rules((StopWhen(metric="loss", patience=4),), ReduceOnPlateau("loss", patience=1), KeepBest("loss"))
    values = [3.0, 2.0, 2.5, 2.5, 1.9, 2.0, 2.0, 2.0, 2.0]
    whole = _decided(rules, values)
    assert whole.stop is not None
    assert whole.reductions
    for cut in range(len(values)):
        begun = _decided(rules, values[:cut])
        for codec in (msgspec.json, msgspec.msgpack):
            kept = codec.decode(codec.encode(begun), type=Decided)
            assert _decided(rules, values[cut:], kept) == whole


def test_a_job_that_somebody_lets_go_on_after_its_early_end_begins_its_rules_anew() -> None:
    rules = Rules((StopWhen(metric="loss", patience=1),), ReduceOnPlateau("loss", patience=0))
    decided = _decided(rules, [1.0, 1.0]).going_on(30)
    assert decided.stop is None
    assert decided.reductions == (30,)
    assert _decided(rules, [1.0], decided).stop is None


def test_the_best_of_another_rule_is_not_compared_with_figures_of_this_one() -> None:
    """As in a run that is resumed with another `keep_best` or `best_is`."""
    before = _decided(Rules(best=KeepBest("loss")), (0.5, 0.7))
    assert before.best == Best(10, 0.5, KeepBest("loss"))
    highest = KeepBest("loss", "max")
    assert _decided(Rules(best=highest), (0.1, 0.2), before).best == Best(40, 0.2, highest)
    assert _decided(Rules(best=KeepBest("accuracy")), (0.1,), before).best is None
    assert _decided(Rules(best=KeepBest("loss")), (0.6,), before).best == before.best
