"""One worker of `benchmarks/strategies.py`: trains in one way, and writes what it computed when, and how good it was.

Nothing is evaluated while the clock runs: worker 0 keeps copies of the model (a few milliseconds in all) and evaluates
them when the training is over. A copy is made where the model is what the servers (under DDP: all ranks) hold: before
the first forward pass of a step, with local steps of a round (with fragments, what is not due is worker 0's own).
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import rallypoint as rp
from cluster import finish, join_gloo
from rallypoint.config import JobConfig, group_of, resolve, settings_of
from rallypoint.core.schedule import rate_at
from rallypoint.data.dataset import MapDataset
from rallypoint.data.loader import MicroBatches
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.optim import build_optimizer
from strategies_workloads import WORKLOADS, Pace, build, evaluate

Hook = Literal["none", "fp16"]
"""What DDP sends: torch's bf16 hook wants NCCL, and its PowerSGD's collectives get out of order over Gloo."""

_BUCKET_MB = 1  # DDP's default of 25 would be the whole model


class Task(msgspec.Struct, frozen=True):
    """What to train, and how: `settings` are those of `job.train`, `hook` is DDP's (None: not DDP).

    `slow` is how many times longer than usual computing takes here.
    """

    workload: str
    rank: int
    workers: int
    seed: int
    slow: float
    settings: dict[str, Any]
    hook: Hook | None


class Point(msgspec.Struct, frozen=True):
    """The validation loss of the parameters that were held at that time (seconds, monotonic)."""

    at: float
    loss: float


class Result(msgspec.Struct, frozen=True):
    """What a worker has to say.

    `began`, `ended` and the ends of its replicas (each of the same samples) are seconds, monotonic; bytes are those of
    its interface between the two, `computing` the processor seconds of a replica's forward and backward pass.
    """

    began: float
    ended: float
    finishes: list[float]
    up_bytes: int
    down_bytes: int
    computing: float
    curve: list[Point]


class Recorder:
    """Collects what a Result says. `every` is in steps; 0 keeps no copies."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self._model, self._every = model, every
        self._began = self._ended = 0.0
        self._finishes: list[float] = []
        self._before, self._after = (0, 0), (0, 0)
        self._copies: list[tuple[float, dict[str, Tensor]]] = []
        self._step = -1

    def begin(self, step: int) -> None:
        """A replica of `step` is about to be computed."""
        now = time.monotonic()
        if not self._began:
            self._began, self._before = now, interface_bytes()
        if self._every and step > self._step and step % self._every == 0:
            self._step = step
            self._copy(now)

    def finish(self) -> None:
        """It has been."""
        self._finishes.append(time.monotonic())

    def end(self) -> None:
        """The training is over, and the model holds the last parameters."""
        self._ended, self._after = time.monotonic(), interface_bytes()
        if self._every:
            self._copy(self._ended)

    def result(self, computing: float, validation: tuple[Tensor, Tensor]) -> Result:
        """All of it; evaluates the copies."""
        curve = []
        for at, state in self._copies:
            self._model.load_state_dict(state)
            curve.append(Point(at, evaluate(self._model, validation)))
        up, down = (after - before for after, before in zip(self._after, self._before, strict=True))
        return Result(self._began or self._ended, self._ended, self._finishes, up, down, computing, curve)

    def _copy(self, now: float) -> None:
        self._copies.append((now, {name: tensor.clone() for name, tensor in self._model.state_dict().items()}))


def interface_bytes() -> tuple[int, int]:
    """(sent, received) by eth0 of this network namespace, headers included; zeros where there is none."""
    with open("/proc/self/net/dev") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                fields = counters.split()
                return int(fields[8]), int(fields[0])
    return 0, 0


def rallypoint(task: Task, model: nn.Module, data: MapDataset, pace: Pace, recorder: Recorder) -> None:
    """As any user's script would."""
    with rp.join() as job:
        for micro in job.train(model, data, **task.settings):
            recorder.begin(micro.step)
            with micro:
                pace.keep()
                micro.backward(model.loss(*micro.batch))  # type: ignore[operator]
            if not micro.abandoned:
                recorder.finish()
        recorder.end()


def ddp(task: Task, model: nn.Module, data: MapDataset, pace: Pace, recorder: Recorder) -> None:
    """DistributedDataParallel over Gloo: the same samples, the same optimizer in every worker."""
    join_gloo(task.rank, task.workers)
    config = resolve(task.settings)
    optimizer = _optimizer(model, config)
    wrapped = DistributedDataParallel(_Loss(model), gradient_as_bucket_view=True, bucket_cap_mb=_BUCKET_MB)
    if task.hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    batches = MicroBatches(data, config, torch.device("cpu"))
    torch.distributed.barrier()
    for step in range(config.steps):
        batch = batches.load(step, task.rank, 0)
        recorder.begin(step)
        pace.keep()
        wrapped(*batch).backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(config.schedule, step, config.steps)
        optimizer.step()
        optimizer.zero_grad()
        recorder.finish()
    recorder.end()
    torch.distributed.barrier()


class _Loss(nn.Module):
    """The loss as a forward pass, which is what DDP wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Callable[..., Tensor] = self.model.loss  # type: ignore[assignment]
        return loss(*batch)


def _optimizer(model: nn.Module, config: JobConfig) -> torch.optim.Optimizer:
    groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(group_of(config, name, parameter.dim()), []).append(parameter)
    return build_optimizer(config.optimizer, [(members, settings_of(config, g)) for g, members in groups.items()])


def main() -> None:
    """Do the task in argv[1]."""
    hold_lifeline()
    task = msgspec.json.decode(sys.argv[1], type=Task)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    workload = WORKLOADS[task.workload]
    data, validation = workload.data()
    model = build(workload, task.seed)
    config = resolve(task.settings)
    batch = MicroBatches(data, config, torch.device("cpu")).load(0, 0, 0)
    pace = Pace(task.slow * config.batch * workload.sample_seconds, model, batch)
    recorder = Recorder(model, math.lcm(workload.every, config.steps_per_round) if task.rank == 0 else 0)
    (rallypoint if task.hook is None else ddp)(task, model, data, pace, recorder)
    finish(recorder.result(pace.computing, validation))


if __name__ == "__main__":
    main()
