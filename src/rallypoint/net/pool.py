"""Pooled buffers: receiving, adding and publishing a payload need no new allocation."""

from __future__ import annotations

import threading

import torch


class Buffer:
    """`words` fp32 words, as a tensor and as bytes. Reference-counted: the last `release` returns it to its pool.

    Any thread may retain and release it.
    """

    __slots__ = ("_holders", "_pool", "bytes", "tensor")

    def __init__(self, pool: BufferPool, words: int) -> None:
        self._pool = pool
        self._holders = 1
        self.tensor = torch.empty(words, dtype=torch.float32)
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
            if self._holders == 0 and self._pool.keeps:
                self._pool.free.append(self)
            elif self._holders < 0:
                raise AssertionError("a buffer was released more often than it was held")


class BufferPool:
    """Buffers of `words` fp32 words each, allocated on demand and kept for reuse. Thread-safe.

    The senders' credits bound their number. With `keeps=False` released buffers are freed, for sizes needed only once.
    """

    def __init__(self, words: int, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self.lock = threading.Lock()
        self.free: list[Buffer] = []
        self.made = 0
        self._words = words

    def take(self) -> Buffer:
        """A buffer with one holder. Its contents are undefined."""
        with self.lock:
            if not self.free:
                self.made += 1
                return Buffer(self, self._words)
            buffer = self.free.pop()
        return buffer.retain()


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


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. Not a copy."""
    return memoryview(tensor.view(torch.uint8).numpy().data)
