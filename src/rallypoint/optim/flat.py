"""torch.optim optimizers on one flat shard. The learning rate comes from the job's schedule."""

from __future__ import annotations

import importlib

import torch

from rallypoint.config import GroupSettings, JobConfig, settings_applied
from rallypoint.core.optimizer import SGD, Adagrad, Adam, AdamW, Optimizer
from rallypoint.core.schedule import rate_at


def build_optimizer(
    spec: Optimizer, groups: list[tuple[list[torch.nn.Parameter], GroupSettings]]
) -> torch.optim.Optimizer:
    """The torch optimizer of `spec` over these groups. Its learning rate is 0: set it before every step.

    `foreach` gives the bytes of torch's default (the for-loop) at twice its speed, however the vector is cut into
    shards. The fused kernels do not: they round the tail of a tensor differently.
    """
    param_groups = [{"params": params, "weight_decay": settings.weight_decay} for params, settings in groups]
    match spec:
        case AdamW() | Adam():
            kind = torch.optim.AdamW if isinstance(spec, AdamW) else torch.optim.Adam
            how = {"fused": True} if spec.fused else {"foreach": True}
            return kind(param_groups, lr=0.0, betas=spec.betas, eps=spec.eps, **how)
        case SGD():
            return torch.optim.SGD(
                param_groups, lr=0.0, momentum=spec.momentum, nesterov=spec.nesterov, foreach=True
            )
        case Adagrad():
            return torch.optim.Adagrad(
                param_groups, lr=0.0, lr_decay=spec.lr_decay, eps=spec.eps, foreach=True,
                initial_accumulator_value=spec.initial_accumulator_value,
            )  # fmt: skip


def import_for_optimizers() -> None:
    """Import what torch imports only with a process's first optimizer: its compiler, about a second.

    A server calls it while workers come. Later the first snapshot, and with it the job, would wait for it.
    """
    importlib.import_module("torch._dynamo")


def state_names(spec: Optimizer) -> list[tuple[set[str], set[str]]]:
    """The possible names of a shard's state, each as (tensors, numbers): before its first step, and after."""
    before: tuple[set[str], set[str]] = (set(), set())
    match spec:
        case AdamW() | Adam():
            return [before, ({"exp_avg", "exp_avg_sq"}, {"step"})]
        case SGD():
            return [before, ({"momentum_buffer"}, set())]
        case Adagrad():
            return [({"sum"}, {"step"})]  # torch makes it with the optimizer


class ShardOptimizer:
    """Owns one shard's fp32 master weights (`master`, shape (words,)) and their optimizer state."""

    def __init__(self, config: JobConfig, group: int, words: int) -> None:
        self._config = config
        self._settings = settings_applied(config, group)
        self._parameter = torch.nn.Parameter(torch.zeros(words))
        self._optimizer = build_optimizer(config.applied, [([self._parameter], self._settings)])
        self.master = self._parameter.detach()

    def apply(self, gradient: torch.Tensor, step: int, times: float = 1.0) -> None:
        """Make update number `step` (from 0) with the mean gradient (fp32, shape (words,)).

        The learning rate is the schedule's, times `times` and the group's scale.
        """
        rate = times * rate_at(self._config.applied_schedule, step, self._config.rounds)
        self._optimizer.param_groups[0]["lr"] = rate * self._settings.lr_scale
        self._parameter.grad = gradient
        self._optimizer.step()
        self._parameter.grad = None

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The optimizer's state: tensors of shape (words,), not copied, and numbers. See `state_names`."""
        kept = self._optimizer.state.get(self._parameter, {})
        arrays = {n: t for n, t in kept.items() if isinstance(t, torch.Tensor) and t.shape == self.master.shape}
        scalars = {n: float(v) for n, v in kept.items() if n not in arrays and v is not None}
        return arrays, scalars

    def load(self, arrays: dict[str, torch.Tensor], scalars: dict[str, float]) -> None:
        """Replace the optimizer's state, by a copy of one from another server or a snapshot."""
        kept: dict[str, torch.Tensor] = {name: tensor.clone() for name, tensor in arrays.items()}
        kept |= {name: torch.tensor(value, dtype=torch.float32) for name, value in scalars.items()}
        self._optimizer.state.clear()
        if kept:
            self._optimizer.state[self._parameter] = kept
