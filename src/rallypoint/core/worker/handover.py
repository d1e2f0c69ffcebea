"""The worker's side of moving codec states when a replica moves to another worker.

A codec with error feedback has a *codec state* (its residual, say) for each (shard, replica). The state after step t is
a pure function of (shard, replica, t): it is the same on every worker. The states move over the shards' primaries:

    old worker --give--> primary of the shard --answer to recall--> new worker

- A worker that no longer computes a replica *gives* its states to the primaries (or says that it has nothing new). It
  repeats this until the primary acknowledges.
- A worker that starts to compute a replica *recalls* its states first, and computes once every shard has answered.

Both are repeated on a new connection after one broke. The primary's side is `core/shard/relay.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

Key = tuple[int, int]  # shard, replica


@dataclass(frozen=True, slots=True)
class Paths:
    """Where frames can go now.

    Attributes:
        homes: shard -> id of its primary.
        connections: server id -> number of the connection that is up; each new connection has a new number.
    """

    homes: Mapping[int, str]
    connections: Mapping[str, int]

    def to(self, shard: int) -> tuple[str, int] | None:
        """The shard's primary and the number of the connection to it; None while there is no connection."""
        home = self.homes[shard]
        return (home, self.connections[home]) if home in self.connections else None


@dataclass(slots=True)
class Handover:
    """The codec states that this worker holds, recalls and gives. `shards` are those whose codec has states."""

    shards: tuple[int, ...]
    _here: set[int] = field(default_factory=set)  # replicas whose codec states are here, or that start with none
    _missing: dict[int, set[int]] = field(default_factory=dict)  # recalled replica -> shards that have not answered
    _asked: dict[Key, tuple[str, int]] = field(default_factory=dict)  # recalls: the connection that each was sent on
    _giving: dict[Key, tuple[str, int] | None] = field(default_factory=dict)  # not acknowledged: connection, or None

    @property
    def settled(self) -> bool:
        """True when the primaries have acknowledged everything that this worker gave."""
        return not self._giving

    @property
    def empty(self) -> bool:
        """True when no codec states are here and none are recalled."""
        return not (self._here or self._missing)

    @property
    def missing(self) -> dict[int, set[int]]:
        """For each replica being recalled, the shards that have not answered."""
        return self._missing

    def ready(self, replica: int) -> bool:
        """True if this worker may compute `replica`: all of its codec states are here."""
        return replica in self._here

    def drop_all(self) -> None:
        """Drop everything: a new generation has begun and all codec states are stale."""
        for known in (self._here, self._missing, self._asked, self._giving):
            known.clear()

    # ---- recalling ----

    def recall(self, replica: int, paths: Paths) -> list[tuple[int, str]]:
        """Recall the codec states of `replica`. Returns (shard, server) for each request to send now."""
        if replica in self._here:
            return []
        asks = self._unasked(replica, paths)
        self._missing.setdefault(replica, set(self.shards))
        for shard, way in asks:
            self._asked[shard, replica] = way
        return [(shard, server) for shard, (server, _) in asks]

    def can_recall(self, replica: int, paths: Paths) -> bool:
        """True if `recall` would return a request to send now."""
        return replica not in self._here and bool(self._unasked(replica, paths))

    def _unasked(self, replica: int, paths: Paths) -> list[tuple[int, tuple[str, int]]]:
        missing = sorted(self._missing.get(replica, self.shards))
        ways = [(shard, paths.to(shard)) for shard in missing]
        return [(shard, way) for shard, way in ways if way is not None and self._asked.get((shard, replica)) != way]

    def answered(self, shard: int, replica: int) -> bool:
        """The shard's primary has answered a recall. Returns False if this worker does not wait for that answer."""
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
        """Compute `replica` with the codec states that are here, and ignore later answers.

        Its contributions make this worker the owner of the states at each primary: it must give back all of them later.
        """
        for shard in self._missing.pop(replica, set()):
            self._asked.pop((shard, replica), None)
        self._here.add(replica)

    # ---- giving ----

    def release(self, keeps: AbstractSet[int]) -> list[Key]:
        """Keep only the replicas `keeps`. Returns the (shard, replica) of all codec states to give back.

        That includes states with which nothing was encoded here, and recalls without an answer: for the primary this
        worker owns those too.
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
        """The (shard, replica, server) of each codec state to send now, and note it as sent on that connection."""
        sends: list[tuple[int, int, str]] = []
        for (shard, replica), sent in self._giving.items():
            way = paths.to(shard)
            if way is not None and way != sent:
                self._giving[shard, replica] = way
                sends.append((shard, replica, way[0]))
        return sends

    def taken(self, shard: int, replica: int) -> None:
        """The shard's primary has acknowledged the codec state (or no longer needs it)."""
        self._giving.pop((shard, replica), None)
