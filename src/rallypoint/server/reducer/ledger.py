"""Which updates were made of how many contributions, for the coordinator's ledger (I6) and its stall report (I8)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rallypoint.core.shard.links import Fence
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.net.messages import Accounted, Applied, Message

_ENTRIES = 64  # that are said again to a coordinator that took over
_ACCOUNT_EVERY = 32  # updates


class Ledger:
    """The reducer's thread owns it; `say` tells the coordinator, `fence` knows the generation in force."""

    def __init__(self, say: Callable[[Message], None], fence: Fence) -> None:
        self._say, self._fence = say, fence
        self._arrivals: dict[str, float] = {}  # of the step in progress, by worker
        self._added: dict[int, int] = {}  # contributions in a shard's sum
        self._told: dict[int, int] = {}  # of a shard that we are the backup of: the same at its primary
        self._entries: deque[Applied] = deque(maxlen=_ENTRIES)

    def arrived(self, worker: str) -> None:
        """A contribution to the step that will be entered next."""
        self._arrivals[worker] = time.monotonic()

    def count(self, shard: int, *, first: bool) -> None:
        """One more contribution is in a shard's sum."""
        self._added[shard] = 1 if first else self._added[shard] + 1

    def told(self, shard: int, added: int) -> None:
        """What the shard's primary counted for the update that we make next as its backup."""
        self._told[shard] = added

    def added(self, shard: int) -> int:
        """Contributions in the shard's sum."""
        return self._added.get(shard, 0)

    def enter(self, shard: int, step: int, *, primary: bool) -> None:
        """An update of the shard that stands for its step; primary and backup both say so: one of them may die."""
        first = min(self._arrivals.values(), default=0.0)
        late = {worker: round(when - first, 4) for worker, when in self._arrivals.items()}
        self._arrivals.clear()
        added = (self._added if primary else self._told).get(shard, 0)
        entry = Applied(step, added, time.time(), late, self._fence.generation)
        self._entries.append(entry)
        self._say(entry)

    def account(self, machine: ShardMachine, step: int, rounds: int) -> None:
        """Now and then, and at the end, what has become of the contributions: where not every one is applied alike."""
        if machine.slowest >= rounds or step % _ACCOUNT_EVERY == 0:
            tally = machine.tally
            counts = (tally.applied, tally.folded, tally.dropped, tally.repeats)
            self._say(Accounted(*counts, dict(tally.staleness), self._fence.generation))

    def repeat(self) -> None:
        """Say the last entries again: a coordinator that took over may not have them."""
        for entry in self._entries:
            self._say(entry)

    def rolled_back(self) -> None:
        """A new generation: what was counted before is not said again."""
        self._entries.clear()
        self._arrivals.clear()
        self._added.clear()
        self._told.clear()
