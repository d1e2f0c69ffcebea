"""The simulation plays the state of replicas' own optimizers under local steps: it is kept on one worker only."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core.policy import LocalSteps
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.local import InnerStates
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, word_for
from rallypoint.testing.simulation.replicas.inner import Inner
from rallypoint.testing.simulation.run import simulate
from support.failing import first_failure

FIXED = range(18)
ENOUGH = range(200)  # seeds within which a planted bug has to be found
KEPT, FRAGMENTS = Play("inner", LocalSteps(3)), Play("inner", LocalSteps(3, fragments=3))
FRESH = Play("inner", LocalSteps(2, keep_inner=False))


@pytest.mark.slow
def test_when_every_round_begins_with_a_new_optimizer_the_bytes_are_the_same_whatever_fails() -> None:
    assert not any(make_plan(seed, FRESH).job.loses_states for seed in FIXED)
    assert any(make_plan(seed, FRESH).faults for seed in FIXED)
    for seed in FIXED:
        simulate(seed, FRESH)


@pytest.mark.some("inner-fragments:3")
@pytest.mark.parametrize("policy", [KEPT, FRAGMENTS], ids=word_for)
def test_kept_states_give_the_same_bytes_when_nothing_fails_and_else_the_job_ends(policy: Play) -> None:
    """Each state begins one round, of the generation that it was made in."""
    plans = [make_plan(seed, policy) for seed in FIXED]
    assert {plan.job.loses_states for plan in plans} == {True, False}
    for seed in FIXED:
        simulate(seed, policy)


_begin = InnerStates.begin


def _stale_states_go_on(self: InnerStates[Inner], round: int, replica: int, generation: ViewNumber) -> Inner:
    """After a roll-back the replica goes on with what it had made before it."""
    self.generation = generation
    return _begin(self, round, replica, generation)


def _nothing_is_kept(self: InnerStates[Inner], round: int, replica: int, generation: ViewNumber) -> Inner:
    """Every round begins from zero."""
    return self.new(round)


def _everything_is_kept(self: InnerStates[Inner], round: int, replica: int, generation: ViewNumber) -> Inner:
    """Also where every round is to begin from zero."""
    self.keeps = True
    return _begin(self, round, replica, generation)


def _begun_again_from_zero(self: InnerStates[Inner], round: int, replica: int, generation: ViewNumber) -> Inner:
    """A round that is begun once more does not go back to what it was begun with."""
    if (state := self.kept.get(replica)) is not None and state.round == round:
        del self.kept[replica]
    return _begin(self, round, replica, generation)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "bug", "sentence"), [
    (KEPT, _stale_states_go_on, "is begun with the inner state of|is begun once more after"),
    (KEPT, _begun_again_from_zero, "is begun with two inner states"),
    (KEPT, _nothing_is_kept, "other bytes|two inner states"),
    (FRAGMENTS, _nothing_is_kept, "other bytes|two inner states"),
    (FRESH, _everything_is_kept, "other bytes"),
], ids=["stale", "again from zero", "nothing kept", "nothing kept of fragments", "kept"])  # fmt: skip
def test_a_bug_planted_on_purpose_is_found(
    policy: Play, bug: Callable[..., Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InnerStates, "begin", bug)
    assert re.search(sentence, first_failure(policy, ENOUGH))
