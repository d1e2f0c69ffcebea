"""A worker's side of moving codec states (error feedback's residual, say) when a replica moves to another worker.

A codec with error feedback has a *codec state* for each (shard, replica). Like a contribution it has a name, (shard,
replica, step): it is what there is after that step's contribution was encoded, and it is always the same, whoever holds
it. A worker that keeps a replica no longer *gives* its codec states to the shards' primaries (or says that it has
nothing new), each until that primary has said that it has it. A worker that begins with a replica *recalls* them there
first, and computes once every shard has answered. `core/shard/relay.py` is the other side.

Nothing is trusted to a connection: what was on its way when one broke is given, or asked for, again.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

Key = tuple[int, int]  # shard, replica


@dataclass(frozen=True, slots=True)
class Paths:
    """Where frames can go now: each shard's primary, and the connections that stand, each with its number."""

    homes: Mapping[int, str]
    connections: Mapping[str, int]

    def to(self, shard: int) -> tuple[str, int] | None:
        """The shard's primary and the number of the connection to it; None while there is none."""
        home = self.homes[shard]
        return (home, self.connections[home]) if home in self.connections else None


@dataclass(slots=True)
class Handover:
    """`shards` are those that have codec states."""

    shards: tuple[int, ...]
    _here: set[int] = field(default_factory=set)  # replicas whose codec states are here, or that begin with none
    _missing: dict[int, set[int]] = field(default_factory=dict)  # of replicas that are recalled: shards without answer
    _asked: dict[Key, tuple[str, int]] = field(default_factory=dict)
    _giving: dict[Key, tuple[str, int] | None] = field(default_factory=dict)  # not acknowledged; on which connection

    @property
    def settled(self) -> bool:
        """Has everything been taken that this worker had to give?"""
        return not self._giving

    @property
    def missing(self) -> dict[int, set[int]]:
        """Of each replica that is recalled, the shards that have not answered."""
        return self._missing

    def ready(self, replica: int) -> bool:
        """May this replica be computed here?"""
        return replica in self._here

    def drop_all(self) -> None:
        """There was a roll-back: all codec states are stale."""
        for known in (self._here, self._missing, self._asked, self._giving):
            known.clear()

    # ---- recalling ----

    def recall(self, replica: int, paths: Paths) -> list[tuple[int, str]]:
        """This replica is to be computed here: the shards to ask now, and the server of each."""
        if replica in self._here:
            return []
        asks = self._unasked(replica, paths)
        self._missing.setdefault(replica, set(self.shards))
        for shard, way in asks:
            self._asked[shard, replica] = way
        return [(shard, server) for shard, (server, _) in asks]

    def can_recall(self, replica: int, paths: Paths) -> bool:
        """Would `recall` ask anybody now?"""
        return replica not in self._here and bool(self._unasked(replica, paths))

    def _unasked(self, replica: int, paths: Paths) -> list[tuple[int, tuple[str, int]]]:
        missing = sorted(self._missing.get(replica, self.shards))
        ways = [(shard, paths.to(shard)) for shard in missing]
        return [(shard, way) for shard, way in ways if way is not None and self._asked.get((shard, replica)) != way]

    def answered(self, shard: int, replica: int) -> bool:
        """The shard's primary has answered; False if this worker does not wait for that answer (any more)."""
        missing = self._missing.get(replica, set())
        if shard not in missing:
            return False
        missing.discard(shard)
        self._asked.pop((shard, replica), None)
        if not missing:
            del self._missing[replica]
            self._here.add(replica)
        return True

    def borrow(self, replica: int) -> None:
        """This worker computes the replica with whatever codec states are here; later answers do not count.

        With its contributions it becomes the owner at each primary, so it has to give back all shards afterwards.
        """
        for shard in self._missing.pop(replica, set()):
            self._asked.pop((shard, replica), None)
        self._here.add(replica)

    # ---- giving ----

    def release(self, keeps: AbstractSet[int]) -> list[Key]:
        """This worker keeps only these replicas: the codec states that it gives back.

        That includes those of which nothing has been encoded here, and those of which the answer has not come: the
        primary takes this worker for their owner.
        """
        given = [(shard, replica) for replica in sorted(self._here - keeps) for shard in self.shards]
        for replica in sorted(self._missing.keys() - keeps):
            missing = self._missing.pop(replica)
            given += [(s, replica) for s in self.shards if s not in missing or (s, replica) in self._asked]
        self._here &= keeps
        for key in given:
            self._asked.pop(key, None)
            self._giving[key] = None
        return given

    def to_give(self, paths: Paths) -> list[tuple[int, int, str]]:
        """What to send now, each as (shard, replica, server)."""
        sends: list[tuple[int, int, str]] = []
        for (shard, replica), sent in self._giving.items():
            way = paths.to(shard)
            if way is not None and way != sent:
                self._giving[shard, replica] = way
                sends.append((shard, replica, way[0]))
        return sends

    def taken(self, shard: int, replica: int) -> None:
        """The shard's primary has it (or needs it no more)."""
        self._giving.pop((shard, replica), None)
