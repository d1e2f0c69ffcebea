"""The simulation plays codec states: they follow their replicas, are in snapshots, and none is used twice or stale."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core.policy import Async, BoundedStaleness, LocalSteps, Sync
from rallypoint.core.worker.custody import CodecStateCustody
from rallypoint.core.worker.handover import Handover
from rallypoint.testing.simulation.codec_states import ServerCodecStates
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import CodecState, parse_policy, replay_line, word_for
from rallypoint.testing.simulation.run import SimulationFailed, simulate

FIXED = range(18)
ENOUGH = range(150)  # seeds within which a planted bug has to be found
OTHERS = tuple(CodecState(mode) for mode in (Sync(quorum=2), BoundedStaleness(1), Async(), LocalSteps(2, fragments=2)))


def test_codec_states_follow_replicas_and_are_restored_so_that_the_bytes_are_those_of_an_undisturbed_job() -> None:
    """Two of three plans promise the bytes: workers leave as told and join, or servers die and the job rolls back."""
    assert {make_plan(seed, CodecState()).job.loses_states for seed in FIXED} == {True, False}
    for seed in FIXED:
        simulate(seed, CodecState())


@pytest.mark.parametrize("policy", OTHERS, ids=word_for)
def test_where_codec_states_are_lost_none_is_used_twice_and_none_is_stale(policy: CodecState) -> None:
    for seed in FIXED[:6]:
        simulate(seed, policy)


def test_a_worker_that_computes_a_replica_just_reassigned_does_not_keep_its_codec_states() -> None:
    """It had not recalled them, so it never gave them back, and the replica's next worker waited for it for ever."""
    simulate(137, CodecState(BoundedStaleness(1)))


@pytest.mark.parametrize("policy", [CodecState(), *OTHERS], ids=word_for)
def test_the_word_for_a_codec_with_state_is_read_back_and_is_in_the_line_that_replays(policy: CodecState) -> None:
    word = word_for(policy)
    assert word is not None
    assert parse_policy(word) == policy
    assert f"--policy {word} --seed 3" in replay_line(3, policy)


@pytest.mark.parametrize("word", ["codec-state:", "codec-state:codec-state", "codec-state:all-reduce"])
def test_what_no_codec_state_can_be_played_with_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="use sync, quorum:K"):
        parse_policy(word)


def _nothing_is_given(self: Handover, keeps: frozenset[int]) -> list[Any]:
    """The worker lets go of replicas, and says nothing to the primaries."""
    self._here &= keeps
    return []


def _a_roll_back_changes_nothing(self: CodecStateCustody) -> None:
    """The encoder goes on with codec states of a stale generation."""


def _nobody_waits(self: Handover, replica: int) -> bool:
    """A replica is computed before its codec states have come."""
    return True


def _no_copies(self: ServerCodecStates, shard: int, version: int, record: Any) -> bool:
    """Snapshots contain no codec states."""
    return False


@pytest.mark.parametrize(("owner", "name", "bug", "sentence"), [
    (Handover, "release", _nothing_is_given, "stuck after|made from"),
    (Handover, "ready", _nobody_waits, "made from"),
    (CodecStateCustody, "rolled_back", _a_roll_back_changes_nothing, "codec state of generation|codec state is ahead"),
    (ServerCodecStates, "awaited", _no_copies, "made from no codec state"),
], ids=["nothing is given", "nobody waits", "not rolled back", "not in snapshots"])  # fmt: skip
def test_a_bug_in_codec_states_planted_on_purpose_is_found(
    owner: Any, name: str, bug: Callable[..., Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert re.search(sentence, _found())


def _found() -> str:
    """What the first seed that fails says."""
    for seed in ENOUGH:
        try:
            simulate(seed, CodecState())
        except SimulationFailed as failed:
            return str(failed)
    pytest.fail(f"not found within {len(ENOUGH)} seeds")
