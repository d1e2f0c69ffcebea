"""Bits that flip in a server's memory, planted at declared places: to see that audits of servers find them.

A `FlippingServer` is a server that does this to itself, in a test or a benchmark. Nothing of a job or its network can
ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rallypoint.core.job import JobRecord
from rallypoint.server.reducer import inbox
from rallypoint.server.reducer.reducer import Reducer
from rallypoint.server.service import ServerService


@dataclass(frozen=True, slots=True)
class Flip:
    """As soon as `shard` is at `version`, and at rest, `bit` (0 to 31) of a word of one of its arrays flips.

    `array` is the number of the array among those of a snapshot's record, by name: with AdamW 0 is ``exp_avg``, 1
    ``exp_avg_sq`` and 2 ``master``; `word` is counted modulo the array's length. `primary`: only while the server is
    the shard's primary (False: its backup).
    """

    shard: int
    version: int
    array: int
    word: int
    bit: int
    primary: bool = True


@dataclass
class Flipping:
    """A reducer whose memory is faulty. Passes events on, and flips bits between them; `done` are the flips so far."""

    reducer: Reducer
    flips: Sequence[Flip]
    told: Callable[[Flip], None] = lambda flip: None
    done: list[Flip] = field(default_factory=list)

    def handle(self, event: inbox.Event) -> None:
        """Handle an event; then flip what is due."""
        self.reducer.handle(event)
        for flip in self.flips:
            machine = self.reducer.machine.machine(flip.shard)
            if machine is None or machine.version < flip.version or machine.primary != flip.primary:
                continue
            if flip not in self.done:
                self.done.append(flip)
                flip_bit(self.reducer, flip)
                self.told(flip)

    def idle_work(self) -> Callable[[], None] | None:
        """As the reducer's."""
        return self.reducer.idle_work()

    def close(self) -> None:
        """As the reducer's."""
        self.reducer.close()


def flip_bit(reducer: Reducer, flip: Flip) -> None:
    """Flip it now. Only the owner's thread may call it."""
    held, machine = reducer._owned[flip.shard], reducer.machine.machine(flip.shard)
    assert machine is not None
    arrays = held.state(machine.version, (), wires=False).arrays  # views of what the server holds
    array = arrays[sorted(arrays)[flip.array % len(arrays)]]
    words = array.view(np.uint32)
    words[flip.word % len(words)] ^= np.uint32(1 << flip.bit)


class FlippingServer(ServerService):
    """A server in whose memory bits flip: those in `flips`, a list to which more may be added at any time.

    `told` is called, on the owner's thread, after each.
    """

    def __init__(self, flips: Sequence[Flip], told: Callable[[Flip], None] = lambda flip: None, **given: Any) -> None:
        """`given` is what a ServerService takes."""
        super().__init__(**given)
        self._flips, self._told = flips, told

    def _prepare(self, record: JobRecord) -> None:
        super()._prepare(record)
        if isinstance(self._owner.reducer, Reducer):
            self._owner.reducer = Flipping(self._owner.reducer, self._flips, self._told)
