"""One process of `benchmarks/snapshots.py`: trains a plain stack of layers, under DCP saving its state as it goes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

import rallypoint as rp
from cluster import finish, join_gloo
from rallypoint.launch.lifeline import hold_lifeline

Design = Literal["rallypoint", "dcp-thread", "dcp-process", "dcp-blocking"]


class Task(msgspec.Struct, frozen=True):
    """`layers` square matrices of `width`, `batch` rows and `pad` seconds of sleep at a step; a save after every
    `every` steps."""

    design: Design
    layers: int
    width: int
    batch: int
    pad: float
    steps: int
    every: int
    folder: str


class Result(msgspec.Struct, frozen=True):
    """When each step began, and of each save when it began and when it was durable: seconds, monotonic."""

    starts: list[float]
    saves: list[tuple[float, float]]


def rallypoint(task: Task, model: nn.Sequential, rows: torch.Tensor) -> Result:
    """As any user's script would; when snapshots are taken is the servers' business."""
    starts: list[float] = []
    data = torch.utils.data.TensorDataset(rows)
    with rp.join() as job:
        run = job.train(model, data, replicas=1, batch=task.batch, steps=task.steps, optimizer=rp.AdamW(lr=1e-4))
        for micro in run:
            with micro:
                starts.append(time.monotonic())
                time.sleep(task.pad)
                micro.backward(model(micro.batch[0]).square().mean())
    return Result(starts, [])


def checkpointed(task: Task, model: nn.Sequential, rows: torch.Tensor) -> Result:
    """A plain loop with torch's distributed checkpoints."""
    join_gloo(0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    saver = Saver(task)
    starts: list[float] = []
    for step in range(task.steps):
        starts.append(time.monotonic())
        time.sleep(task.pad)
        model(rows[: task.batch]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % task.every == 0 and step + 1 < task.steps:
            moments = {f"{i}": optimizer.state[p] for i, p in enumerate(model.parameters())}
            saver.save(step, {"model": model.state_dict(), "moments": moments})
    saver.wait()
    return Result(starts, saver.saves)


class Saver:
    """DCP in one of its ways, at its best: memory for staging is kept from one save to the next."""

    def __init__(self, task: Task) -> None:
        self.saves: list[tuple[float, float]] = []
        self._task = task
        self._under_way: Future[Any] | None = None
        self._noted = threading.Event()
        shared = task.design == "dcp-process"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False
            )
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to save; the one before is waited for, which belongs to its price."""
        self.wait()
        began, where = time.monotonic(), Path(self._task.folder) / f"step-{step}"
        if self._task.design == "dcp-blocking":
            save(state, checkpoint_id=where)
            self.saves.append((began, time.monotonic()))
            return
        kind = AsyncCheckpointerType.PROCESS if self._task.design == "dcp-process" else AsyncCheckpointerType.THREAD
        saving = async_save(state, checkpoint_id=where, async_checkpointer_type=kind, async_stager=self._stager)
        self._under_way = saving if isinstance(saving, Future) else saving.upload_completion
        self._noted.clear()
        self._under_way.add_done_callback(lambda _: self._note(began))

    def wait(self) -> None:
        """Until what is under way is durable."""
        if self._under_way is not None:
            self._under_way.result()
            self._noted.wait()
            self._under_way = None

    def _note(self, began: float) -> None:
        self.saves.append((began, time.monotonic()))
        self._noted.set()


def main() -> None:
    """Do the task in argv[1]."""
    hold_lifeline()
    task = msgspec.json.decode(sys.argv[1], type=Task)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(task.width, task.width, bias=False) for _ in range(task.layers)))
    rows = torch.randn(4 * task.batch, task.width)
    train: Callable[[Task, nn.Sequential, torch.Tensor], Result]
    train = rallypoint if task.design == "rallypoint" else checkpointed
    finish(train(task, model, rows))


if __name__ == "__main__":
    main()
