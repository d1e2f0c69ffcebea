"""When a worker gives, recalls and drops codec states: at a new view, a new link, the end of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from rallypoint.core.worker.handover import Handover, Paths
from rallypoint.core.worker.slots import Effect, Give, Recall, Release, ResetCodecs


class NoCodecStates:
    """The interface, for jobs whose codecs have no state: any worker may compute any replica at once."""

    kept = False  # True if the job's codecs have states
    settled = True  # True when no codec states are here, and the primaries have acknowledged all that were given

    def ready(self, replica: int) -> bool:
        """True if this worker has all codec states of `replica`."""
        return True

    @property
    def missing(self) -> Mapping[int, AbstractSet[int]]:
        """For each replica being recalled, the shards that have not answered."""
        return {}

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

    def rolled_back(self) -> None:
        """Drop all codec states: a new generation has begun and they are stale."""

    def answered(self, shard: int, replica: int) -> bool:
        """The shard's primary has answered a recall. Returns False if this worker does not wait for that answer."""
        return False

    def taken(self, shard: int, replica: int) -> None:
        """The shard's primary has acknowledged a codec state."""


class CodecStateCustody(NoCodecStates):
    """For jobs whose codecs have states for `shards`. States move with replicas: see `core/worker/handover.py`."""

    kept = True

    def __init__(self, shards: tuple[int, ...]) -> None:
        self._handover = Handover(shards)
        self._stale = False  # the encoder still has to drop the states of the last generation
        self._borrowed = frozenset[int]()

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return self._handover.empty and self._handover.settled

    @property
    def missing(self) -> Mapping[int, AbstractSet[int]]:
        return self._handover.missing

    def ready(self, replica: int) -> bool:
        return not self._stale and self._handover.ready(replica)

    def may_prepare(self, replica: int | None, paths: Paths) -> bool:
        return self._stale or (replica is not None and self._handover.can_recall(replica, paths))

    def prepare(self, replica: int | None, paths: Paths) -> list[Effect]:
        effects: list[Effect] = [ResetCodecs()] if self._stale else []
        self._stale = False
        if replica is None:
            return effects
        effects += self._give(paths)  # before the recall: it may be for states that this worker itself gives
        return [*effects, *(Recall(shard, replica, server) for shard, server in self._handover.recall(replica, paths))]

    def begin(self, replica: int) -> None:
        if not self._handover.ready(replica):
            self._handover.borrow(replica)
            self._borrowed = frozenset({replica})

    def end(self) -> frozenset[int]:
        borrowed, self._borrowed = self._borrowed, frozenset()
        return borrowed

    def keep_only(self, replicas: AbstractSet[int], paths: Paths) -> list[Effect]:
        released: list[Effect] = [Release(*key) for key in self._handover.release(replicas)]
        return [*released, *self._give(paths)]

    def rolled_back(self) -> None:
        self._stale = True
        self._borrowed = frozenset()
        self._handover.drop_all()

    def answered(self, shard: int, replica: int) -> bool:
        return self._handover.answered(shard, replica)

    def taken(self, shard: int, replica: int) -> None:
        self._handover.taken(shard, replica)

    def _give(self, paths: Paths) -> list[Effect]:
        return [Give(shard, replica, server) for shard, replica, server in self._handover.to_give(paths)]
