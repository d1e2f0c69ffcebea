"""A process of `benchmarks/recovery_peers.py`: a worker under torchft or torchrun elastic, or what such workers need.

Members end when their parent does, however it dies: the benchmark's children with the benchmark, a worker of torchrun
with its agent.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

from rallypoint.recipes.gpt_model import GPT, VOCABULARY, GPTConfig

_PR_SET_PDEATHSIG = 1
_MODEL = GPTConfig(layers=2, heads=2, width=64, block=32)
_BATCH = 2
_CHECKPOINT = "checkpoint.pt"


class Task(msgspec.Struct, frozen=True):
    """What a worker needs to know. `seat` names its files; `address` is where the workers meet.

    torchrun's write a checkpoint `every` so many steps; torchft's wait `timeout_s` for one another.
    """

    seat: int
    workers: int
    folder: str
    step_seconds: float
    every: int
    address: str
    timeout_s: float = 0.0


def steps_file(folder: Path, seat: int) -> Path:
    """Where the worker in that seat writes its finished steps, one line each: monotonic seconds, step."""
    return folder / f"seat{seat}.steps"


def worker_pid_file(folder: Path, seat: int) -> Path:
    """Where the worker in that seat writes its process id when it starts."""
    return folder / f"seat{seat}.pid"


class Loss(nn.Module):
    """The loss of a small GPT on random bytes, lengthened to a step's time by sleep: the cores are shared."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.model = GPT(_MODEL)
        self._step_seconds = step_seconds

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        loss = self.model.loss(tokens[:, :-1], tokens[:, 1:])
        time.sleep(max(0.0, began + self._step_seconds - time.monotonic()))
        return loss


class Steps:
    """Appends each finished step to the worker's file."""

    def __init__(self, task: Task) -> None:
        self._file = steps_file(Path(task.folder), task.seat).open("a", buffering=1)

    def finished(self, step: int) -> None:
        """That step is done, now."""
        self._file.write(f"{time.monotonic()} {step}\n")


def batch() -> torch.Tensor:
    """Random bytes, of one sample more than the context."""
    return torch.randint(VOCABULARY, (_BATCH, _MODEL.block + 1))


def work_with_torchft(task: Task) -> None:
    """The loop of torchft's own train_ddp.py, with its timeouts; the replica group is this process."""
    torchft = importlib.import_module("torchft")  # optional, so unknown to type checkers
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    loss = Loss(task.step_seconds)
    inner = torch.optim.AdamW(loss.parameters(), lr=3e-4)

    def state() -> dict[str, Any]:
        return {"model": loss.state_dict(), "optimizer": inner.state_dict()}

    def load(states: dict[str, Any]) -> None:
        loss.load_state_dict(states["model"])
        inner.load_state_dict(states["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=task.timeout_s)), load_state_dict=load, state_dict=state,
        min_replica_size=task.workers - 1, timeout=timedelta(seconds=30), rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=task.address,
        replica_id=f"worker_{task.seat}",
    )  # fmt: skip
    replica = torchft.DistributedDataParallel(manager, loss)
    optimizer = torchft.Optimizer(manager, inner)
    steps = Steps(task)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        replica(batch()).backward()
        optimizer.step()
        if manager.current_step() > before:  # else it was not committed: the same step comes again
            steps.finished(manager.current_step())


def work_with_torchrun(task: Task) -> None:
    """What PyTorch's elastic tutorial does: everything from the checkpoint, one by rank 0 every so many steps."""
    worker_pid_file(Path(task.folder), task.seat).write_text(str(os.getpid()))
    path = Path(task.folder) / _CHECKPOINT
    dist.init_process_group("gloo")
    loss = Loss(task.step_seconds)
    replica = DistributedDataParallel(loss)
    optimizer = torch.optim.AdamW(loss.parameters(), lr=3e-4)
    step = 0
    if path.exists():
        saved = torch.load(path)
        loss.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    steps = Steps(task)
    while True:
        step += 1
        optimizer.zero_grad()
        replica(batch()).backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % task.every == 0:
            partial = path.with_suffix(".partial")
            torch.save({"model": loss.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
            partial.replace(path)
        steps.finished(step)


def run_lighthouse(address: Path, min_replicas: int, timeout_ms: int) -> None:
    """torchft's lighthouse as its README starts it; its address is left in that file."""
    coordination = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=min_replicas, join_timeout_ms=10_000, quorum_tick_ms=100,
        heartbeat_timeout_ms=timeout_ms,
    )  # fmt: skip
    partial = address.with_suffix(".partial")
    partial.write_text(lighthouse.address())
    partial.replace(address)
    threading.Event().wait()


def run_agent(arguments: list[str]) -> None:
    """`torchrun` with these arguments."""
    from torch.distributed.run import main as torchrun

    torchrun(arguments)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just before
        sys.exit("the parent is gone")


def main() -> None:
    """Be the member that argv[1] names, with the arguments that follow."""
    die_with_parent()
    torch.set_num_threads(1)
    role, *arguments = sys.argv[1:]
    if role == "agent":
        run_agent(arguments)
    elif role == "lighthouse":
        run_lighthouse(Path(arguments[0]), int(arguments[1]), int(arguments[2]))
    else:
        works: dict[str, Callable[[Task], None]] = {"torchft": work_with_torchft, "torchrun": work_with_torchrun}
        works[role](msgspec.json.decode(arguments[0], type=Task))


if __name__ == "__main__":
    main()
