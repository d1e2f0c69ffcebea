"""The contract of every policy as tests to inherit. It needs hypothesis."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_play import ACTIONS, Cast, ShardPlay, in_order, missing, play

from rallypoint.core.policy import Policy, Verdict
from rallypoint.core.shard.effects import Drop
from rallypoint.core.shard.events import Contribute, Initialise
from rallypoint.core.shard.machine import ShardMachine

_PURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
_CASTS = st.builds(Cast, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
_SCHEDULES = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=100)


class PolicyContract:
    """What `rallypoint.core.policy.Policy` promises.

    Override the fixture `policy`, and `bound` and `needed` where they differ.

    Attributes:
        bound: how many steps a replica may be ahead of the slowest replica that it sees; None: any number.
    """

    bound: int | None = None

    @pytest.fixture
    def policy(self) -> Policy:
        """The policy under test."""
        raise NotImplementedError("override the fixture `policy`")

    def needed(self, replicas: int) -> int | None:
        """Return how many contributions of a round make an update (aligned policy); None (streaming policy)."""
        return None

    def _play(self, policy: Policy, cast: Cast, schedule: Iterable[tuple[str, int]]) -> ShardPlay:
        return play(policy, cast, schedule, bound=self.bound, needed=self.needed(cast.replicas))

    @_PURE
    @given(cast=_CASTS, schedule=_SCHEDULES)
    def test_whatever_comes_each_contribution_counts_once_and_everybody_gets_to_the_end(
        self, policy: Policy, cast: Cast, schedule: list[tuple[str, int]]
    ) -> None:
        """With repeats, late and early contributions, repeated requests and slow backups.

        `ShardPlay` checks every effect.
        """
        self._play(policy, cast, schedule)

    @pytest.mark.parametrize("backup", [False, True])
    @pytest.mark.parametrize("replicas", [1, 4])
    def test_when_nothing_is_late_there_are_as_many_updates_as_there_have_to_be(
        self, policy: Policy, replicas: int, backup: bool
    ) -> None:
        cast = Cast(replicas, 3, backup)
        tally = self._play(policy, cast, in_order(cast)).machine.tally
        assert tally.applied + tally.folded == 3 * (self.needed(replicas) or replicas)

    @_PURE
    @given(cast=_CASTS, schedule=_SCHEDULES)
    def test_the_same_schedule_gives_the_same_updates(
        self, policy: Policy, cast: Cast, schedule: list[tuple[str, int]]
    ) -> None:
        first, again = self._play(policy, cast, schedule), self._play(policy, cast, schedule)
        assert first.contents == again.contents
        assert first.machine.tally == again.machine.tally

    def test_a_repeat_changes_nothing(self, policy: Policy) -> None:
        machine = self._machine(policy, 3)
        machine.handle(Contribute(0, 0, 1.0, 1))
        before = (machine.version, list(machine.clocks), missing(machine), machine.tally.applied)
        assert machine.handle(Contribute(0, 0, 1.0, 2)) == [Drop(2)]
        assert (machine.version, list(machine.clocks), missing(machine), machine.tally.applied) == before
        assert machine.tally.repeats == 1

    def test_what_comes_too_early_is_refused_without_fault_and_a_stranger_s_with(self, policy: Policy) -> None:
        machine = self._machine(policy, 3)
        assert policy.admit(machine, 1, 0) is Verdict.REJECT
        assert policy.admit(machine, 0, 3) is Verdict.REJECT
        assert machine.handle(Contribute(1, 0, 1.0, 1)) == [Drop(1)]
        (refused,) = machine.handle(Contribute(0, 3, 1.0, 2))
        assert isinstance(refused, Drop)
        assert refused.fault == "replica 3 does not contribute to this shard (it has 3)"

    def test_nothing_is_complete_without_a_contribution(self, policy: Policy) -> None:
        assert not policy.complete(self._machine(policy, 2))

    def test_a_contribution_counts_for_something_and_never_for_more_because_it_is_late(self, policy: Policy) -> None:
        machine = self._machine(policy, 4)
        rates = [policy.rate(machine, staleness) for staleness in (0, 1, 2, 7, 1000)]
        assert rates == sorted(rates, reverse=True)
        assert all(0.0 < rate <= 1.0 for rate in rates)

    def test_everybody_may_have_the_first_parameters(self, policy: Policy) -> None:
        assert policy.serve(self._machine(policy, 4), 0)

    def _machine(self, policy: Policy, replicas: int) -> ShardMachine:
        """Return a machine that has its first parameters."""
        machine = ShardMachine(policy, replicas, rounds=9)
        machine.handle(Initialise(0))
        return machine


