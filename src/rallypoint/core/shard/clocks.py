"""How far each replica is, under a streaming policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clocks:
    """A replica's clock is the step of its next contribution. Under an aligned policy there are none (`len` is 0)."""

    steps: list[int] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)  # the version that each replica's last contribution is in

    @classmethod
    def at(cls, steps: tuple[int, ...], replicas: int, version: int) -> Clocks:
        """Clocks of so many replicas: `steps`, or all at 0."""
        return cls(list(steps) or [0] * replicas, [max(0, version)] * replicas)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __getitem__(self, replica: int) -> int:
        return self.steps[replica]

    def tick(self, replica: int, version: int) -> None:
        """The replica's contribution is part of `version`."""
        self.steps[replica] += 1
        self._versions[replica] = version

    def version(self, replica: int) -> int:
        """The version that the replica's last contribution is in."""
        return self._versions[replica]

    @property
    def mean(self) -> int:
        """Where in the schedule the job is, as this shard sees it."""
        return sum(self.steps) // len(self.steps)

    def slowest(self) -> int:
        """The lowest clock: steps of which every replica's contribution has been applied."""
        return min(self.steps)

    def visible(self, published: int) -> int:
        """The lowest clock in version `published`.

        No replica has more than one contribution that is not published: it gets nothing more to compute from.
        """
        return min(step - (version > published) for step, version in zip(self.steps, self._versions, strict=True))

    def validate(self, replicas: int, version: int) -> None:
        """AssertionError unless every replica has a clock that the shard's version can have."""
        assert len(self.steps) == len(self._versions) == replicas, f"{self}: one clock for each of {replicas} replicas"
        assert min(self.steps) >= 0, f"{self}: a clock below 0"
        assert max(self._versions) <= max(0, version), f"{self}: a contribution is in a version after {version}"
