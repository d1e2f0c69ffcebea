"""The same job in one process with plain PyTorch: every synchronous run must equal it, byte for byte.

It runs R replicas one after another, adds their gradients pairwise (`tree_sum`: for one or two replicas that is the
ordinary sum), and steps one torch optimizer over the model's own parameters. It shares with the engine only what the
job's definition fixes: sample order, seeds, the layout's shards (the clip norm is the norm of the norms of their pieces
of 1 MiB), the choice of optimizer groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rallypoint.config import JobConfig, settings_of
from rallypoint.core.layout import SHARD_BYTES, WORD_BYTES
from rallypoint.core.optimizer import EMA, Optimizer, takes
from rallypoint.core.order import derive_seed
from rallypoint.core.schedule import rate_at
from rallypoint.core.shard.clip import clip_scale, total_norm
from rallypoint.data.dataset import MapDataset
from rallypoint.data.loader import MicroBatches
from rallypoint.data.randomness import seed_everything
from rallypoint.optim import arguments_of
from rallypoint.worker.tensors import ModelTensors

Summand = TypeVar("Summand", float, torch.Tensor)
LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
WeightFunction = Callable[[int, int], float]


class Steps(Protocol):
    """An optimizer, or a schedule of its learning rate."""

    def step(self) -> object:
        """Called once after every step."""


OwnOptimizers = Callable[[torch.nn.Module], tuple[Sequence[Steps], Sequence[Steps]]]


def train_reference(
    model: torch.nn.Module, dataset: MapDataset, loss_fn: LossFunction, config: JobConfig, *,
    weight_of: WeightFunction | None = None, own: OwnOptimizers | None = None,
) -> list[float]:  # fmt: skip
    """Train `model` in place for `config.steps` updates. Returns the mean loss of every step.

    `weight_of(step, replica)` is what the loop passes as ``micro.backward(loss, weight=...)``. `own(model)` returns the
    optimizers and the schedules that the loop passes as `own_optimizer` and `own_schedule` (AllReduce).
    """
    reference = _Reference(model, dataset, loss_fn, config, weight_of or (lambda step, replica: 1.0))
    reference.own = own(model) if own is not None else None
    return [reference.step(step) for step in range(config.steps)]


def loss_scales(model: torch.nn.Module, dataset: MapDataset, loss_fn: LossFunction, config: JobConfig) -> list[float]:
    """Train as `train_reference` with fp16, and return the loss scale of every step, and the one after the last."""
    reference = _Reference(model, dataset, loss_fn, config, lambda step, replica: 1.0)
    scales = [reference.scaler.get_scale()]
    for step in range(config.steps):
        reference.step(step)
        scales.append(reference.scaler.get_scale())
    return scales


def average_reference(
    model: torch.nn.Module, dataset: MapDataset, loss_fn: LossFunction, config: JobConfig
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Train as `train_reference` with `config.average`, and return the parameters' average by name."""
    spec = config.average
    assert spec is not None
    decayed = get_ema_multi_avg_fn(spec.decay) if isinstance(spec, EMA) else None  # type: ignore[no-untyped-call]
    reference = _Reference(model, dataset, loss_fn, config, lambda step, replica: 1.0)
    averaged = AveragedModel(model, multi_avg_fn=decayed)
    for step in range(config.steps):
        reference.step(step)
        if takes(spec, step + 1):
            averaged.update_parameters(model)
    return {name: parameter.detach() for name, parameter in averaged.module.named_parameters()}


