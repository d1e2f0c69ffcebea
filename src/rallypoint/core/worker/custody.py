"""Which codec states this worker holds, and what it does with them on a view, a new link, the end of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from rallypoint.core.worker.handover import Handover, Paths
from rallypoint.core.worker.slots import Effect, Give, Recall, Release, ResetCodecs


class NoCodecStates:
    """The job's codecs have no state: any worker may compute any replica at once."""

    kept = False  # do the job's codecs have states?
    settled = True  # has everything been taken that this worker had to give?

    def ready(self, replica: int) -> bool:
        """Is all here that there is of this replica?"""
        return True

    @property
    def missing(self) -> Mapping[int, AbstractSet[int]]:
        """Of each replica that is recalled, the shards that have not answered."""
        return {}

    def may_prepare(self, replica: int | None, paths: Paths) -> bool:
        """Would `prepare` do anything now?"""
        return False

    def prepare(self, replica: int | None, paths: Paths) -> list[Effect]:
        """No replica is being computed, and this one (if any) is next: forget what is stale, ask for what is missing.

        Only the main thread calls it: the encoder is not in use then.
        """
        return []

    def begin(self, replica: int) -> None:
        """The replica is being computed, also if it is not `ready`: then its codec states are given back at its end."""

    def end(self) -> frozenset[int]:
        """It has been computed: the replicas that are to be given back, even if this worker computes them again."""
        return frozenset()

    def keep_only(self, replicas: AbstractSet[int], paths: Paths) -> list[Effect]:
        """This worker keeps only these replicas: give what there is of others to the shards' primaries."""
        return []

    def rolled_back(self) -> None:
        """A new generation has begun: all codec states are stale."""

    def answered(self, shard: int, replica: int) -> bool:
        """The shard's primary has answered a recall; False if nobody waits for it."""
        return False

    def taken(self, shard: int, replica: int) -> None:
        """The shard's primary has what it was given."""


class CodecStateCustody(NoCodecStates):
    """The codecs of these `shards` have states, which move with the replicas (see `core/worker/handover.py`)."""

    kept = True

    def __init__(self, shards: tuple[int, ...]) -> None:
        self._handover = Handover(shards)
        self._stale = False  # the encoder has not heard of the last roll-back
        self._borrowed = frozenset[int]()

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return self._handover.settled

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
        effects += self._give(paths)  # first: what is recalled may be what this worker itself gives
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
