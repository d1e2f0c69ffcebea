"""Local steps: the worker's own optimizer makes a round's steps; what they have changed leaves as a contribution.

Beside the model, its gradients and the exchange buffer (K bytes each) this takes, of a worker's memory:

- K for the values that the round has started from, on the host;
- the inner optimizer's state, as in any training: 2K for AdamW, next to the parameters, and with `keep_inner` once for
  each replica that this worker computes;
- with `keep_inner` as much again on the host: what each replica's state was when its round began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from rallypoint.config import JobConfig, cadence_of, settings_of
from rallypoint.core.layout import Shard
from rallypoint.core.schedule import rate_at
from rallypoint.core.worker.inner import InnerStates
from rallypoint.optim.flat import build_optimizer
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.sources.source import WaitsForVersions, send_buffers
from rallypoint.worker.sources.staging import Staging
from rallypoint.worker.tensors import ModelTensors


class LocalStepsSource(WaitsForVersions):
    """Contributes start - local: the parameters of the version minus those after the round's steps (LocalSteps).

    Gradients are plain autograd's; a parameter without one is left alone, as in plain PyTorch. Each replica clips its
    own, by `torch.nn.utils`.

    With nonfinite="skip" a replica leaves out a step of its own whose loss or gradient is not finite: parameters,
    buffers and the optimizer's state stay as they were. Should what it contributes not be finite all the same, then the
    servers skip the round.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: ModelTensors, config: JobConfig, exchange: Exchange, staging: Staging,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._tensors, self._config, self._exchange, self._staging, self._say = tensors, config, exchange, staging, say
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._parts = [(s, tensors.parts_in(s)) for s in exchange.layout.shards if s.role == "parameters"]
        self._cadence = cadence_of(config, exchange.layout.shards)
        self._start = torch.zeros(exchange.layout.words)
        self._moved = False  # does the model hold something else than `_start`?
        assert config.local is not None
        self._inner = InnerStates(config.local.keep_inner, lambda round: _Inner(self._new_optimizer(), round))
        self._step = self._replica = -1
        self._buffers_before: list[torch.Tensor] = []

    def remove(self) -> None:
        """Nothing of the model's was touched."""

    @torch.no_grad()
    def installed(self, shards: Sequence[Shard] | None) -> None:
        """Remember what the round starts from, in the parameters' own precision: it is from there that they move."""
        for placed in self._tensors.parameters:
            placed.of(self._start).copy_(placed.tensor)
        self._moved = False

    def show_version(self) -> None:
        """Between rounds the model is nothing else."""

    def begin_replica(self, round: int, replica: int) -> None:
        """Every replica starts from the version, with what it has kept of the round before."""
        self._go_back()
        self._replica = replica
        self._optimizer = self._inner_of(round, replica).optimizer

    def begin_step(self, step: int) -> None:
        """A step of the replica's own."""
        self._step = step
        if self._config.nonfinite == "skip":
            self._buffers_before = [placed.tensor.clone() for placed in self._tensors.buffers]

    def begin_backward(self, weight: float, *, finite: bool, last: bool) -> None:
        """Autograd accumulates; nothing leaves."""
        if last:
            self._exchange.replica.weigh(weight, finite=True)  # a step that was not has been left out, or was meant

    def end_backward(self) -> None:
        """Autograd has accumulated."""

    def end_step(self, *, finite: bool) -> None:
        """Clip, and let the inner optimizer step."""
        self._exchange.check()
        skips, clip = self._config.nonfinite == "skip", self._config.clip
        norm = torch.tensor(0.0)
        if skips or clip is not None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])
        if skips and not (finite and math.isfinite(norm)):
            self._leave_out("gradient" if finite else "loss")
            return
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._trained, clip, norm)
        rate = rate_at(self._config.schedule, self._step, self._config.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._optimizer.step()
        self._moved = True
        self._forget_gradients()

    def end_replica(self, replica: int) -> None:
        """Write start - local into the slots, shard by shard."""
        for shard, parts in self._parts:
            if not self._exchange.replica.claim(shard.index):
                continue
            for placed, start, stop in parts:
                local = placed.words()[start - placed.entry.start : stop - placed.entry.start]
                self._staging.write(self._exchange.buffer[start:stop], local, add=False)
            self._staging.then(partial(self._fill, shard))
        if self._exchange.replica.contributes_buffers(replica):
            send_buffers(self._tensors, self._exchange)
        self._inner.made(replica)
        self._staging.drain()
        self._exchange.replica.computed()

    def abandon(self) -> None:
        """Back to the version: the model must not be left where nobody wants to go on from."""
        self._staging.drain()
        self._forget_gradients()
        self._go_back()
        self._exchange.replica.abandoned()

    def _fill(self, shard: Shard) -> None:
        slot = self._exchange.buffer[shard.start : shard.stop]
        torch.sub(self._start[shard.start : shard.stop], slot, out=slot)
        self._exchange.replica.filled(shard.index)

    @torch.no_grad()
    def _go_back(self) -> None:
        if self._moved:
            for placed in self._tensors.parameters:
                placed.tensor.copy_(placed.of(self._start))
            self._moved = False

    @torch.no_grad()
    def _leave_out(self, what: str) -> None:
        self._say(f"step {self._step} of replica {self._replica} is skipped: its {what} is not finite")
        for placed, before in zip(self._tensors.buffers, self._buffers_before, strict=True):
            placed.tensor.copy_(before)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    # ---- the inner optimizers ----

    def _inner_of(self, round: int, replica: int) -> _Inner:
        """The replica's optimizer as it is to begin this round: from zero, unless it has just made the one before."""
        return self._inner.begin(round, replica, self._exchange.view.generation)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        of_group: dict[int, list[torch.nn.Parameter]] = {}
        for placed in self._tensors.parameters:
            assert isinstance(placed.tensor, torch.nn.Parameter)
            of_group.setdefault(placed.entry.spec.group, []).append(placed.tensor)
        settings = [settings_of(self._config, group) for group in of_group]
        optimizer = build_optimizer(self._config.optimizer, list(zip(of_group.values(), settings, strict=True)))
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group["lr_scale"] = own.lr_scale
        return optimizer


@dataclass(slots=True)
class Drift:
    """A replica's own parameters (flat vectors on the host), where it does not start each round from the version.

    `began` is what `round` began with: it may have to be computed once more. `left`, with `away`, is what the replica
    has come to, if the model holds something else now.
    """

    round: int
    began: torch.Tensor
    left: torch.Tensor | None = None
    away: bool = False
    fresh: int = 0  # the round that the replica has begun at the version
    earlier: torch.Tensor | None = None  # with a delay: what the round before began with


@dataclass(slots=True)
class _Inner:
    """A replica's own optimizer, in `round`, and what its state was when that began.

    The replica may have to be computed again in the same round, for a shard that has lost its server: it must
    contribute the same then (I2).
    """

    optimizer: torch.optim.Optimizer
    round: int
    whole: bool = False  # has it made all steps of the round?
    drift: Drift | None = None  # in staggered rounds: where its parameters are
    before: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    earlier: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)  # with a delay: the round before's

    def begin(self, round: int) -> None:
        """It goes on to the next round."""
        self.round, self.whole = round, False
        state = self.optimizer.state_dict()["state"]
        self.before = {index: {name: _on_host(t) for name, t in kept.items()} for index, kept in state.items()}

    def go_back(self) -> None:
        """The round is begun once more."""
        self.whole = False
        state = {index: {name: _copy(t) for name, t in kept.items()} for index, kept in self.before.items()}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def _on_host(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.to("cpu", copy=True)


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.clone()
