"""torch.optim optimizers on one flat shard. The learning rate comes from the job's schedule."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from rallypoint.config import GroupSettings, JobConfig, settings_applied
from rallypoint.core.optimizer import Muon, Optimizer, RMSprop, of_shard
from rallypoint.core.schedule import rate_at
from rallypoint.optim.table import arguments_of, row_of, state_names


def build_optimizer(
    spec: Optimizer, groups: list[tuple[list[torch.nn.Parameter], GroupSettings]]
) -> torch.optim.Optimizer:
    """The torch optimizer of `spec` over these groups. Its learning rate is 0: set it before every step.

    The bytes are those of torch's default (the for-loop), however the vector is cut into shards. Those of the fused
    kernels are not: they round the tail of a tensor differently.
    """
    row = row_of(spec)
    how: dict[str, Any] = {} if row.foreach is None else {"foreach": row.foreach}
    if getattr(spec, "fused", False):
        how = {"fused": True}
    param_groups = [{"params": params, "weight_decay": settings.weight_decay} for params, settings in groups]
    return row.kind(param_groups, **{"lr": 0.0, **arguments_of(spec), **how})


def number(value: float) -> torch.Tensor:
    """A number of an optimizer's state, such as `step`, as torch keeps it: float64 where that is the default type of
    the process, else fp32; on the CPU."""
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    return torch.tensor(value, dtype=dtype, device="cpu")


def import_for_optimizers() -> None:
    """Import what torch imports only with a process's first optimizer: its compiler, about a second.

    A server calls it while workers come. Later the first snapshot, and with it the job, would wait for it.
    """
    importlib.import_module("torch._dynamo")


class ShardOptimizer:
    """Owns one shard's fp32 master weights (`master`, shape (words,)) and their optimizer state."""

    def __init__(self, config: JobConfig, group: int, words: int, columns: int = 0) -> None:
        """`columns`: see `core.layout.Shard`. Only Muon steps a matrix as such."""
        self._config, self._spec = config, of_shard(config.applied, columns)
        self._settings = settings_applied(config, group)
        shape = (words // columns, columns) if isinstance(self._spec, Muon) else (words,)
        self._parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu"))
        self._optimizer = build_optimizer(self._spec, [([self._parameter], self._settings)])
        self.master = self._parameter.detach().view(-1)
        self._schedule, self._rounds = config.applied_schedule, config.rounds

    def apply(self, gradient: torch.Tensor, step: int, times: float = 1.0, reductions: int = 0) -> None:
        """Make update number `step` (from 0) with the mean gradient (fp32, shape (words,)).

        The learning rate is the schedule's, after so many `reductions`, times `times` and the group's scale.
        """
        rate = rate_at(self._schedule, step, self._rounds)
        rate = times * (rate if self._config.plateau is None else self._config.plateau.reduced(rate, reductions))
        self._optimizer.param_groups[0]["lr"] = rate * self._settings.lr_scale
        self._parameter.grad = gradient.view(self._parameter.shape)
        self._optimizer.step()
        self._parameter.grad = None

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The optimizer's state: tensors of shape (words,), not copied, and numbers. See `state_names`."""
        kept = self._optimizer.state.get(self._parameter, {})
        shape = self._parameter.shape
        arrays = {n: t.view(-1) for n, t in kept.items() if isinstance(t, torch.Tensor) and t.shape == shape}
        scalars = {n: float(v) for n, v in kept.items() if n not in arrays and v is not None}
        return arrays, scalars

    def load(self, arrays: dict[str, torch.Tensor], scalars: dict[str, float]) -> None:
        """Replace the optimizer's state, by a copy of one from another server or a snapshot."""
        kept: dict[str, torch.Tensor] = {name: tensor.clone() for name, tensor in arrays.items()}
        if kept and isinstance(self._spec, RMSprop):  # a setting may have changed what it keeps
            tensors, _ = state_names(self._spec)[-1]
            kept = {name: kept.get(name, torch.zeros_like(self.master)) for name in sorted(tensors)}
        kept = {name: values.view(self._parameter.shape) for name, values in kept.items()}
        kept |= {name: number(value) for name, value in scalars.items()}
        self._optimizer.state.clear()
        if kept:
            self._optimizer.state[self._parameter] = kept
