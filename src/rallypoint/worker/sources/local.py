"""Local steps: the worker's own optimizer makes a round's steps, and the change is the contribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from rallypoint.config import JobConfig, cadence_of
from rallypoint.core.layout import Shard
from rallypoint.core.schedule import rate_at
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.local import Drift, InnerStates, OwnParameters
from rallypoint.net.pool import pinned_words
from rallypoint.optim import load_exactly
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.precision import Losses
from rallypoint.worker.sources.hooks import (
    DeltaSource,
    DeviceGradients,
    DeviceStaging,
    GradientHooks,
    InPlaceGradients,
    Staging,
    send_buffers,
)
from rallypoint.worker.tensors import ModelTensors, optimizer_of

# ---- Local steps: the worker's own optimizer makes a round's steps, and the change is the contribution ----
#
# Memory of a worker, beside the model, its gradients and the exchange buffer (K bytes each):
#
# - K on the host for the values that the round started from (pinned for a GPU, whose memory is worth more than a copy);
# - the inner optimizer's state, as in any training: 2K for AdamW, on the parameters' device; with `keep_inner` once for
#   each replica that this worker computes;
# - with `keep_inner` as much again on the host: each replica's state when its round began.


class LocalStepsSource(DeltaSource):
    """Contributes start - local: the version's parameters minus the parameters after the round's steps (LocalSteps).

    Gradients are plain autograd's. A parameter without a gradient is not stepped, as in plain PyTorch. Each replica
    clips its own gradient, with `torch.nn.utils`.

    With nonfinite="skip" a replica skips its own step if the loss or the gradient is not finite: parameters, buffers
    and the optimizer's state stay as they were. If its contribution is still not finite, the servers skip the round.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: ModelTensors, config: JobConfig, exchange: Exchange, staging: Staging,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._tensors, self._config, self._exchange, self._staging, self._say = tensors, config, exchange, staging, say
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._parts = [(s, tensors.parts_in(s)) for s in exchange.layout.shards if s.role == "parameters"]
        self._cadence = cadence_of(config, exchange.layout.shards)
        words, cuda = exchange.layout.words, tensors.device.type == "cuda"
        self._start = pinned_words(words) if cuda else torch.empty(words, dtype=torch.float32, device="cpu")
        self._start.zero_()
        self._flat = _FlatModel(tensors, self._start)
        self._moved = False  # True if the model holds something else than `_start`
        self._started: Callable[[], None] = lambda: None  # waits until `_start` is written
        assert config.local is not None
        delayed = self._delayed = config.local.delay > 0
        self._inner = InnerStates(config.local.keep_inner, lambda round: _Inner(
            optimizer_of(tensors, config), round, delayed=delayed), ahead=delayed)  # fmt: skip
        self._step = self._replica = -1
        self._buffers_before: list[torch.Tensor] = []

    @torch.no_grad()
    def installed(self, shards: Sequence[Shard] | None) -> None:
        """Save what the round starts from, in the parameters' own precision (as the steps see it)."""
        for placed in self._tensors.parameters:
            placed.of(self._start).copy_(placed.tensor, non_blocking=True)
        self._moved, self._started = False, self._tensors.mark()

    def show_version(self) -> None:
        """Load the version: after a round's steps the model holds the last replica's own parameters."""
        self._go_back()

    def begin_replica(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Load the version, and the optimizer's state that the replica kept from the round before, if any."""
        self._go_back()
        self._replica = replica
        self._optimizer = self._inner.begin(round, replica, generation).optimizer

    def begin_step(self, step: int) -> None:
        self._step = step
        if self._config.nonfinite == "skip":
            self._buffers_before = [placed.tensor.clone() for placed in self._tensors.buffers]

    def begin_backward(self, weight: float, *, finite: Callable[[], bool], last: bool) -> None:
        """Set the replica's weight with the last backward; autograd accumulates, nothing is sent."""
        if last:
            self._exchange.replica.weigh(weight, finite=True)  # a step that was not was skipped, or is allowed

    def end_step(self, *, finite: Callable[[], bool]) -> None:
        self._exchange.check()
        self._started()
        skips, clip = self._config.nonfinite == "skip", self._config.clip
        norm = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        if skips or clip is not None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])
        if skips and not (finite() and math.isfinite(norm)):
            self._leave_out("gradient" if finite() else "loss")
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
        """Write start - local into the slots, shard by shard, and push them."""
        for shard, parts in self._parts:
            if not self._exchange.replica.claim(shard.index):
                continue
            for placed, start, stop in parts:
                local = placed.words()[start - placed.entry.start : stop - placed.entry.start]
                self._staging.write(self._exchange.buffer[start:stop], local, add=False)
            self._staging.then(partial(self._fill, shard))
        self._staging.drain()
        self._exchange.check(stale=False)
        send_buffers(self._tensors, self._exchange, replica)
        self._inner.made(replica)
        self._exchange.replica.computed()

    def abandon(self) -> None:
        self._staging.drain()
        self._forget_gradients()
        self._go_back()
        self._exchange.replica.abandoned()

    def _fill(self, shard: Shard) -> None:
        slot = self._exchange.buffer[shard.start : shard.stop]
        torch.sub(self._start[shard.start : shard.stop], slot, out=slot)
        self._exchange.replica.filled(shard.index)

    def _go_back(self) -> None:
        if self._moved:
            self._flat.load(self._start)
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


