"""How a gradient gets into its slot: in place on a CPU; on a GPU through pinned memory on a side stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch


class Staging(Protocol):
    """Copies gradients into slots."""

    eager: bool
    """True: every micro-batch's gradient is added into the slot at once and freed. False: autograd accumulates on the
    device, and only the last micro-batch's hook writes."""

    def write(self, slot: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
        """Copy (or add) `gradient` into `slot`, a CPU fp32 view of the same shape."""

    def then(self, call: Callable[[], None]) -> None:
        """Run `call` once everything written so far is in its slot."""

    def drain(self) -> None:
        """Wait until every `then` so far has run."""

    def close(self) -> None:
        """End any thread."""


class HostStaging:
    """Gradients in CPU memory: a copy, or an addition, in place."""

    eager = True

    def write(self, slot: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
        if add:
            slot.add_(gradient)
        else:
            slot.copy_(gradient)

    def then(self, call: Callable[[], None]) -> None:
        call()

    def drain(self) -> None:
        """Does nothing: every copy is complete when `write` returns."""

    def close(self) -> None:
        """Does nothing: there is no thread."""


class CudaStaging:
    """Copies gradients from a CUDA device to pinned slots on a side stream, while backward continues.

    A thread waits for each copy's event, in order, and then runs what `then` was given. `failed` gets an error of that
    thread.
    """

    eager = False

    def __init__(self, device: torch.device, failed: Callable[[BaseException], None]) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._failed = failed
        self._queue: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait_events, name="device to host", daemon=True)
        self._thread.start()

    def write(self, slot: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
        assert not add, "a device accumulates in .grad"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            slot.copy_(gradient, non_blocking=True)
        gradient.record_stream(self._stream)  # the memory must not be reused before the copy is complete

    def then(self, call: Callable[[], None]) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._queue.put((event, call))

    def drain(self) -> None:
        drained = threading.Event()
        self.then(drained.set)
        while not drained.wait(1.0):
            if not self._thread.is_alive():
                return  # the thread failed and has reported it

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _wait_events(self) -> None:
        while (item := self._queue.get()) is not None:
            event, call = item
            try:
                event.synchronize()
                call()
            except Exception as error:  # the main thread raises it
                self._failed(error)
                return


def staging_for(device: torch.device, failed: Callable[[BaseException], None]) -> Staging:
    """Return the staging for a model on `device`."""
    return CudaStaging(device, failed) if device.type == "cuda" else HostStaging()
