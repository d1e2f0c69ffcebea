"""Digests of what a server's shards hold, at every so many versions (`fingerprints=`)."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.codec.base.leaf import digest_of
from rallypoint.core.layout import Layout
from rallypoint.core.shard.links import Fence
from rallypoint.core.sums import pieces_of
from rallypoint.net.messages import Message, Updated
from rallypoint.server.shards.held import HeldShard
from rallypoint.server.shards.owned import OwnedShard
from rallypoint.server.shards.rows import OwnedRows


class Fingerprints:
    """Sends digests to the coordinator with `say`, at every `every`-th version; 0: never. Owner thread only.

    Primary and backup both do: one of them may die. `fence` gives the current generation.
    """

    def __init__(self, layout: Layout, every: int, say: Callable[[Message], None], fence: Fence) -> None:
        self._every, self._say, self._fence = every, say, fence
        self._pieces = pieces_of(layout) if every else []

    def applied(self, shard: int, version: int, held: HeldShard) -> None:
        """The shard holds this version now."""
        if not self._every or version % self._every or not isinstance(held, OwnedShard | OwnedRows):
            return
        if pieces := self._pieces[shard]:
            digests = b"".join(digest_of(held.master.view(-1)[piece.start : piece.stop]) for piece in pieces)
            self._say(Updated(version, shard, digests, self._fence.generation))
