"""The optimizer on the worker (AllReduce): it steps with the mean gradient; its state can be uploaded and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from rallypoint.config import JobConfig, settings_of
from rallypoint.core.layout import Shard
from rallypoint.core.schedule import rate_at
from rallypoint.optim.flat import build_optimizer, number
from rallypoint.optim.table import NUMBERS
from rallypoint.store.record import MASTER, ShardRecord
from rallypoint.worker.habits import by_the_job
from rallypoint.worker.tensors import ModelTensors


class Stepper(Protocol):
    """Steps the model's own parameters; its state can be written to shard records and loaded from them."""

    def step(self, step: int) -> None:
        """Make update number `step` (from 0) with the gradients in ``.grad``."""

    def settings_digest(self) -> str:
        """Return a digest of all settings, which the coordinator compares at each step; "" if workers cannot differ."""

    def state_in(self, shard: Shard) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Return the part of the state in this shard: new 1-D CPU tensors by name, and numbers by name."""

    def load(self, states: Mapping[int, ShardRecord]) -> None:
        """Load the state from the records of all shards of parameters."""


class WorkerOptimizer:
    """A model and its optimizer's state, equal on all workers at the same `version` (-1: before the first).

    Parameters and state are plain torch: in the parameters' own precision, on their device. A parameter without a
    gradient gets a gradient of zeros, as in every mode. All methods are called on the main thread.
    """

    def __init__(self, tensors: ModelTensors, stepper: Stepper) -> None:
        self.version = -1
        self._tensors, self._stepper = tensors, stepper

    def settings_digest(self) -> str:
        """Return a digest of the optimizer's settings; see `Stepper.settings_digest`."""
        return self._stepper.settings_digest()

    def install(
        self, version: int, vector: torch.Tensor, states: Mapping[int, ShardRecord], *, skipped: bool
    ) -> None:
        """Update the model to `version`.

        If there are `states` (shard -> record), load them. Otherwise step the optimizer once with the mean gradient in
        `vector` (flat fp32), unless the step is `skipped`. In each case take the buffers from `vector`.
        """
        if states:
            self._load(states)
        elif not skipped:
            self._step(version - 1, vector)
        with torch.no_grad():
            for placed in self._tensors.buffers:
                placed.tensor.copy_(placed.of(vector), non_blocking=True)
        if self._tensors.device.type == "cuda":
            torch.cuda.current_stream(self._tensors.device).synchronize()  # the caller reuses the vector after this
        self.version = version

    def record(self, shard: Shard) -> ShardRecord:
        """Return a copy of a shard's state at `version`, in the form that servers store in other modes."""
        arrays = {MASTER: self._tensors.part(shard.start, shard.stop)}
        scalars: dict[str, float] = {}
        if shard.role == "parameters":
            kept, scalars = self._stepper.state_in(shard)
            arrays |= kept
        return ShardRecord(shard.index, self.version, {n: a.numpy() for n, a in arrays.items()}, scalars)

    def _step(self, step: int, vector: torch.Tensor) -> None:
        for placed in self._tensors.parameters:
            tensor = placed.tensor
            tensor.grad = placed.of(vector).to(tensor.device, tensor.dtype, non_blocking=True)
        with by_the_job():
            self._stepper.step(step)
        for placed in self._tensors.parameters:
            placed.tensor.grad = None

    @torch.no_grad()
    def _load(self, states: Mapping[int, ShardRecord]) -> None:
        for shard in (s for s in self._tensors.layout.shards if s.role == "parameters"):
            master = torch.from_numpy(states[shard.index].arrays[MASTER])
            for placed, start, stop in self._tensors.parts_in(shard):
                placed.write(start, master[start - shard.start : stop - shard.start])
        self._stepper.load(states)


class SpecifiedStepper:
    """The optimizer of the job's configuration, with its groups and its schedule.

    The records hold its state element by element beside the parameters, as servers write it in other modes.
    """

    def __init__(self, tensors: ModelTensors, config: JobConfig) -> None:
        self._tensors, self._config = tensors, config
        of_group: dict[int, list[torch.nn.Parameter]] = {}
        for placed in tensors.parameters:
            assert isinstance(placed.tensor, torch.nn.Parameter)
            of_group.setdefault(placed.entry.spec.group, []).append(placed.tensor)
        settings = [settings_of(config, group) for group in of_group]
        self._optimizer = build_optimizer(config.optimizer, list(zip(of_group.values(), settings, strict=True)))
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group["lr_scale"] = own.lr_scale

    def step(self, step: int) -> None:
        rate = rate_at(self._config.schedule, step, self._config.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._optimizer.step()

    def settings_digest(self) -> str:
        return ""  # the job's configuration holds them all

    def state_in(self, shard: Shard) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        arrays: dict[str, torch.Tensor] = {}
        scalars: dict[str, float] = {}
        for placed, start, stop in self._tensors.parts_in(shard):
            for name, value in self._optimizer.state.get(placed.tensor, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == placed.tensor.shape and name not in NUMBERS:
                    part = value.detach().reshape(-1)[start - placed.entry.start : stop - placed.entry.start]
                    array = arrays.setdefault(name, torch.zeros(shard.words, dtype=torch.float32, device="cpu"))
                    array[start - shard.start : stop - shard.start].copy_(part)
                elif value is not None:
                    scalars[name] = float(value)
        return arrays, scalars

    @torch.no_grad()
    def load(self, states: Mapping[int, ShardRecord]) -> None:
        of_parameter: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for shard in (s for s in self._tensors.layout.shards if s.role == "parameters"):
            record = states[shard.index]
            for placed, start, stop in self._tensors.parts_in(shard):
                kept = of_parameter.setdefault(placed.tensor, {})
                for name, array in record.arrays.items():
                    if name != MASTER:
                        whole = torch.empty(placed.tensor.numel(), dtype=torch.float32, device="cpu")
                        flat = kept.setdefault(name, whole)
                        part = torch.from_numpy(array)[start - shard.start : stop - shard.start]
                        flat[start - placed.entry.start : stop - placed.entry.start].copy_(part)
                kept.update({name: number(value) for name, value in record.scalars.items()})
        order = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = {i: _shaped(p, of_parameter[p]) for i, p in enumerate(order) if of_parameter.get(p)}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})


def _shaped(parameter: torch.Tensor, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    like = torch.empty_like(parameter)
    return {name: like.clone().copy_(t.view(parameter.shape)) if t.dim() else t for name, t in kept.items()}
