"""The followers that wait for parameters of a shard, under a streaming policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint.core.policy import Ledger, Policy
from rallypoint.core.shard.clocks import Clocks
from rallypoint.core.shard.effects import Effect, Reply, Wait
from rallypoint.core.shard.events import EVERYTHING, Want


class Answering(Ledger, Protocol):
    """What an answer depends on. The shard's machine implements it."""

    @property
    def policy(self) -> Policy: ...

    @property
    def clocks(self) -> Clocks: ...

    @property
    def rounds(self) -> int: ...

    @property
    def published(self) -> int: ...


@dataclass(slots=True)
class Wanted:
    """A follower waits for the parameters for `replica`'s next step, until the replica's clock is at least `clock`."""

    replica: int
    clock: int


@dataclass(slots=True)
class Wants:
    """At most one want for each follower: the newest.

    Each want is answered once, with `Reply`. A `Wait` before that tells the follower that it has to wait.
    """

    _waiting: dict[str, Wanted] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def add(self, event: Want, shard: Answering) -> list[Effect]:
        """A follower asks for parameters. This replaces its earlier want."""
        self._waiting[event.follower] = Wanted(event.replica, _next_clock(event.replica, shard))
        return [*self.serve(shard), *self.told_to_wait(event.follower, shard)]

    def forget(self, follower: str) -> None:
        """The follower disconnected."""
        self._waiting.pop(follower, None)

    def clear(self) -> None:
        """Drop all wants: another server is the shard's primary now."""
        self._waiting.clear()

    def serve(self, shard: Answering) -> list[Effect]:
        """Answer every follower that can be answered now."""
        if shard.published < 0:
            return []
        effects: list[Effect] = []
        for follower in self.ready(shard):
            replica = self._waiting.pop(follower).replica
            clock = shard.clocks[replica] if 0 <= replica < shard.expected else shard.rounds
            effects.append(Reply(follower, replica, clock, shard.published, last=replica == EVERYTHING))
        return effects

    def ready(self, shard: Answering) -> list[str]:
        """The followers that can be answered now."""
        return [follower for follower, wanted in self._waiting.items() if _may_have(wanted, shard)]

    def told_to_wait(self, follower: str, shard: Answering) -> list[Effect]:
        """Tell a follower that the policy makes it wait, if it does.

        The follower may have another replica that is further behind: it must compute that one first.
        """
        wanted = self._waiting.get(follower)
        if wanted is None or wanted.replica == EVERYTHING or shard.published < 0:
            return []
        may = shard.policy.serve(shard, wanted.clock)
        return [] if may else [Wait(follower, wanted.replica, wanted.clock)]

    def restarted(self, shard: Answering) -> None:
        """The clocks were just loaded: update the wants that came earlier."""
        for wanted in self._waiting.values():
            wanted.clock = _next_clock(wanted.replica, shard)


def _next_clock(replica: int, shard: Answering) -> int:
    """The replica's clock after all of its contributions that are here are applied."""
    if replica == EVERYTHING:
        return shard.rounds
    return shard.clocks[replica] + shard.knows(replica) if replica < shard.expected else 0


def _may_have(wanted: Wanted, shard: Answering) -> bool:
    replica = wanted.replica
    if replica == EVERYTHING:
        return shard.slowest >= shard.rounds and shard.published == shard.version
    if replica >= shard.expected:
        return True  # the replica does not contribute to this shard: any version is right
    here = shard.clocks[replica] >= wanted.clock and shard.published >= shard.clocks.version(replica)
    return here and shard.policy.serve(shard, shard.clocks[replica])
