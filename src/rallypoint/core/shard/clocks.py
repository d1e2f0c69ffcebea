"""The progress of each replica, under a streaming policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


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
