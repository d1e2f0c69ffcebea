"""One worker of `benchmarks/train.py`: trains a GPT and writes when each step began, its losses and its memory."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rallypoint as rp
import rallypoint.bridges.ddp as servers
from cluster import finish, join_gloo, memory_of_others
from rallypoint.config import JobConfig, group_of, resolve, settings_of
from rallypoint.core.schedule import rate_at
from rallypoint.data.loader import MicroBatches
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.optim import build_optimizer
from rallypoint.recipes.gpt_model import GPT, GPTConfig, TransformerLayer
from rallypoint.recipes.text import TextDataset, load_text
from rallypoint.worker.collective import Sums

Design = Literal[
    "rallypoint", "replicated", "snapshots", "durable", "ddp", "hook", "fsdp2", "backend", "alone"
]
_TEXT_BYTES = 4 << 20  # enough for any benchmark, and read in no time


class Task(msgspec.Struct, frozen=True):
    """What to train. `settings` are those of `job.train`, the same for all designs; `alone` only computes."""

    design: Design
    rank: int
    workers: int
    model: GPTConfig
    settings: dict[str, object]
    accelerator: float = 0.0  # seconds that each block sleeps in its forward; twice as long in its backward


class Result(msgspec.Struct, frozen=True):
    """Of every replica's step computed here: its number, when it began (seconds, monotonic), its loss; bytes at the
    peak, over imports and data."""

    steps: list[int]
    began: list[float]
    losses: list[float]
    peak_bytes: int


_SETTLED = 3  # steps after which all memory is in use that will be


class Recorder:
    """Collects what a Result says; `begin` once everything is imported and the data is read."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._began: list[float] = []
        self._losses: list[float] = []
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the peak begins anew: ru_maxrss would include our parent's
        self._baseline, self._others = _memory("VmRSS"), 0

    def step(self, step: int, loss: torch.Tensor, began: float) -> None:
        """A replica's step that began then had this loss."""
        self._steps.append(step)
        self._began.append(began)
        self._losses.append(float(loss.detach()))
        if len(self._steps) == _SETTLED:
            self._others = memory_of_others()

    def result(self) -> Result:
        """All of it."""
        return Result(self._steps, self._began, self._losses, _memory("VmHWM") - self._others - self._baseline)


def rallypoint(task: Task, data: TextDataset, recorder: Recorder) -> None:
    """As any user's script would."""
    model = model_of(task)
    with rp.join() as job:
        for micro in job.train(model, data, **task.settings):  # type: ignore[arg-type]
            with micro:
                began = time.monotonic()
                loss = model.loss(*micro.batch)
                micro.backward(loss)
            recorder.step(micro.step, loss, began)


def ddp(task: Task, data: TextDataset, recorder: Recorder) -> None:
    """DistributedDataParallel over Gloo: the same samples, the same fused optimizer in every worker. As "hook" its
    gradients are added up by servers."""
    state = _sums(task) if task.design == "hook" else None
    join_gloo(task.rank, task.workers)
    config = resolve(task.settings)
    model = model_of(task)
    wrapped = DistributedDataParallel(_Loss(model), gradient_as_bucket_view=True)
    if state is not None:
        wrapped.register_comm_hook(state, servers.hook)
    _train(wrapped, _optimizer(model, config), config, task, data, recorder)


def fsdp2(task: Task, data: TextDataset, recorder: Recorder) -> None:
    """`fully_shard` of each block and of the rest over Gloo: each worker holds and updates its part of each tensor. As
    "backend" its gradients are added up by servers."""
    from torch.distributed.device_mesh import init_device_mesh  # a second of processor that the others need not spend
    from torch.distributed.fsdp import fully_shard

    if task.design == "backend":
        _sums(task)
        import rallypoint.bridges.c10d  # noqa: F401  # registers the backend
    join_gloo(task.rank, task.workers, "rallypoint" if task.design == "backend" else "gloo")
    config = resolve(task.settings)
    model = model_of(task)
    mesh = init_device_mesh("cpu", (task.workers,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    wrapped = _Loss(model)
    fully_shard(wrapped, mesh=mesh)
    _train(wrapped, _optimizer(model, config), config, task, data, recorder)


def _sums(task: Task) -> Sums:
    """Join the cluster; torch's processes meet as without it."""
    os.environ.update(RANK=str(task.rank), WORLD_SIZE=str(task.workers))
    return servers.join()


def _train(
    wrapped: nn.Module, optimizer: torch.optim.Optimizer, config: JobConfig, task: Task, data: TextDataset,
    recorder: Recorder,
) -> None:  # fmt: skip
    """The loop of torch's own designs."""
    batches = MicroBatches(data, config, torch.device("cpu"))
    for step in range(config.steps):
        began = time.monotonic()
        loss = wrapped(*batches.load(step, task.rank, 0))
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(config.schedule, step, config.steps)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(step, loss, began)
    torch.distributed.barrier()


def alone(task: Task, data: TextDataset, recorder: Recorder) -> None:
    """Forward and backward only, beside all other workers doing the same: what a step costs without communication."""
    join_gloo(task.rank, task.workers)  # so that all begin together
    config = resolve(task.settings)
    model = model_of(task)
    batches = MicroBatches(data, config, torch.device("cpu"))
    torch.distributed.barrier()
    for step in range(config.steps):
        began = time.monotonic()
        loss = model.loss(*batches.load(step, task.rank, 0))
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        recorder.step(step, loss, began)
    torch.distributed.barrier()


class _Loss(nn.Module):
    """The loss as a forward pass, which is what DDP wraps."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.loss(tokens, targets)


def model_of(task: Task) -> GPT:
    """The model of a task, the same in every worker."""
    torch.manual_seed(1234)
    model = GPT(task.model)
    if task.accelerator:
        for block in model.blocks:  # by their multiplications: 4 width^2 for each token, and 8 width^2
            assert isinstance(block, TransformerLayer)
            block.attention.register_forward_hook(partial(_computed, task.accelerator / 3))
            block.down.register_forward_hook(partial(_computed, task.accelerator * 2 / 3))
    return model


class _Accelerator(torch.autograd.Function):
    """Sleeps as long as an accelerator computes, and changes nothing: the processor is free meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


def _computed(seconds: float, module: nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
    """At the end of attention or MLP: it has read its parameters by then, and has no gradients yet in the backward."""
    result: torch.Tensor = _Accelerator.apply(output, seconds)  # type: ignore[no-untyped-call]
    return result


def _optimizer(model: GPT, config: JobConfig) -> torch.optim.Optimizer:
    groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(group_of(config, name, parameter.dim()), []).append(parameter)
    return build_optimizer(config.optimizer, [(members, settings_of(config, g)) for g, members in groups.items()])


def _memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:"))


def main() -> None:
    """Do the task in argv[1]."""
    hold_lifeline()
    task = msgspec.json.decode(sys.argv[1], type=Task)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    data, _ = load_text(block=task.model.block, budget=_TEXT_BYTES)
    recorder = Recorder()
    loops = {"ddp": ddp, "hook": ddp, "fsdp2": fsdp2, "backend": fsdp2, "alone": alone}
    loops.get(task.design, rallypoint)(task, data, recorder)
    finish(recorder.result())


if __name__ == "__main__":
    main()
