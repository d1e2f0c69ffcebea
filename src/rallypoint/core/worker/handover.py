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

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from rallypoint.core.worker.slots import Effect, Give, Recall, ReleaseState, ResetCodecs

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


class NoCodecStates:
    """The interface, for jobs whose codecs have no state: any worker may compute any replica at once."""

    kept = False  # True if the job's codecs have states
    missing: Mapping[int, AbstractSet[int]] = MappingProxyType({})  # replicas being recalled: who has not answered

    @property
    def settled(self) -> bool:
        """True when no codec states are here or recalled, and the primaries have acknowledged all that were given."""
        return True

    def ready(self, replica: int) -> bool:
        """True if this worker has all codec states of `replica`."""
        return True

    def may_prepare(self, replica: int | None, paths: Paths) -> bool:
        """True if `prepare` would return an effect now."""
        return False

    def prepare(self, replica: int | None, paths: Paths) -> list[Effect]:
        """Between two replicas: drop stale codec states, and recall the missing ones of `replica`, which is next.

        Only the main thread calls it, while it computes nothing: the encoder is not in use then.
        """
        return []

    def begin(self, replica: int) -> None:
        """The main thread begins to compute `replica`. If it is not `ready`, its states are given back at its end."""

    def end(self) -> frozenset[int]:
        """The main thread has ended the replica. Returns the replicas to give back even if they stay assigned."""
        return frozenset()

    def keep_only(self, replicas: AbstractSet[int], paths: Paths) -> list[Effect]:
        """Keep the codec states of `replicas` only; return the effects that give all others to the primaries."""
        return []

    def hand_over(self, paths: Paths) -> list[Effect]:
        """This worker ends, whatever its main thread does: give all codec states to the primaries, and recall none."""
        return []

    def rolled_back(self) -> None:
        """Drop all codec states: a new generation has begun and they are stale."""

    def answered(self, shard: int, replica: int) -> bool:
        """The shard's primary has answered a recall. Returns False if this worker does not wait for that answer."""
        return False

    def taken(self, shard: int, replica: int) -> None:
        """The shard's primary has acknowledged a codec state."""


class CodecStateCustody(NoCodecStates):
    """For jobs whose codecs have states for `shards`: those that this worker holds, recalls and gives."""

    kept = True

    def __init__(self, shards: tuple[int, ...]) -> None:
        self.shards = shards
        self.missing: dict[int, set[int]] = {}
        self._here = set[int]()  # replicas whose codec states are here, or that start with none
        self._asked: dict[Key, tuple[str, int]] = {}  # recalls: the connection that each was sent on
        self._giving: dict[Key, tuple[str, int] | None] = {}  # not acknowledged: the connection, or None
        self._stale = False  # the encoder still has to drop the states of the last generation
        self._over = False  # `hand_over` was called
        self._borrowed = frozenset[int]()

    @property
    def settled(self) -> bool:
        return not (self._here or self.missing or self._giving)

    def ready(self, replica: int) -> bool:
        return not (self._stale or self._over) and replica in self._here

    def may_prepare(self, replica: int | None, paths: Paths) -> bool:
        if replica is None or self._over or replica in self._here:
            return self._stale
        return self._stale or bool(self._unasked(replica, paths))

    def prepare(self, replica: int | None, paths: Paths) -> list[Effect]:
        effects: list[Effect] = [ResetCodecs()] if self._stale else []
        self._stale = False
        if replica is None or self._over:
            return effects
        effects += self._give(paths)  # before the recall: it may be for states that this worker itself gives
        if replica not in self._here:
            asks = self._unasked(replica, paths)
            self.missing.setdefault(replica, set(self.shards))
            self._asked |= {(shard, replica): way for shard, way in asks}
            effects += [Recall(shard, replica, server) for shard, (server, _) in asks]
        return effects

    def begin(self, replica: int) -> None:
        """Its contributions make this worker the owner of the states at each primary, and later answers do not count:
        it must give back all of them."""
        if replica not in self._here:
            for shard in self.missing.pop(replica, set()):
                self._asked.pop((shard, replica), None)
            self._here.add(replica)
            self._borrowed = frozenset({replica})

    def end(self) -> frozenset[int]:
        borrowed, self._borrowed = self._borrowed, frozenset()
        return borrowed

    def keep_only(self, replicas: AbstractSet[int], paths: Paths) -> list[Effect]:
        """It gives states too with which nothing was encoded here, and recalls without an answer: for the primary this
        worker owns those too."""
        given = [(shard, replica) for replica in sorted(self._here - replicas) for shard in self.shards]
        for replica in sorted(self.missing.keys() - replicas):
            missing = self.missing.pop(replica)
            given += [(s, replica) for s in self.shards if s not in missing or (s, replica) in self._asked]
        self._here &= replicas
        for key in given:
            self._asked.pop(key, None)
            self._giving[key] = None
        return [*(ReleaseState(*key) for key in given), *self._give(paths)]

    def hand_over(self, paths: Paths) -> list[Effect]:
        self._over = True
        return self.keep_only(frozenset(), paths)

    def rolled_back(self) -> None:
        self._stale = True
        self._borrowed = frozenset()
        for known in (self._here, self.missing, self._asked, self._giving):
            known.clear()

    def _give(self, paths: Paths) -> list[Effect]:
        """What is not acknowledged, and was not sent on the connection that is up."""
        ways = {key: way for key, sent in self._giving.items() if (way := paths.to(key[0])) not in (None, sent)}
        self._giving |= ways
        return [Give(shard, replica, way[0]) for (shard, replica), way in ways.items() if way is not None]

    def _unasked(self, replica: int, paths: Paths) -> list[tuple[int, tuple[str, int]]]:
        missing = sorted(self.missing.get(replica, self.shards))
        ways = [(shard, paths.to(shard)) for shard in missing]
        return [(shard, way) for shard, way in ways if way is not None and self._asked.get((shard, replica)) != way]

    def answered(self, shard: int, replica: int) -> bool:
        missing = self.missing.get(replica, set())
        if shard not in missing:
            return False
        missing.discard(shard)
        self._asked.pop((shard, replica), None)
        if not missing:
            del self.missing[replica]
            self._here.add(replica)
        return True

    def taken(self, shard: int, replica: int) -> None:
        self._giving.pop((shard, replica), None)


class Encoding(enum.Enum):
    """What a worker does with the codec state that it keeps of a (shard, replica)."""

    AGAIN = "send the kept contribution again"
    OVER = "send nothing of use: the shard is past this step"
    NEXT = "encode with the kept state, if any"
    ANEW = "drop the kept state, which is stale, and encode without one"


def encoding_of(kept: int | None, step: int, *, drops: bool) -> Encoding:
    """What to do with a contribution to `step`, where the kept state is the one after step `kept` (None: no state).

    Without `drops` each replica contributes to every step. So a state that lacks a step is stale: this worker was given
    up, and another one has contributed that step from a codec state of its own. Example: this worker keeps the state
    after step 2, and is to encode step 4. With `drops` (a quorum) a step may have done without the replica, and the
    state goes on.
    """
    if kept is None:
        return Encoding.NEXT
    if kept >= step:
        return Encoding.AGAIN if kept == step else Encoding.OVER
    return Encoding.NEXT if drops or kept == step - 1 else Encoding.ANEW
