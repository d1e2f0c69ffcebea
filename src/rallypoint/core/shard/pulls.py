"""The followers that wait for parameters of a shard, under a streaming policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from rallypoint.core.shard.effects import Effect, Reply, TellWait
from rallypoint.core.shard.events import EVERYTHING, Want

if TYPE_CHECKING:
    from rallypoint.core.shard.machine import ShardMachine


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


@dataclass(slots=True)
class Wants:
    """At most one want for each follower: the newest.

    Each want is answered once, with `Reply`. A `TellWait` before that tells the follower that it has to wait.
    """

    _waiting: dict[str, tuple[int, int]] = field(default_factory=dict)  # the replica, and the clock that it waits for

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def add(self, event: Want, shard: ShardMachine) -> list[Effect]:
        """A follower asks for parameters. This replaces its earlier want."""
        self._waiting[event.follower] = event.replica, _next_clock(event.replica, shard)
        return [*self.serve(shard), *self.told_to_wait(event.follower, shard)]

    def forget(self, follower: str) -> None:
        self._waiting.pop(follower, None)

    def clear(self) -> None:
        """Drop all wants: another server is the shard's primary now."""
        self._waiting.clear()

    def serve(self, shard: ShardMachine) -> list[Effect]:
        """Answer every follower that can be answered now."""
        if shard.published < 0:
            return []
        effects: list[Effect] = []
        for follower in self.ready(shard):
            replica, _ = self._waiting.pop(follower)
            clock = shard.clocks[replica] if 0 <= replica < shard.expected else shard.rounds
            effects.append(Reply(follower, replica, clock, shard.published, last=replica == EVERYTHING))
        return effects

    def ready(self, shard: ShardMachine) -> list[str]:
        """The followers that can be answered now."""
        return [follower for follower, wanted in self._waiting.items() if _may_have(*wanted, shard)]

    def told_to_wait(self, follower: str, shard: ShardMachine) -> list[Effect]:
        """Tell a follower that the policy makes it wait, if it does.

        The follower may have another replica that is further behind: it must compute that one first.
        """
        replica, clock = self._waiting.get(follower, (EVERYTHING, 0))
        if replica == EVERYTHING or shard.published < 0:
            return []
        return [] if shard.policy.serve(shard, clock) else [TellWait(follower, replica, clock)]

    def restarted(self, shard: ShardMachine) -> None:
        """The clocks were just loaded: update the wants that came earlier."""
        for follower, (replica, _) in self._waiting.items():
            self._waiting[follower] = replica, _next_clock(replica, shard)


def _next_clock(replica: int, shard: ShardMachine) -> int:
    """The replica's clock after all of its contributions that are here are applied."""
    if replica == EVERYTHING:
        return shard.rounds
    return shard.clocks[replica] + shard.knows(replica) if replica < shard.expected else 0


def _may_have(replica: int, clock: int, shard: ShardMachine) -> bool:
    if replica == EVERYTHING:
        return shard.slowest >= shard.rounds and shard.published == shard.version
    if replica >= shard.expected:
        return True  # the replica does not contribute to this shard: any version is right
    here = shard.clocks[replica] >= clock and shard.published >= shard.clocks.version(replica)
    return here and shard.policy.serve(shard, shard.clocks[replica])


# Workers' requests for rows of tables, or words of shards, at a version: which can be answered, with what version.


MOST_WAITING = 1 << 12  # of one link and shard
L = TypeVar("L")
W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Request(Generic[L, W]):
    """A worker asks on `link` for `what` of a shard, at `version`; with `newest` any newer version will do, too.

    It replaces the request of the same link, shard and `place` that still waits.
    """

    link: L
    version: int
    newest: bool
    what: W
    place: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Requests(Generic[L, W]):
    """The requests that wait, by shard: one of each link and place. They may be for a version that does not exist yet.

    Owner thread only.
    """

    _waiting: dict[int, list[Request[L, W]]] = field(default_factory=dict)

    @property
    def shards(self) -> list[int]:
        return list(self._waiting)

    def add(self, shard: int, request: Request[L, W]) -> None:
        """A worker asks. It has one pull of a place at a time, so this request replaces its earlier one.

        At most MOST_WAITING of one link wait: the oldest are dropped.
        """
        waiting = self._waiting.get(shard, [])
        others = [one for one in waiting if one.link is not request.link or one.place != request.place]
        if len(others) >= MOST_WAITING:
            own = [one for one in others if one.link is request.link]
            others = [one for one in others if len(own) < MOST_WAITING or one is not own[0]]
        self._waiting[shard] = [*others, request]

    def gone(self, link: L) -> None:
        for shard, requests in list(self._waiting.items()):
            self._keep(shard, (request for request in requests if request.link is not link))

    def refuse(self, shard: int) -> None:
        """Drop the shard's requests: this server is not its primary, and the workers will ask another server."""
        del self._waiting[shard]

    def answered(
        self, shard: int, published: int, keeps: Callable[[int], bool]
    ) -> list[tuple[Request[L, W], int | None]]:
        """Take out the requests that can be answered now, each with the version to answer with.

        None in place of a version: the one that was asked for is not kept any more. `published` is the newest version
        that workers may see (-1: none); `keeps` tells whether the rows of a version can still be had.
        """
        answers: list[tuple[Request[L, W], int | None]] = []
        waiting: list[Request[L, W]] = []
        for request in self._waiting.get(shard, []):
            if request.version <= published and keeps(request.version):
                answers.append((request, request.version))
            elif published < 0 or (request.version > published and not request.newest):
                waiting.append(request)
            else:
                answers.append((request, published if request.newest else None))
        self._keep(shard, waiting)
        return answers

    def _keep(self, shard: int, requests: Iterable[Request[L, W]]) -> None:
        self._waiting[shard] = list(requests)
        if not self._waiting[shard]:
            del self._waiting[shard]
