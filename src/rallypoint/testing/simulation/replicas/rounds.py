"""What a replica computes in a round of local steps with a delay: a pure function of what it had and the version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rallypoint.core.cadence import Cadence
from rallypoint.testing.simulation.replicas.contents import combine

Names = tuple[int, ...]  # of a replica's parameters, or of a version, by shard


@dataclass(frozen=True)
class Trained:
    """A replica's own parameters, and its optimizer's state. 0: a new optimizer."""

    values: Names
    state: int = 0

    def stepped(self, round: int, replica: int, steps: int) -> Trained:
        """After so many steps of the round."""
        if not steps:
            return self
        made = combine(round, replica, steps, self.state, *self.values, 71)
        return Trained(tuple(combine(made, shard, 72) for shard in range(len(self.values))), combine(made, 73))

    def mixed(self, version: Names, shards: Sequence[int]) -> Trained:
        """The version of these shards is mixed in."""
        return replace(self, values=tuple(
            combine(own, new, 74) if shard in shards else own
            for shard, (own, new) in enumerate(zip(self.values, version, strict=True))
        ))  # fmt: skip

    def contributions(self, round: int, replica: int, version: Names) -> Names:
        """The version minus the replica's own parameters, by shard."""
        return tuple(
            combine(shard, round, replica, own, start, 75)
            for shard, (own, start) in enumerate(zip(self.values, version, strict=True))
        )


@dataclass(frozen=True)
class Rounds:
    """The rounds of one job. Each has `steps` steps; after the first `ahead` of them its version is mixed in."""

    cadence: Cadence
    steps: int
    ahead: int

    def first_steps(self, trained: Trained, round: int, replica: int) -> Trained:
        """What the replica comes to before the version is mixed in."""
        return trained.stepped(round, replica, self.ahead)

    def other_steps(self, trained: Trained, round: int, replica: int, version: Names, *, mixes: bool) -> Trained:
        """What it comes to after that. `mixes`: it did not start from this version."""
        due = [shard for shard in range(len(version)) if self.cadence.due(shard, round - 1)] if mixes else []
        return trained.mixed(version, due).stepped(round, replica, self.steps - self.ahead)

    def undisturbed(self, trained: Trained | None, round: int, replica: int, version: Names) -> Trained:
        """The replica's round from beginning to end, without any cluster. None: it starts from the version."""
        began = self.first_steps(Trained(version) if trained is None else trained, round, replica)
        return self.other_steps(began, round, replica, version, mixes=trained is not None)