class _Reference:
    def __init__(
        self, model: torch.nn.Module, dataset: MapDataset, loss_fn: LossFunction, config: JobConfig,
        weight_of: WeightFunction,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.config, self.weight_of = model, loss_fn, config, weight_of
        self.tensors = ModelTensors(model, config)
        self.batches = MicroBatches(dataset, config, self.tensors.device)
        self.parameters = [p.tensor for p in self.tensors.parameters]
        self.buffers = [p.tensor for p in self.tensors.buffers]
        self.groups = sorted({p.entry.spec.group for p in self.tensors.parameters})
        by_group = [
            [torch.nn.Parameter(p.tensor.detach()) for p in self.tensors.parameters if p.entry.spec.group == group]
            for group in self.groups
        ]
        settings = [settings_of(config, group) for group in self.groups]
        param_groups = [
            {"params": members, "weight_decay": s.weight_decay} for members, s in zip(by_group, settings, strict=True)
        ]
        self.optimizer = plain_optimizer(config.optimizer, param_groups)
        self.scaler = torch.amp.GradScaler(
            self.tensors.device.type, enabled=config.precision == "fp16", init_scale=config.loss_scale.init_scale,
            growth_factor=config.loss_scale.growth_factor, backoff_factor=config.loss_scale.backoff_factor,
            growth_interval=config.loss_scale.growth_interval,
        )  # fmt: skip
        self.own: tuple[Sequence[Steps], Sequence[Steps]] | None = None
        self.stepped = [p for members in by_group for p in members]  # in layout order, as self.parameters

    def step(self, step: int) -> float:
        start = [b.clone() for b in self.buffers]
        leaves: list[list[torch.Tensor]] = []
        weights: list[float] = []
        kept: list[torch.Tensor] = []
        losses, finite = [], True
        for replica in range(self.config.replicas):
            copy_all(self.buffers, start)
            loss, gradients = self.replica(step, replica)
            weight = self.weight_of(step, replica)
            if weight != 1.0:
                gradients = [g * weight for g in gradients]
            leaves.append(gradients)
            weights.append(weight)
            kept = [b.clone() for b in self.buffers] if replica == 0 else kept
            losses.append(loss * weight)
            finite = finite and math.isfinite(loss)
        copy_all(self.buffers, kept)
        sums, total = sum_leaves(leaves), tree_sum(weights)
        self.update(step, [s * (1.0 / total) for s in sums] if total != 1.0 else sums, finite, start)
        return math.fsum(losses) / total

    def replica(self, step: int, replica: int) -> tuple[float, list[torch.Tensor]]:
        losses = []
        for p in self.parameters:
            p.grad = None
        for micro in range(self.config.accumulate):
            batch = self.batches.load(step, replica, micro)
            seed_everything(derive_seed(self.config.seed, "compute", step, replica, micro))
            with self.autocast():
                loss = self.loss_fn(self.model, batch)
            self.scaler.scale(loss / self.config.accumulate).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]
        return math.fsum(losses) / len(losses), gradients

    def autocast(self) -> AbstractContextManager[object]:
        types = {"bf16": torch.bfloat16, "fp16": torch.float16}
        kind = types.get(self.config.precision)
        return nullcontext() if kind is None else torch.autocast(self.tensors.device.type, dtype=kind)

    @torch.no_grad()
    def update(self, step: int, gradients: list[torch.Tensor], finite: bool, start: list[torch.Tensor]) -> None:
        if self.config.precision == "fp16":
            self.update_unscaled(step, gradients, start)
            return
        if self.config.decides:
            norm = self.norm(gradients)
            if self.config.nonfinite == "skip" and not (finite and math.isfinite(norm)):
                copy_all(self.buffers, start)
                return
            scale = clip_scale(norm, self.config.clip)
            gradients = [g * scale for g in gradients]
        if self.own is not None:
            self.step_own(gradients)
            return
        self.set_rates(step)
        for p, g in zip(self.stepped, gradients, strict=True):
            p.grad = g
        self.optimizer.step()

    def update_unscaled(self, step: int, gradients: list[torch.Tensor], start: list[torch.Tensor]) -> None:
        """As torch's examples of GradScaler; the rate follows the number of the step, also of one that is skipped."""
        self.set_rates(step)
        for p, g in zip(self.stepped, gradients, strict=True):
            p.grad = g
        self.scaler.unscale_(self.optimizer)
        if not all(bool(torch.isfinite(p.grad).all()) for p in self.stepped if p.grad is not None):
            copy_all(self.buffers, start)  # a step that is skipped changes nothing but the scale
        elif self.config.clip is not None:
            factor = clip_scale(self.norm([p.grad for p in self.stepped if p.grad is not None]), self.config.clip)
            for p in self.stepped:
                p.grad = None if p.grad is None else p.grad * factor
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def set_rates(self, step: int) -> None:
        for group, settings in zip(self.optimizer.param_groups, map(self.settings, self.groups), strict=True):
            rate = rate_at(self.config.schedule, step, self.config.steps)
            group["lr"] = rate * settings

    def step_own(self, gradients: list[torch.Tensor]) -> None:
        assert self.own is not None
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g
        for stepping in (*self.own[0], *self.own[1]):
            stepping.step()

    def settings(self, group: int) -> float:
        return settings_of(self.config, group).lr_scale

    def norm(self, gradients: list[torch.Tensor]) -> float:
        vector = torch.zeros(self.tensors.layout.words, dtype=torch.float32, device="cpu")
        for placed, gradient in zip(self.tensors.parameters, gradients, strict=True):
            placed.of(vector).copy_(gradient)
        shards = [vector[s.start : s.stop] for s in self.tensors.layout.shards if s.role == "parameters"]
        return total_norm(norm_of(one) for shard in shards for one in torch.split(shard, SHARD_BYTES // WORD_BYTES))


def norm_of(values: torch.Tensor) -> float:
    """The 2-norm in fp32; where squares of large values overflow, in fp64."""
    norm = float(torch.linalg.vector_norm(values))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(values.double()))


def tree_sum(values: Sequence[Summand]) -> Summand:
    """The sum of `values` (numbers, or tensors of one shape) by a binary tree over their positions.

    Example: ((v0 + v1) + (v2 + v3)) + v4. The left half of n values is the largest power of two below n.
    """
    if len(values) == 1:
        return values[0]
    middle = 1 << (len(values) - 1).bit_length() - 1
    left, right = tree_sum(values[:middle]), tree_sum(values[middle:])
    return left + right


def sum_leaves(leaves: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """`tree_sum` over replicas, of each of their tensors."""
    return [tree_sum(of_replicas) for of_replicas in zip(*leaves, strict=True)]


def plain_optimizer(spec: Optimizer, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimizer as a user would write it; torch chooses its default implementation."""
    fused: dict[str, Any] = {"fused": True} if getattr(spec, "fused", False) else {}
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, type(spec).__name__)
    return kind(param_groups, **{**arguments_of(spec), **fused})


@torch.no_grad()
def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
