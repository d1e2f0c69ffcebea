"""A simulated store: keys of one shard or several, each of which goes on by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import msgspec

from rallypoint.config import JobConfig
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.replicas.contents import Content


@dataclass(frozen=True)
class KeyedJob(SimulatedJob):
    """Like SimulatedJob; shard i is a piece of key i modulo `keys`.

    What is pushed to a piece depends on that piece alone: after a roll-back the pieces of a key have versions of their
    own.
    """

    keys: int = 1

    @cached_property
    def config(self) -> JobConfig:
        """The settings that a real job of this kind has."""
        return msgspec.structs.replace(super().config, keyed=True)

    def shards_of(self, key: int) -> list[int]:
        """The shards of a key."""
        return list(range(key, self.shards, self.keys))

    def pushed(self, shard: int, step: int, contributor: int, pulled: Content) -> Content:
        """What a contributor pushes to a shard, when `pulled` is its value."""
        return self.gradient(shard, step, contributor, (pulled,))

    def _finished(
        self, shard: int, step: int, model: Iterable[Content], residuals: dict[tuple[int, int], int],
        inner: dict[int, int],
    ) -> Content:  # fmt: skip
        pulled = list(model)[shard]
        return self._summed([self.pushed(shard, step, one, pulled) for one in range(self.replicas)])


def with_keys(job: SimulatedJob, keys: int) -> KeyedJob:
    """The same job as a store of so many keys."""
    given = {field.name: getattr(job, field.name) for field in fields(job) if field.init}
    return KeyedJob(**given, keys=keys)
