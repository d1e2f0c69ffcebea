"""Tells the coordinator what audits of workers have found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rallypoint.core.protocol import AuditFound, Message
from rallypoint.core.shard.effects import Accepted, Disputed
from rallypoint.core.shard.links import Fence
from rallypoint.core.view import ViewNumber

_KEPT = 1024  # the last findings, to tell them to a restarted coordinator


class AuditReports:
    """What audits on this server have found. `fence` gives the current generation. Owner thread only.

    Of one contribution and the same workers only the first shard is told: a worker that computes something else mostly
    does so in all of them. In another view it is told once more: shards may have moved, and come back.
    """

    def __init__(self, say: Callable[[Message], None], fence: Fence) -> None:
        self._say, self._fence = say, fence
        self._told: deque[tuple[ViewNumber, AuditFound]] = deque(maxlen=_KEPT)

    def found(self, shard: int, effect: Accepted | Disputed) -> None:
        """An audit of this shard was decided, or has to be."""
        if isinstance(effect, Accepted):
            if not effect.lost:
                return
            agreed, others = effect.agreed, effect.lost
        else:
            agreed, others = (), effect.heard
        found = AuditFound(effect.step, effect.replica, shard, agreed, others, self._fence.generation)
        number = self._fence.number
        if all((number, _named(found)) != (when, _named(before)) for when, before in self._told):
            self._told.append((number, found))
            self._say(found)

    def repeat(self) -> None:
        """Tell the last findings again: a restarted coordinator may not have them."""
        for _, found in self._told:
            if found.generation == self._fence.generation:
                self._say(found)


def _named(found: AuditFound) -> tuple[object, ...]:
    return found.generation, found.step, found.replica, found.agreed, found.others
