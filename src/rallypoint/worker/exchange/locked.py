"""The worker's shell under its lock, for the threads that change it, and the memory of its slots."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rallypoint.core.layout import Layout
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.core.worker.slots import Arriving, CodecEffect, Effect, Event, Land, Landed, Slot, Slots, SlotSent
from rallypoint.errors import ProtocolError
from rallypoint.net.pool import bytes_of
from rallypoint.observe.waits import Progress, SharedCores, wait_until
from rallypoint.optim import InPlace

if TYPE_CHECKING:
    from rallypoint.worker.exchange.pushes import LinkEffects

# ---- The worker's shell under its lock, for the threads that change it and those that wait for a change ----
#
# **Which lock guards what, and the order in which they are taken** (a thread that holds one may take those below it):
# 1. `Exchange._adopting`: one view after the other. It is held while links end, so a link's thread never takes it.
# 2. `LockedShell.changed`: the shell with its machine, the failure, and the fields of `RowPulls`, `ReplicatedState` and
#    `CodecStates`. It is held briefly: nobody sends, receives or touches a tensor under it. Exception: codec states
#    are taken out of the encoder under it.
# 3. `Encoder`'s own lock: its scratch memory and the codec states.
# 4. `ServerLink`'s own lock: its credits, and what waits for them. Then the channel's lock, for its queue.
#
# `Links`'s own lock, of whether links overdraw, is never taken under `changed`; `changed` may be taken under it.
#
# Tensors have no lock. The bytes of a slot belong to one thread at a time, by the slot's state in the machine:
#
#     FILLING   the main thread; of a GPU's gradients the staging's
#     QUEUED    a link's sending thread
#     LANDING   a link's receiving thread


class Rewound(BaseException):
    """The micro-batch in progress belongs to an older generation: ``with micro:`` ends, the loop yields another one.

    It is not an Exception, so no handler in the user's code catches it as an error.
    """


class LockedShell:
    """The shell of one worker. `effects` runs its effects; `say` gets a sentence about each long wait.

    `memory` is that of the slots where there is not enough for all of them at once: claims wait for some of it, and it
    is given back.
    """

    effects: LinkEffects  # set once, before any link is opened

    def __init__(
        self, shell: WorkerShell, say: Callable[[str], None], memory: ShardMemory | None = None,
        cores: SharedCores | None = None, *, changed: threading.Condition | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.shell, self.machine, self.memory = shell, shell.machine, memory
        self.changed = changed or threading.Condition()
        self.clock = clock
        self.failure: BaseException | None = None
        self._say = say
        self._claiming = False  # True while the main thread waits for room in a slot
        self._awaited: frozenset[int] = frozenset()  # the shards that a forward pass waits for
        self.progress = Progress()  # of the main thread
        self.cores = cores or SharedCores()  # without a server in this process nobody waits for it
        self.activity = 0  # rises whenever the main thread gets on

    def handle(self, event: Event) -> None:
        """Pass one event to the machine. Takes the lock, then runs the effects without it."""
        with self.changed:
            effects = self.machine.handle(event)
            self.changed.notify_all()
        if effects:
            self.effects.run(effects)

    def apply(self, change: Callable[[], list[Effect]]) -> None:
        """Make any other change of the shell, with its effects on codec states. Takes the lock, like `handle`."""
        with self.changed:
            others = self.settle(change())
            self.changed.notify_all()
        self.effects.run(others)

    def settle(self, effects: Sequence[Effect]) -> list[Effect]:
        """Run the effects on codec states and return the others, to be run without the lock. Needs the lock."""
        others: list[Effect] = []
        for effect in effects:
            if isinstance(effect, CodecEffect):
                self.effects.run_locked(effect)
            else:
                others.append(effect)
        return others

    def set(self, change: Callable[[], None]) -> None:
        """Make a change that has no effects, and wake the waiting threads. Takes the lock."""
        with self.changed:
            change()
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise this error in every thread that waits, now or later. Takes the lock."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    # ---- the main thread ----

    def wait(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait until `ready()` is true; it must change nothing.

        Raises the error of whatever has failed. Needs the lock.
        """
        self.activity += 1
        waited = self.progress.waits(self.clock())
        computing = self.cores.give()
        try:
            wait_until(self.changed, lambda: self.failure is not None or ready(), describe, self._say, waited=waited)
        finally:
            self.progress.goes_on(self.clock())
            if computing:
                self.cores.take()
        if self.failure is not None:
            raise self.failure

    def check(self, *, stale: bool = True) -> None:
        """Raise the error of whatever has failed; with `stale`, raise Rewound if what is being computed is stale."""
        self.activity += 1
        if stale and self.machine.rewound:
            raise Rewound
        if self.failure is not None:
            raise self.failure

    def claim(self, shard: int, describe: Callable[[], str]) -> bool:
        """Wait until the slot may be written, and has memory. Returns False if it need not be written.

        Raises Rewound like `check`.
        """
        machine, memory, may = self.machine, self.memory, False

        def ready() -> bool:
            nonlocal may
            free = machine.may_fill(shard)
            may = bool(free)
            return machine.rewound or free is None or (may and (memory is None or memory.has_room(machine.slots)))

        with self.changed:
            if self.failure is None and ready():  # as nearly always
                self.activity += 1
            else:
                self._claiming = True
                self.wait(ready, describe)
                self._claiming = False
            if machine.rewound:
                raise Rewound
            if may:
                machine.fill(shard)
        return may

    def wait_for_shards(self, shards: Sequence[int], here: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait until these shards are `here()`, or what is being computed is stale. Needs the lock."""
        self._awaited = frozenset(shards)
        try:
            self.wait(lambda: self.machine.rewound or here(), describe)
        finally:
            self._awaited = frozenset()

    # ---- the links' threads: events that come for every shard wake the main thread only when it needs them ----

    def sent(self, shard: int, serial: int) -> None:
        """A slot's gradient has been sent."""
        with self.changed:
            effects = self.machine.handle(SlotSent(shard, serial))
            if self.memory is not None:
                self.memory.free(self.machine.slots)
            if self._claiming:  # otherwise the main thread waits for a version, and would wake for every shard in vain
                self.changed.notify_all()
        if effects:
            self.effects.run(effects)

    def arriving(self, event: Arriving, server: str, lands: Callable[[], None] | None = None) -> bool:
        """A version begins to arrive from `server`. If it may land, call `lands` under the lock and return True."""
        with self.changed:
            before = self.machine.target
            effects = self.shell.arriving(event, server)
            landing = isinstance(effects[0], Land)
            if landing and lands is not None:
                lands()
            # The target is known again: the main thread may have something to do although nothing lands
            target = self.machine.target
            if target != before or target > self.machine.step + 1 or self._claiming or self.machine.rewound:
                self.changed.notify_all()
        if len(effects) > 1:
            self.effects.run(effects[1:])
        return landing

    def landed(self, shard: int) -> None:
        """The version is complete."""
        with self.changed:
            effects = self.machine.handle(Landed(shard))
            if self.machine.complete or shard in self._awaited:
                self.changed.notify_all()
        if effects:
            self.effects.run(effects)


# ---- The memory of a worker's slots: one vector as long as the model, or a few shards' at a time ----

_MAPPED_BYTES = 128 << 10


class WholeVector:
    """One vector: every slot has memory of its own all the time. See `core/worker/slots.py` for who may touch which
    slot when."""

    in_place: frozenset[int] = frozenset()  # the shards whose slots are empty: see `InPlaceMemory`

    def __init__(self, layout: Layout, buffer: torch.Tensor) -> None:
        self._shards, self._buffer, self._bytes = layout.shards, buffer, bytes_of(buffer)

    def part(self, shard: int) -> tuple[torch.Tensor, int]:
        """A vector that holds the shard's slot (1-D fp32), and the word of the flat vector at which it begins."""
        return self._buffer, 0

    def words(self, shard: int) -> torch.Tensor:
        """The shard's slot, 1-D fp32."""
        place = self._shards[shard]
        return self._buffer[place.start : place.stop]

    def slot(self, shard: int) -> memoryview:
        """The shard's slot as bytes."""
        place = self._shards[shard]
        return self._bytes[place.start * 4 : place.stop * 4]

    landing = slot  # where a version belongs that is not encoded


class NarrowVector(WholeVector):
    """One vector for a GPU and for parameters that travel as bf16: slots hold what travels, and what crosses its bus.

    A version that comes raw, as the last one, lands in `buffer`, which also has the buffers' slots.
    """

    def __init__(self, layout: Layout, buffer: torch.Tensor, narrow: torch.Tensor) -> None:
        super().__init__(layout, buffer)
        self._narrow, self._narrow_bytes = narrow, bytes_of(narrow)
        self.parameters = frozenset(shard.index for shard in layout.shards if shard.role == "parameters")
        self._raw: set[int] = set()  # whose version has come raw

    def part(self, shard: int) -> tuple[torch.Tensor, int]:
        return (self._narrow, 0) if shard in self.parameters else super().part(shard)

    def words(self, shard: int) -> torch.Tensor:
        place = self._shards[shard]
        return self._narrow[place.start : place.stop] if shard in self.parameters else super().words(shard)

    def slot(self, shard: int) -> memoryview:
        place = self._shards[shard]
        return self._narrow_bytes[place.start * 2 : place.stop * 2] if shard in self.parameters else super().slot(shard)

    def landing(self, shard: int) -> memoryview:
        self._raw.add(shard)
        return super().slot(shard)

    def take(self, shard: int, payload: memoryview) -> None:
        """A version has come in bf16. Raises ProtocolError for one of another size."""
        slot = self.slot(shard)
        if len(payload) != len(slot):
            raise ProtocolError(f"a version of {len(payload)} bytes for shard {shard}: {len(slot)} were expected")
        slot[:] = payload
        self._raw.discard(shard)

    def whole(self) -> torch.Tensor:
        """The parameters of the version that has landed: bf16, or fp32 if any of them have come raw."""
        if self._raw.isdisjoint(self.parameters):
            return self._narrow
        for shard in self.parameters - self._raw:
            super().words(shard).copy_(self.words(shard))
        return self._buffer


class InPlaceMemory(WholeVector):
    """Like `WholeVector`; where a server steps a shard in place, nothing is written, so the system gives no memory."""

    def __init__(self, layout: Layout, buffer: torch.Tensor, model: InPlace) -> None:
        super().__init__(layout, buffer)
        self._model, self.in_place = model, frozenset(model.parameters)

    def words(self, shard: int) -> Any:
        return self._model.gradients[shard] if shard in self.in_place else super().words(shard)

    def slot(self, shard: int) -> memoryview:
        return memoryview(b"") if shard in self.in_place else super().slot(shard)


class ShardMemory:
    """Memory for the shards of parameters whose gradient is being written or sent, and for all shards of buffers.

    Gradients of about `most` bytes may wait to be sent; beyond that the main thread waits. Memory that is free is kept
    for the next gradients, up to as much.
    """

    in_place: frozenset[int] = frozenset()

    def __init__(self, layout: Layout, most: int, *, pinned: bool) -> None:
        self._shards, self._pinned = layout.shards, pinned
        self._words = layout.largest_shard
        self._most = max(4, most // max(1, 4 * self._words))  # gradients
        self._free: list[torch.Tensor] = []
        self._held: dict[int, torch.Tensor] = {}
        self._kept = {
            shard.index: torch.empty(shard.words, dtype=torch.float32, device="cpu")
            for shard in layout.shards if shard.role == "buffers"
        }  # fmt: skip

    def part(self, shard: int) -> tuple[torch.Tensor, int]:
        return self.words(shard), self._shards[shard].start

    def words(self, shard: int) -> torch.Tensor:
        if shard in self._kept:
            return self._kept[shard]
        held = self._held.get(shard)
        if held is None:  # only the main thread gets here: it writes a gradient
            held = self._free.pop() if self._free else memory_of(self._words, pinned=self._pinned)
            self._held[shard] = held
        return held[: self._shards[shard].words]

    def slot(self, shard: int) -> memoryview:
        return bytes_of(self.words(shard))

    landing = slot

    def has_room(self, slots: Slots) -> bool:
        """True if one more gradient may be written. Needs the exchange's lock."""
        return len(self._held) < self._most or len(slots.unsent) < self._most

    def free(self, slots: Slots) -> None:
        """Give back the memory of slots that are not in use. Needs the exchange's lock."""
        for shard in [shard for shard in list(self._held) if slots[shard] is Slot.FREE]:  # hooks add to it meanwhile
            memory = self._held.pop(shard)
            if len(self._free) < self._most:
                self._free.append(memory)


SlotMemory = WholeVector | ShardMemory


def memory_of(words: int, *, pinned: bool = False) -> torch.Tensor:
    """Uninitialised fp32 memory, 1-D. Much of it is mapped by itself, so that the system gets it back at once."""
    if pinned or 4 * words < _MAPPED_BYTES:
        return torch.empty(words, dtype=torch.float32, device="cpu", pin_memory=pinned)
    private = mmap.mmap(-1, 4 * words, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(private, dtype=torch.float32)


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of this shape with memory for one element, NaN: who reads it all the same is noticed."""
    return torch.full((1,), torch.nan, dtype=tensor.dtype, device=device).expand(tensor.shape)
