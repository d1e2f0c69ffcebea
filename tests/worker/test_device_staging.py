"""Gradients on their way from a device, on a device that is played: its copies happen when somebody waits for them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rallypoint.core.optimizer import AdamW
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.loop import session
from rallypoint.worker.sources.hooks import CudaCopies, DeviceStaging, HostStaging
from rallypoint.worker.tensors import weights_hash

PATIENCE_S = 30.0
HELD = {"precision": "bf16", "memory.hold": "bf16"}
DATA = torch.utils.data.TensorDataset(
    torch.randn(64, 6, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3
)


class LateCopies:
    """A device whose copies are made as late as a device may: when a mark is waited for. A slot is NaN until then, so
    that whoever reads it too early is noticed; values that were freed before could not be copied."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, Callable[[], torch.Tensor | None]]] = []
        self.made = self.count = 0
        self._lock = threading.Lock()

    def copy(self, slot: torch.Tensor, values: torch.Tensor) -> None:
        slot.fill_(torch.nan)
        self.copies.append((slot, weakref.ref(values)))  # who stages it holds it

    def mark(self) -> Callable[[], None]:
        upto = len(self.copies)
        return lambda: self._make(upto)

    @torch.no_grad()
    def _make(self, upto: int) -> None:
        with self._lock:
            while self.made < upto:
                slot, values = self.copies[self.made]
                there = values()
                assert there is not None, "a gradient was freed before it was copied"
                slot.copy_(there)
                self.made += 1


def staging(copies: LateCopies) -> tuple[DeviceStaging, list[BaseException]]:
    failures: list[BaseException] = []
    return DeviceStaging(copies, failures.append), failures


def test_a_gradient_is_held_until_it_is_copied_and_no_longer() -> None:
    copies = LateCopies()
    staged, failures = staging(copies)
    slot, gradient = torch.zeros(4), torch.arange(4.0)
    held = weakref.ref(gradient)
    staged.write(slot, gradient, add=False)
    del gradient
    gc.collect()
    assert held() is not None
    staged.drain()
    staged.close()
    gc.collect()
    assert (failures, slot.tolist(), held()) == ([], [0.0, 1.0, 2.0, 3.0], None)


def test_what_comes_after_a_copy_runs_in_order_and_an_error_of_it_is_reported() -> None:
    copies, order, over = LateCopies(), [], threading.Event()
    staged, failures = staging(copies)
    slots = [torch.zeros(2) for _ in range(3)]
    kept = [torch.full((2,), float(number)) for number in range(3)]
    for number, slot in enumerate(slots):
        staged.write(slot, kept[number], add=False)
        staged.then(lambda number=number, slot=slot: order.append((number, slot[0].item())))  # type: ignore[misc]
    staged.then(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    staged.then(over.set)
    staged.drain()
    staged.close()
    assert order == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [type(error) for error in failures] == [ZeroDivisionError]
    assert not over.is_set()


def test_a_device_that_hangs_keeps_nobody_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    class Hangs(LateCopies):
        def mark(self) -> Callable[[], None]:
            return lambda: [go_on.wait(PATIENCE_S)].clear()

    monkeypatch.setattr("rallypoint.worker.sources.hooks._CLOSES_WITHIN_S", 0.1)
    staged, _ = staging(Hangs())
    staged.then(lambda: None)
    staged.close()  # returns
    go_on.set()
    staged._thread.join(PATIENCE_S)
    assert not staged._thread.is_alive()


def test_a_loss_that_is_on_the_host_already_needs_no_stream() -> None:
    """`criterion(model(x).cpu(), y)`, or a number that a wrapped optimizer was told."""
    slot = torch.zeros((), dtype=torch.float64)
    CudaCopies.copy(object.__new__(CudaCopies), slot, torch.tensor(1.5))
    assert slot.item() == 1.5


# ---- whole jobs ----


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.GELU(), torch.nn.Linear(40, 3))


def trained(monkeypatch: pytest.MonkeyPatch, copies: LateCopies | None, **settings: Any) -> str:
    def of(device: torch.device, failed: Callable[[BaseException], None]) -> Any:
        return HostStaging() if copies is None else DeviceStaging(copies, failed)

    monkeypatch.setattr(session, "staging_for", of)
    model = build()
    with EmbeddedJob(servers=2) as job:
        run = job.train(model, DATA, **{
            "replicas": 3, "batch": 4, "steps": 6, "optimizer": AdamW(lr=1e-2), "network.shard_bytes": 256, **settings,
        })  # fmt: skip
        for micro in run:
            with micro:
                x, y = micro.batch
                micro.backward(F.cross_entropy(model(x).float(), y))
    return weights_hash(model)


@pytest.mark.parametrize("settings", [
    {}, {"clip": 1.0}, {"accumulate": 4, "batch": 8}, {"nonfinite": "skip"}, HELD,
    {**HELD, "accumulate": 4, "batch": 8},
], ids=str)  # fmt: skip
def test_a_device_that_copies_late_changes_no_byte(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """Of bf16 parameters too: autograd would add up micro-batches' gradients in bf16, a slot in fp32."""
    copies = LateCopies()
    assert trained(monkeypatch, copies, **settings) == trained(monkeypatch, None, **settings)
    assert copies.made == len(copies.copies) > 0
