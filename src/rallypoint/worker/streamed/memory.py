"""The memory of a worker's slots: one vector as long as the model, or a few shards' at a time."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch

from rallypoint.core.layout import Layout
from rallypoint.core.worker.slots import Slot, Slots
from rallypoint.net.pool import bytes_of

_MAPPED_BYTES = 128 << 10


class SlotMemory(Protocol):
    """Where the slots' bytes are. See `core/worker/slots.py` for who may touch which slot when."""

    def part(self, shard: int) -> tuple[torch.Tensor, int]:
        """A vector that holds the shard's slot (1-D fp32), and the word of the flat vector at which it begins."""

    def words(self, shard: int) -> torch.Tensor:
        """The shard's slot, 1-D fp32."""

    def slot(self, shard: int) -> memoryview:
        """The shard's slot as bytes."""

    def has_room(self, slots: Slots) -> bool:
        """True if one more gradient may be written. Needs the exchange's lock."""

    def free(self, slots: Slots) -> None:
        """Give back the memory of slots that are not in use. Needs the exchange's lock."""


class WholeVector:
    """One vector: every slot has memory of its own all the time."""

    def __init__(self, layout: Layout, buffer: torch.Tensor) -> None:
        self._shards, self._buffer, self._bytes = layout.shards, buffer, bytes_of(buffer)

    def part(self, shard: int) -> tuple[torch.Tensor, int]:
        return self._buffer, 0

    def words(self, shard: int) -> torch.Tensor:
        place = self._shards[shard]
        return self._buffer[place.start : place.stop]

    def slot(self, shard: int) -> memoryview:
        place = self._shards[shard]
        return self._bytes[place.start * 4 : place.stop * 4]

    def has_room(self, slots: Slots) -> bool:
        return True

    def free(self, slots: Slots) -> None:
        """Does nothing."""


class ShardMemory:
    """Memory for the shards of parameters whose gradient is being written or sent, and for all shards of buffers.

    Gradients of about `most` bytes may wait to be sent; beyond that the main thread waits. Memory that is free is kept
    for the next gradients, up to as much.
    """

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

    def has_room(self, slots: Slots) -> bool:
        return len(self._held) < self._most or len(slots.unsent) < self._most

    def free(self, slots: Slots) -> None:
        for shard in [shard for shard in self._held if slots[shard] is Slot.FREE]:
            memory = self._held.pop(shard)
            if len(self._free) < self._most:
                self._free.append(memory)


def memory_of(words: int, *, pinned: bool = False) -> torch.Tensor:
    """Uninitialised fp32 memory, 1-D. Much of it is mapped by itself, so that the system has it back when it is freed.
    """
    if pinned or 4 * words < _MAPPED_BYTES:
        return torch.empty(words, dtype=torch.float32, device="cpu", pin_memory=pinned)
    private = mmap.mmap(-1, 4 * words, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(private, dtype=torch.float32)


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of this shape with memory for one element, NaN: who reads it all the same is noticed."""
    return torch.full((1,), torch.nan, dtype=tensor.dtype, device=device).expand(tensor.shape)
