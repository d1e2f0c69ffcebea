"""Memory that is pinned for a GPU, with a CUDA runtime that is played."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rallypoint.net import memory, pool


class Runtime:
    """It notes which memory it was told to lock, and whether that was still there when it was let go."""

    def __init__(self, failure: int = 0) -> None:
        self.failure, self.locked, self.log = failure, {}, []  # type: ignore[var-annotated]
        self.last = 0  # what cudaGetLastError would return

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:
        self.log.append(("lock", nbytes, flags))
        self.locked[start] = nbytes
        self.last = self.failure or self.last
        return self.failure

    def kernel(self, *shape: int, dtype: torch.dtype, device: str) -> None:
        """What torch does after each: it asks for the last error, of whatever that was, and so clears it."""
        last, self.last = self.last, 0
        if last:
            raise RuntimeError(f"CUDA error {last}")

    def cudaHostUnregister(self, start: int) -> None:
        self.log.append(("let go", self.locked.pop(start), _mapped(start)))


def _mapped(start: int) -> bool:
    with open("/proc/self/maps") as lines:
        ranges = (line.split()[0].split("-") for line in lines)
        return any(int(first, 16) <= start < int(last, 16) for first, last in ranges)


def test_pinned_memory_is_as_long_as_asked_and_can_be_lent_and_is_let_go_before_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    words = 300_000
    vector = pool.pinned_words(words)
    arena = memory._ARENAS.get()
    assert arena is not None
    assert arena.find(pool.bytes_of(vector)) is not None
    assert runtime.log == [("lock", 4 * words, 0)]
    del vector
    gc.collect()
    assert runtime.log[1:] == [("let go", 4 * words, True)]


@pytest.mark.parametrize("why", ["little", "refused"])
def test_what_cannot_be_locked_is_torchs_own_pinned_memory(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    asked: list[Any] = []
    empty = torch.empty

    def noted(*shape: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        asked.append((shape, pin_memory))
        return empty(*shape, **how)

    runtime = Runtime(failure=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch, "zeros", runtime.kernel)
    words = 100 if why == "little" else 300_000
    assert pool.pinned_words(words).numel() == words
    assert asked == [((words,), True)]
    assert runtime.last == 0  # else the next kernel would be blamed for it


def test_memory_is_pinned_for_the_gpu_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's current device is GPU 0 unless it says otherwise: there CUDA would take half a gigabyte."""
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    class OnDevice(Runtime):
        def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:
            self.log.append(("on", current[-1]))
            return super().cudaHostRegister(start, nbytes, flags)

    runtime = OnDevice()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 2, raising=False)
    pool.pinned_words(300_000)
    assert runtime.log[0] == ("on", 2)
