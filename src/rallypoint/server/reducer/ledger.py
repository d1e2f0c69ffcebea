"""How many contributions each update took, for the coordinator's ledger (I6) and stall report (I8)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rallypoint.codec.base import digest_of
from rallypoint.core.layout import Layout
from rallypoint.core.protocol import Accounted, Applied, Message, Updated
from rallypoint.core.shard.links import Fence
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.sums import pieces_of
from rallypoint.server.shards.held import HeldShard
from rallypoint.server.shards.owned import OwnedShard
from rallypoint.server.shards.rows import OwnedRows

ENTRIES = 64  # entries kept, to repeat them to a restarted coordinator
_ACCOUNT_EVERY = 32  # updates


class Ledger:
    """Sends entries to the coordinator with `say`. `fence` gives the current generation. Owner thread only."""

    def __init__(self, say: Callable[[Message], None], fence: Fence) -> None:
        self._say, self._fence = say, fence
        self._arrivals: dict[str, float] = {}  # worker -> time of its last contribution to the step in progress
        self._added: dict[int, int] = {}  # replicas in a shard's last finished sum
        self._told: dict[int, int] = {}  # the same at the primary, for shards with their backup here
        self._entries: deque[Applied] = deque(maxlen=ENTRIES)
        self._applied = -1  # the last step that was said to be applied

    def arrived(self, worker: str) -> None:
        """A worker's contribution arrived, for the step that is entered next."""
        self._arrivals[worker] = time.monotonic()

    def finished(self, shard: int, replicas: int) -> None:
        """A shard's sum is finished, with the contributions of so many replicas."""
        self._added[shard] = replicas

    def told(self, shard: int, added: int) -> None:
        """The primary's number of contributions in the update that this backup makes next."""
        self._told[shard] = added

    def added(self, shard: int) -> int:
        """The number of replicas in the shard's last finished sum."""
        return self._added.get(shard, 0)

    def enter(self, shard: int, step: int, *, primary: bool, norm: float | None = None) -> None:
        """Report the shard's update as the step's entry. Primary and backup both report it: one of them may die.

        `norm` is that of the step's mean gradient, if it is known.
        """
        first = min(self._arrivals.values(), default=0.0)
        late = {worker: round(when - first, 4) for worker, when in self._arrivals.items()}
        self._arrivals.clear()
        added = (self._added if primary else self._told).get(shard, 0)
        entry = Applied(step, added, time.time(), late, self._fence.generation, norm)
        self._entries.append(entry)
        self._applied = max(self._applied, step)
        self._say(entry)

    def proves(self, step: int) -> None:
        """The shards here prove that `step` is applied: say so, unless it was said.

        The server that has applied it may be gone, and what it has said of that lost. Else the coordinator would wait
        for that step for ever.
        """
        if step > self._applied:
            self._applied = step
            self._say(Applied(step, 0, 0.0, generation=self._fence.generation))

    def account(self, machine: ShardMachine, step: int, rounds: int) -> None:
        """Report the shard's tally every 32 updates and at the end. For modes that may fold or drop contributions."""
        if machine.slowest >= rounds or step % _ACCOUNT_EVERY == 0:
            tally = machine.tally
            counts = (tally.applied, tally.folded, tally.dropped, tally.repeats)
            self._say(Accounted(*counts, dict(tally.staleness), self._fence.generation))

    def repeat(self) -> None:
        """Send the last entries again: a restarted coordinator may not have them."""
        for entry in self._entries:
            self._say(entry)
        last, self._applied = self._applied, -1
        self.proves(last)

    def rolled_back(self) -> None:
        """A new generation began: forget all counts and entries."""
        self._entries.clear()
        self._applied = -1
        self._arrivals.clear()
        self._added.clear()
        self._told.clear()


# ---- Digests of what a server's shards hold, at every so many versions (`fingerprints=`) ----


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
