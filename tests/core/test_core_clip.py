"""One decision per step, the same on every server, and torch's own clip factor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.shard.clip import ClipMachine, Measure, Rule, StepVerdict, Tell, clip_scale, total_norm

_NORMS = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=8)


def test_the_others_are_told_once_all_own_shards_are_measured() -> None:
    machine = ClipMachine([0, 1, 2], frozenset({0, 2}), Rule(1.0, False))
    assert machine.measured(0, Measure(2, (2.0,))) == []
    assert machine.measured(0, Measure(0, (1.0,))) == [Tell(0, (Measure(0, (1.0,)), Measure(2, (2.0,))))]
    assert machine.told(0, [Measure(1, (2.0,))]) == [StepVerdict(0, 3.0, 1.0 / (3.0 + 1e-6))]


def test_a_server_alone_decides_alone() -> None:
    machine = ClipMachine([4], frozenset({4}), Rule(None, False))
    assert machine.measured(3, Measure(4, (7.0,))) == [Tell(3, (Measure(4, (7.0,)),)), StepVerdict(3, 7.0, 1.0)]
    assert machine.measured(3, Measure(4, (7.0,))) == [StepVerdict(3, 7.0, 1.0)]  # a repeat changes nothing


def test_the_first_measure_of_a_shard_counts_and_a_repeat_changes_nothing() -> None:
    machine = ClipMachine([0, 1], frozenset({0}), Rule(None, False))
    machine.told(0, [Measure(1, (3.0,))])
    machine.told(0, [Measure(1, (99.0,))])
    assert machine.measured(0, Measure(0, (4.0,)))[-1] == StepVerdict(0, 5.0, 1.0)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_step_with_an_infinite_or_nan_norm_is_skipped_only_where_asked_for(norm: float) -> None:
    skipping = ClipMachine([0], frozenset({0}), Rule(None, True)).measured(0, Measure(0, (norm,)))[-1]
    assert isinstance(skipping, StepVerdict)
    assert skipping.scale is None
    continuing = ClipMachine([0], frozenset({0}), Rule(None, False)).measured(0, Measure(0, (norm,)))[-1]
    assert isinstance(continuing, StepVerdict)
    assert continuing.scale == 1.0


def test_a_step_with_a_bad_replica_is_skipped_only_where_asked_for_and_the_replica_is_named() -> None:
    for skip, scale in ((True, None), (False, 1.0)):
        verdict = ClipMachine([0, 1], frozenset({0, 1}), Rule(None, skip))
        verdict.measured(0, Measure(1, (1.0,), (5, 2)))
        assert verdict.measured(0, Measure(0, (0.0,), (2,)))[-1] == StepVerdict(0, 1.0, scale, (2, 5))


@given(_NORMS)
def test_the_total_norm_is_the_norm_of_the_whole(norms: list[float]) -> None:
    assert total_norm(norms) == pytest.approx(math.hypot(*norms), rel=1e-12)
    assert total_norm(norms) == total_norm(sorted(norms)), "whatever order a server heard of them in, to the last bit"


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), st.sampled_from([0.01, 0.5, 1.0, 5.0, 100.0]))
def test_the_clip_factor_is_that_of_torch(seed: int, size: float, clip: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(48, generator=generator) * size
    parameter = torch.nn.Parameter(torch.zeros(48))
    parameter.grad = gradient.clone()
    their_norm = torch.nn.utils.clip_grad_norm_([parameter], clip)
    norm = total_norm(float(piece.double().norm()) for piece in gradient.split([1, 20, 20, 7]))
    assert norm == pytest.approx(float(their_norm), rel=1e-5)
    torch.testing.assert_close(gradient * clip_scale(norm, clip), parameter.grad, rtol=1e-5, atol=0.0)


def test_without_clip_nothing_is_scaled_and_a_zero_gradient_is_left_alone() -> None:
    assert clip_scale(1e9, None) == 1.0
    assert clip_scale(0.0, 1.0) == 1.0
    assert clip_scale(math.inf, 1.0) == 0.0  # as torch: infinities become NaN, the rest zero


def test_a_nan_norm_scales_by_nan_as_torch_does() -> None:
    assert math.isnan(clip_scale(math.nan, 1.0))


# ---- servers that come and go ----


def test_a_measure_of_a_shard_that_does_not_exist_decides_nothing() -> None:
    machine = ClipMachine([0, 1], frozenset({0}), Rule(1.0, False))
    assert not any(isinstance(e, StepVerdict) for e in machine.told(0, [Measure(0, (1.0,)), Measure(77, (1.0,))]))


def test_a_server_that_died_after_telling_only_some_is_made_up_for_by_those_that_heard_it() -> None:
    heard, missed = (ClipMachine([0, 1, 2], frozenset({own}), Rule(None, False)) for own in (1, 2))
    heard.told(0, [Measure(0, (2.0,))])  # from the server that dies now
    heard.measured(0, Measure(1, (1.0,)))
    missed.told(0, [Measure(1, (1.0,))])
    missed.measured(0, Measure(2, (2.0,)))
    (told,) = heard.retell()
    assert missed.told(told.step, told.measures) == [StepVerdict(0, 3.0, 1.0)]
    (told,) = missed.retell()
    assert heard.told(told.step, told.measures) == [StepVerdict(0, 3.0, 1.0)]


def test_a_shard_that_is_measured_after_the_decision_gets_the_same_decision() -> None:
    machine = ClipMachine([0, 1], frozenset({0}), Rule(1.0, False))
    machine.measured(3, Measure(0, (3.0,)))
    (verdict,) = machine.told(3, [Measure(1, (4.0,))])
    machine.own = frozenset({0, 1})  # promoted
    assert machine.measured(3, Measure(1, (4.0,)))[-1] == verdict
    assert machine.verdict(3) == verdict
    assert machine.verdict(2) is None
    assert machine.told(3, [Measure(1, (4.0,))]) == []


def test_old_decisions_and_measures_are_forgotten_and_what_is_told_of_them_is_not_kept() -> None:
    machine = ClipMachine([0, 1], frozenset({0}), Rule(None, False))
    for step in range(6):
        machine.told(step, [Measure(1, (1.0,))])
        machine.measured(step, Measure(0, (1.0,)))
    assert [machine.verdict(step) is not None for step in range(6)] == [False] * 4 + [True] * 2
    assert machine.told(1, [Measure(0, (1.0,)), Measure(1, (1.0,))]) == []
    assert [told.step for told in machine.retell()] == [4, 5]


def test_a_decision_is_taken_once_however_late_a_repeat_comes() -> None:
    machine = ClipMachine([0], frozenset({0}), Rule(None, False))
    for step in range(4):
        machine.measured(step, Measure(0, (1.0,)))
    assert [machine.told(step, [Measure(0, (1.0,))]) for step in range(4)] == [[], [], [], []]


def test_who_took_over_a_shard_that_was_measured_before_tells_what_it_has_measured_itself() -> None:
    heir = ClipMachine([0, 1, 2], frozenset({1, 2}), Rule(None, False))
    assert heir.measured(0, Measure(2, (2.0,))) == []
    effects = heir.told(0, [Measure(0, (2.0,)), Measure(1, (1.0,))])  # shard 1 was the teller's when it was measured
    assert StepVerdict(0, 3.0, 1.0) in effects
    told = {measure.shard for effect in effects if isinstance(effect, Tell) for measure in effect.measures}
    assert told == {1, 2}  # nobody else can know 2
    assert heir.told(0, [Measure(0, (2.0,)), Measure(1, (1.0,))]) == []


def test_a_loss_scale_that_no_server_knows_ends_no_server() -> None:
    measures, generation = [Measure(0, (0.5,)), Measure(1, (0.0,))], StepVerdict(0, 0.0, 1.0).generation
    verdict = Rule(1.0, scaled=True).verdict(0, measures, generation)
    assert verdict.scale == 1.0