@dataclass(slots=True)
class _Inner:
    """A replica's own optimizer in `round`, and the optimizer's state when that round began.

    If a shard loses its server, the replica may have to compute the round again, and must contribute the same (I2).
    """

    optimizer: torch.optim.Optimizer
    round: int
    whole: bool = False  # True after all steps of the round
    drift: Drift[torch.Tensor] | None = None  # in staggered rounds: where its parameters are
    before: dict[torch.Tensor, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    delayed: bool = False  # it keeps `before` of the previous round as `earlier`
    earlier: dict[torch.Tensor, dict[str, torch.Tensor | None]] = field(default_factory=dict)

    def begin(self, round: int) -> None:
        self.round, self.whole = round, False
        if self.delayed:
            self.earlier = self.before
        self.before = {
            parameter: {name: None if t is None else t.to("cpu", copy=True) for name, t in kept.items()}
            for parameter, kept in self.optimizer.state.items()
        }

    def go_back(self) -> None:
        """Begin the same round again: restore the optimizer's state."""
        self.whole = False
        load_exactly(self.optimizer, {
            parameter: {name: None if t is None else t.clone() for name, t in kept.items()}
            for parameter, kept in self.before.items()
        })  # fmt: skip

    def step_back(self) -> None:
        """Go back to the start of the round before, to compute it again."""
        if self.drift is not None and self.drift.earlier is not None:
            self.round, self.before = self.round - 1, self.earlier
            self.drift.step_back()


# ---- Local steps with fragments (streaming DiLoCo), and with a delay: a round sends only some of the shards ----
#
# What a replica has changed and not sent yet is state of this worker, like its optimizer's state.
#
# Host memory, beside what `worker/sources/local.py` takes: K bytes for each replica that this worker computes (its
# parameters when its round began). K more for each where there are two or more replicas (its parameters while the model
# holds another's); with one replica, only if this worker evaluates.


class FragmentsSource(LocalStepsSource):
    """Contributes start - local of the shards of a round (LocalSteps with more than one fragment).

    `_start` is the whole version. A replica that made the round before on this worker continues from its own
    parameters, except for the shards installed since. Any other replica starts from the version.
    """

    @cached_property
    def _own(self) -> OwnParameters[_Inner, torch.Tensor]:
        return OwnParameters(self._inner, self._flat, delayed=self._delayed)

    @torch.no_grad()
    def installed(self, shards: Sequence[Shard] | None) -> None:
        """Replace the new shards in the parameters of every replica."""
        new = [shard for shard, _ in self._parts] if shards is None else shards
        for shard in new:
            for placed, start, stop in self._tensors.parts_in(shard):
                first = placed.entry.start
                self._start[start:stop].copy_(placed.words()[start - first : stop - first])
        self._replace(new)

    def _replace(self, new: Sequence[Shard]) -> None:
        for inner in self._inner.kept.values():
            if inner.drift is not None and inner.drift.left is not None:
                for shard in new:
                    inner.drift.left[shard.start : shard.stop] = self._start[shard.start : shard.stop]

    def show_version(self) -> None:
        """Save the parameters of the replica in the model, then load the version."""
        self._own.put_away()
        self._flat.load(self._start)

    def begin_replica(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Load the replica's own parameters and its own optimizer's state."""
        self._replica = replica
        self._optimizer = self._own.begin(round, replica, generation).optimizer

    def _go_back(self) -> None:
        self._own.drop()


class _FlatModel:
    """The model's parameters as one flat vector on the host; `start` is the version."""

    def __init__(self, tensors: ModelTensors, start: torch.Tensor) -> None:
        self._tensors, self._start = tensors, start

    def version(self) -> torch.Tensor:
        return self._start.clone()

    @torch.no_grad()
    def load(self, values: torch.Tensor) -> None:
        for placed in self._tensors.parameters:
            placed.tensor.copy_(placed.of(values))

    @torch.no_grad()
    def save(self, spare: torch.Tensor | None) -> torch.Tensor:
        into = torch.empty_like(self._start) if spare is None else spare
        for placed in self._tensors.parameters:
            placed.of(into).copy_(placed.tensor)
        return into


@dataclass(slots=True)
class Ahead:
    """What the first steps of a replica's round came to, computed before the round's version arrived."""

    steps: int
    seconds: float
    losses: Losses
    weights: list[float]


class DelayedSource(FragmentsSource):
    """Contributes like FragmentsSource; an installed version is mixed in later (LocalSteps with a delay)."""

    _round = -1

    def begin_replica(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Begin like FragmentsSource: the replica continues from its own parameters, without the new version."""
        super().begin_replica(round, replica, generation)
        self._round = round

    def install(self) -> None:
        """Save what the replica in the model has changed since its round began."""
        self.show_version()

    def may_go_ahead(self, round: int, replica: int, generation: ViewNumber) -> bool:
        """True if the round's first steps need no version: this worker has the replica's round before."""
        return self._own.may_go_ahead(round, replica, generation)

    def resume_replica(self, round: int, replica: int) -> None:
        self._replica, self._round = replica, round
        self._optimizer = self._own.resume(replica).optimizer

    def begin_step(self, step: int) -> None:
        """Begin a step. After `steps_ahead` steps of the round, mix the version in."""
        if step == self._config.steps_at(self._round) + self._config.steps_ahead(self._round):
            self._mix()
        super().begin_step(step)

    @torch.no_grad()
    def _mix(self) -> None:
        """Set the shards of the round before to mix * version + (1 - mix) * own."""
        local = self._config.local
        assert local is not None
        if not self._own.mixes(self._round, self._replica):
            return
        for shard, parts in self._parts:
            if not self._cadence.due(shard.index, self._round - 1):
                continue
            for placed, start, stop in parts:
                own = placed.words()[start - placed.entry.start : stop - placed.entry.start]
                new = self._start[start:stop].to(own.device)
                if local.mix != 1.0:  # round each product before the sum, so the cut into shards changes no byte
                    new = (own.float() * (1.0 - local.mix)).add_(new * local.mix)
                placed.write(start, new)

    def _replace(self, new: Sequence[Shard]) -> None:
        """Does nothing: `_mix` installs the new values later."""


# ---- The one place where a worker chooses the source of its contributions, by the job's mode ----


def source_for(
    model: torch.nn.Module, tensors: ModelTensors, config: JobConfig, exchange: Exchange, staging: Staging,
    say: Callable[[str], None],
) -> DeltaSource:  # fmt: skip
    """Return the source of this job's contributions: gradients, or what local steps have changed.

    `say` gets messages for the user.
    """
    if config.streamed:
        return GradientHooks(tensors, exchange, staging)
    if exchange.in_place.parameters:
        return InPlaceGradients(tensors, exchange, staging)
    if config.local is None:
        gradients = DeviceGradients if isinstance(staging, DeviceStaging) else GradientHooks
        return gradients(tensors, exchange, staging, clip=None if config.clips_on_servers else config.clip)
    if not config.staggered:
        return LocalStepsSource(model, tensors, config, exchange, staging, say)
    kind = DelayedSource if config.local.delay else FragmentsSource
    return kind(model, tensors, config, exchange, staging, say)
