"""Pooled buffers: receiving, adding and publishing a payload need no new allocation."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from contextlib import suppress

import torch

from rallypoint.net.memory import allocate

PERIOD = 1024  # takes
log = logging.getLogger("rallypoint")


class Buffer:
    """`words` fp32 words, as a tensor and as bytes. Reference-counted: the last `release` returns it to its pool.

    Any thread may retain and release it.
    """

    __slots__ = ("_holders", "_pool", "bytes", "tensor")

    def __init__(self, pool: BufferPool, words: int) -> None:
        self._pool = pool
        self._holders = 1
        self.tensor = words_of_memory(words)
        self.bytes = bytes_of(self.tensor)

    def retain(self) -> Buffer:
        """Add a holder. Returns the buffer itself."""
        with self._pool.lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder. The last one returns the buffer to its pool. AssertionError if there is none left."""
        with self._pool.lock:
            self._holders -= 1
            if self._holders == 0:
                self._pool.returned(self)
            elif self._holders < 0:
                raise AssertionError("a buffer was released more often than it was held")


class BufferPool:
    """Buffers of `words` fp32 words each, allocated on demand and kept for reuse. Thread-safe.

    The senders' credits bound their number. It keeps no more than were in use at once lately (during the last PERIOD
    to 2 PERIOD takes), and gives the others' memory back. With `keeps=False` it keeps none, for sizes needed only once.

    Attributes:
        free: the buffers that are kept.
        made: how many there are, in use and free.
    """

    def __init__(self, words: int, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self.lock = threading.Lock()
        self.free: list[Buffer] = []
        self.made = 0
        self._words = words
        self._takes = 0
        self._most, self._most_before = 0, 0  # in use at once, in this period and in the one before

    def take(self) -> Buffer:
        """A buffer with one holder. Its contents are undefined."""
        with self.lock:
            in_use = self.made - len(self.free) + 1
            self._takes += 1
            if self._takes % PERIOD == 0:
                self._most, self._most_before = in_use, self._most
            self._most = max(self._most, in_use)
            if not self.free:
                self.made += 1
                return Buffer(self, self._words)
            buffer = self.free.pop()
            buffer._holders = 1
        return buffer

    def returned(self, buffer: Buffer) -> None:
        """Keep a buffer that nobody holds any more, or let it go. Needs the lock."""
        if self.keeps:
            self.free.append(buffer)
        else:
            self.made -= 1
        while self.free and self.made > max(self._most, self._most_before):
            self.free.pop(0)
            self.made -= 1


class BufferPools:
    """Buffers of any size, each from a pool for its size rounded up to a power of two. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, BufferPool] = {}

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least `nbytes` bytes, with one holder."""
        words = 1 << max(0, -(-nbytes // 4) - 1).bit_length()
        with self._lock:
            pool = self._pools.setdefault(words, BufferPool(words))
        return pool.take()


def words_of_memory(words: int) -> torch.Tensor:
    """Memory of fp32 words, 1-D, uninitialised. Members of this host may read it; the system has it back as soon as it
    is freed."""
    memory = allocate(4 * words)
    if memory is None:
        return torch.empty(words, dtype=torch.float32, device="cpu")
    return torch.frombuffer(memory, dtype=torch.float32)


def pinned_words(words: int) -> torch.Tensor:
    """Like `words_of_memory`, and page-locked: a GPU copies to and from it beside what it computes.

    Memory that torch pins by itself is rounded up to a power of two, and no other member may read it.
    """
    memory = allocate(4 * words)
    if memory is None or not _pin(memory):
        return torch.empty(words, dtype=torch.float32, device="cpu", pin_memory=True)
    return torch.frombuffer(memory, dtype=torch.float32)


def _pin(memory: ctypes.Array[ctypes.c_char]) -> bool:
    runtime, start = torch.cuda.cudart(), ctypes.addressof(memory)  # type: ignore[no-untyped-call]
    gpus = range(torch.cuda.device_count())
    used = (gpu for gpu in gpus if torch._C._cuda_hasPrimaryContext(gpu))  # type: ignore[attr-defined]
    with torch.cuda.device(next(used, -1)):  # else it takes memory of GPU 0, whichever the model is on
        if failure := int(runtime.cudaHostRegister(start, len(memory), 0)):
            log.info("%d bytes of shared memory cannot be pinned (CUDA error %d)", len(memory), failure)
            with suppress(RuntimeError):  # the runtime keeps the error, and the next kernel's check would raise it
                torch.zeros(1, dtype=torch.float32, device="cuda")
            return False
    weakref.finalize(memory, runtime.cudaHostUnregister, start).atexit = False  # it runs before those made earlier
    return True


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. Not a copy."""
    return memoryview(tensor.view(torch.uint8).numpy().data)
