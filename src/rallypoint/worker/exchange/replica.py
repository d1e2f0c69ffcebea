"""The replica that the main thread computes: its slots are claimed, written, and sent as each is full."""

from __future__ import annotations

import torch

from rallypoint.codec.base import digest_of
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.sums import DIGEST_BYTES, dense_shards
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.slots import Filled
from rallypoint.worker.exchange.links import Links
from rallypoint.worker.exchange.locked import LockedShell
from rallypoint.worker.exchange.pushes import Pushes
from rallypoint.worker.streamed.memory import SlotMemory

_UNKNOWN = bytes(DIGEST_BYTES)


class Contributions:
    """The digests of the replica in progress, at every `every`-th step; 0: never.

    Calls for each replica: `begin`, `filled` for each shard, `take`. `filled` comes from the thread that fills slots,
    which is idle when `take` is called.
    """

    def __init__(self, layout: Layout, every: int) -> None:
        self._every = every
        self._places = {shard: place for place, shard in enumerate(dense_shards(layout))}
        self._digests: list[bytes] = []
        self.active = False

    def begin(self, step: int, replica: int) -> None:
        """A replica begins. `active` is True while its contribution is recorded."""
        self.active = self._every > 0 and step % self._every == 0
        self._digests = [_UNKNOWN] * len(self._places) if self.active else []

    def filled(self, shard: int, gradient: torch.Tensor, weight: float) -> None:
        """The replica's gradient for this shard is whole: fp32, 1-D, in the host's memory. It is not changed."""
        if self.active and (place := self._places.get(shard)) is not None:
            self._digests[place] = digest_of(gradient, weight)

    def take(self) -> bytes:
        """The replica is computed: return the digests in the order of `dense_shards`.

        They are zeros for a shard that was not seen; b"" if none are recorded.
        """
        found, self._digests, self.active = b"".join(self._digests), [], False
        return found


class ReplicaPushes:
    """Main thread only, except for `filled`, which the staging thread calls too.

    Calls for each replica: `begin`; for each shard `claim`, then `filled`; at last `computed`. Or, at any point,
    `abandoned`.

    Attributes:
        contributions: records digests of what the replica contributes.
    """

    def __init__(
        self, layout: Layout, locked: LockedShell, pushes: Pushes, links: Links, memory: SlotMemory,
        contributions: Contributions,
    ) -> None:  # fmt: skip
        self._buffers = [shard for shard in layout.shards if shard.role == "buffers"]
        self._locked, self._pushes, self._links = locked, pushes, links
        self._memory, self.contributions = memory, contributions
        self._presum, self._replica = locked.machine.presum, -1
        self._began: tuple[int, ViewNumber] | None = None

    def begin(self, step: int, replica: int) -> ViewNumber | None:
        """Begin to compute this replica and return its generation. None if it is not to be computed (now)."""
        with self._locked.changed:
            generation = self._locked.shell.begin_replica(step, replica)
        self._replica = replica
        self.contributions.begin(step, replica)
        if generation is not None and (step, generation) != self._began:
            self._began = step, generation
            self._pushes.partials.clear()
        return generation

    def buffers_of(self, replica: int) -> list[Shard]:
        """The shards of buffers to which this replica contributes, ascending; they lie one after the other."""
        return [s for s in self._buffers if self._locked.machine.contributes(s.index, replica)]

    def weigh(self, weight: float, *, finite: bool) -> None:
        """Set the weight of the following contributions, and whether their loss was finite."""
        self._pushes.begin(weight, finite)

    def claim(self, shard: int) -> bool:
        """Wait until this slot may be written; False if it need not be. Raises Rewound like `Exchange.check`."""
        slots = self._locked.machine.slots
        return self._locked.claim(shard, lambda: self._memory.has_room(slots), self._where_full)

    def _where_full(self) -> str:
        machine = self._locked.machine
        unsent = machine.slots.unsent
        return f"room for {len(unsent)} gradients: {self._links.describe(unsent, self._locked.shell.view.primary)}"

    def filled(self, shard: int) -> None:
        """The slot holds the replica's whole gradient: push it, or add it up with others of this worker (I3)."""
        self.not_needed(shard, self._pushes.words(shard))
        with self._locked.changed:
            part = self._presum.part(shard, self._replica)
        if part is not None:
            self._pushes.add_up(shard, self._replica, part)
        self._locked.handle(Filled(shard, part))

    def not_needed(self, shard: int, gradient: torch.Tensor) -> None:
        """The replica's gradient for this shard is whole: only record it, nobody needs it from here."""
        self.contributions.filled(shard, gradient, self._pushes.weight)

    def filled_rows(self, shard: int, gradient: memoryview) -> None:
        """Like `filled` for a part of a table. Its gradient (see `codec/base.py`) needs no slot."""
        self._pushes.set_rows(shard, gradient)
        self._locked.handle(Filled(shard))

    def computed(self) -> None:
        """The replica is computed: all of its contributions are queued or sent."""
        self._end(whole=True)

    def abandoned(self) -> None:
        """The replica was given up halfway: its slots are not written any more."""
        self._end(whole=False)

    def _end(self, *, whole: bool) -> None:
        self._locked.apply(lambda: self._locked.shell.end_replica(whole=whole))
        self._locked.set(lambda: self._memory.free(self._locked.machine.slots))
