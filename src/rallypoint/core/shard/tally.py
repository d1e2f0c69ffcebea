"""Counts what happened to a shard's contributions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts each contribution once: as applied, folded (into another's update) or dropped.

    `repeats` counts contributions that arrived a second time (I2). `staleness` is a histogram: how many updates the
    shard had between the version that a contribution was computed from and the update that it became part of.

    Example, a quorum of 2 of 3: replicas 0 and 1 make step 0's update, so `applied` is 2 and `dropped` is 1. When
    replica 2's contribution arrives afterwards, it is the dropped one and is not counted again; sent again, it is a
    repeat.
    """

    applied: int = 0
    folded: int = 0
    dropped: int = 0
    repeats: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    _newest: dict[int, int] = field(default_factory=dict)  # replica -> the newest step that it was counted for
    _first: int = 0  # contributions to steps before this one were counted elsewhere

    def restart(self, version: int) -> None:
        """This server is the shard's primary from `version` on. Contributions before that were counted elsewhere."""
        self._newest.clear()
        self._first = max(0, version)

    def arrived(self, replica: int, step: int) -> None:
        """A contribution was added or held."""
        self._newest[replica] = max(step, self._newest.get(replica, -1))

    def refused(self, replica: int, step: int, *, may_be_late: bool) -> None:
        """A contribution was dropped on arrival.

        It is a repeat, or (with `may_be_late`) the first copy of one that the update did not wait for.
        """
        if not may_be_late or step <= self._newest.get(replica, self._first - 1):
            self.repeats += 1
        else:
            self._newest[replica] = step

    def round(self, added: int, expected: int, *, skipped: bool) -> None:
        """An aligned update took `added` of `expected` contributions. `skipped`: it changed nothing."""
        self.applied += 0 if skipped else added
        self.dropped += expected if skipped else expected - added

    def update(self, staleness: Iterable[int], *, skipped: bool) -> None:
        """A streaming update took contributions with these staleness values, in updates."""
        added = 0
        for late in staleness:
            added += 1
            self.staleness[late] = self.staleness.get(late, 0) + 1
        if skipped:
            self.dropped += added
        else:
            self.applied += 1
            self.folded += added - 1

    def validate(self) -> None:
        """Raise AssertionError unless the counts are possible."""
        counts = (self.applied, self.folded, self.dropped, self.repeats)
        assert all(count >= 0 for count in (*counts, *self.staleness.values())), f"{self} counts below zero"
        assert all(late >= 0 for late in self.staleness), f"{self} has a contribution from a later version"


# The progress of each replica, under a streaming policy.


@dataclass(slots=True)
class Clocks:
    """The clocks of a shard's replicas. A replica's clock is the step of its next contribution.

    Example: replica 1 has contributed steps 0 to 3, so its clock is 4. Under an aligned policy there are no clocks
    (`len` is 0).
    """

    steps: list[int] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)  # the version that contains each replica's last contribution

    @classmethod
    def at(cls, steps: tuple[int, ...], replicas: int, version: int) -> Clocks:
        """Clocks of `replicas` replicas: at `steps`, or all at 0 if `steps` is empty. The shard is at `version`."""
        return cls(list(steps) or [0] * replicas, [max(0, version)] * replicas)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __getitem__(self, replica: int) -> int:
        return self.steps[replica]

    def tick(self, replica: int, version: int) -> None:
        """Advance the replica's clock by 1: its contribution is now part of `version`."""
        self.steps[replica] += 1
        self._versions[replica] = version

    def version(self, replica: int) -> int:
        """The version that contains the replica's last contribution."""
        return self._versions[replica]

    @property
    def mean(self) -> int:
        """The mean clock, rounded down: the shard's position in the learning-rate schedule."""
        return sum(self.steps) // len(self.steps)

    def slowest(self) -> int:
        """The lowest clock s: every replica's contributions to the steps before s are applied."""
        return min(self.steps)

    def visible(self, published: int) -> int:
        """The lowest clock, counting only contributions that are part of version `published`.

        Each replica has at most one contribution that is not published: it gets no new parameters before it is.
        """
        return min(step - (version > published) for step, version in zip(self.steps, self._versions, strict=True))

    def validate(self, replicas: int, version: int) -> None:
        """Raise AssertionError unless there are `replicas` clocks and all of them fit the shard's version."""
        assert len(self.steps) == len(self._versions) == replicas, f"{self}: one clock for each of {replicas} replicas"
        assert min(self.steps) >= 0, f"{self}: a clock below 0"
        assert max(self._versions) <= max(0, version), f"{self}: a contribution is in a version after {version}"
