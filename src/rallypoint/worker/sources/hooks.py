"""Sends gradients during backward: a hook per parameter fills slots, and each shard is sent when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from rallypoint.core.layout import Shard
from rallypoint.core.shard.clip import clip_scale, total_norm
from rallypoint.core.view import ViewNumber
from rallypoint.errors import ModelError
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.sources.source import WaitsForVersions, send_buffers
from rallypoint.worker.sources.staging import Staging
from rallypoint.worker.sources.tables import Tables
from rallypoint.worker.tensors import ModelTensors, Placed


class GradientHooks(WaitsForVersions):
    """The gradient as contribution: post-accumulate-grad hooks on every trained parameter of a model.

    A parameter without a gradient at the end of the replica contributes zeros, so no server waits for it.

    With `clip`, each replica's gradient is clipped by its own norm. (In aligned modes servers clip the mean instead.)
    Then nothing is pushed during backward. The norm is that of the whole gradient, also when servers need only some of
    its shards; the other shards' gradients are written to memory beside the exchange buffer.

    The shard that is complete last leaves when the loop's body is over, in `end_replica`: until then nobody can have
    the next version, so the body may end the job with it (`run.stop`).
    """

    def __init__(
        self, tensors: ModelTensors, exchange: Exchange, staging: Staging, *, clip: float | None = None
    ) -> None:  # fmt: skip
        self._tensors, self._exchange, self._staging, self._clip = tensors, exchange, staging, clip
        layout = exchange.layout
        self._shards_of = [
            layout.shards_touching(p.entry.start, p.entry.stop) if p.tensor.numel() else [] for p in tensors.parameters
        ]
        counts = [0] * len(layout.shards)
        for shards in self._shards_of:
            for shard in shards:
                counts[shard] += 1
        self._parameters_in = counts
        self._last = self._in_backward = False
        self._tables = Tables(tensors.tables, exchange)
        self._reset()
        self._handles = [
            placed.tensor.register_post_accumulate_grad_hook(self._hook(index, placed))  # type: ignore[no-untyped-call]
            for index, placed in enumerate(tensors.parameters)
        ]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._tables.remove()

    def installed(self, shards: Sequence[Shard] | None) -> None:
        """Does nothing: the servers hold the optimizer, so no version is kept here."""

    def show_version(self) -> None:
        """Does nothing: the model always holds the version."""

    def begin_replica(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Does nothing: the model holds the version that every replica starts from."""

    def begin_step(self, step: int) -> None:
        """Does nothing: a round is one step."""

    def begin_backward(self, weight: float, *, finite: Callable[[], bool], last: bool) -> None:
        """Begin a backward pass. With `last`, shards are sent as they become complete."""
        self._last, self._in_backward = last, True
        self._tables.begin_backward()
        if last:
            self._staging.then(lambda: self._exchange.replica.weigh(weight, finite=finite()))

    def end_backward(self) -> None:
        """Stop the hooks: from here on gradients stay in `.grad` for the script."""
        self._in_backward = False

    def end_step(self, *, finite: Callable[[], bool]) -> None:
        """Does nothing: the gradient is already on its way."""

    def end_replica(self, replica: int) -> None:
        """Send what is left after the last backward, and the buffers to which this replica contributes."""
        for index, placed in enumerate(self._tensors.parameters):
            if index not in self._done:
                self._finish_unused(index, placed)
        if self._kept is not None:
            self._send(self._kept)
        if self._clip is not None:
            self._clip_and_send(self._clip)
        self._staging.drain()  # what follows is sent from this thread, after the losses are known
        self._exchange.check(stale=False)
        send_buffers(self._tensors, self._exchange, replica)
        self._tables.push()
        self._reset()
        self._exchange.replica.computed()

    def abandon(self) -> None:
        """The replica in progress is stale: drop its gradients."""
        self._in_backward = False
        self._staging.drain()
        for placed in self._tensors.parameters:
            placed.tensor.grad = None
        self._reset()
        self._exchange.replica.abandoned()

    def _reset(self) -> None:
        self._tables.reset()
        self._left = list(self._parameters_in)
        self._open = sum(count > 0 for count in self._parameters_in)  # shards that are not complete yet
        self._kept: int | None = None
        self._claimed: dict[int, bool] = {}  # False: the servers do not need this shard's contribution from us
        self._touched: set[int] = set()
        self._whole: list[int] = []
        self._beside: dict[int, torch.Tensor] = {}  # of shards that servers do not need: for `clip`, the record
        self._done: set[int] = set()

    def _hook(self, index: int, placed: Placed) -> object:
        def hook(parameter: torch.Tensor) -> None:
            if not self._in_backward or _got_nothing(parameter):
                return
            if self._last or self._staging.eager:
                self._write(index, placed, parameter)
            if self._last:
                self._release(index)

        return hook

    def _write(self, index: int, placed: Placed, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            raise ModelError(
                f"parameter {placed.entry.spec.name} had no gradient any more when it was to be sent: a hook of the "
                "script (register_post_accumulate_grad_hook) has taken it. Leave parameter.grad in place there: it is "
                "the job that steps"
            )
        if gradient.layout is not torch.strided:
            raise ModelError(f"parameter {placed.entry.spec.name} has a sparse gradient: use sparse=False")
        if index in self._done:
            raise ModelError(
                f"parameter {placed.entry.spec.name} got a gradient twice in one backward (reentrant checkpointing?): "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        for slot, part in self._pieces(index, placed, gradient):
            self._staging.write(slot, part, add=index in self._touched)
        self._touched.add(index)
        parameter.grad = None  # it is in its slot now: free the memory for the rest of the backward

    def _pieces(
        self, index: int, placed: Placed, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parameter's gradient for each shard that needs it: the destination, and the values."""
        shards, entry = self._shards_of[index], placed.entry
        flat = gradient.reshape(-1) if len(shards) > 1 else gradient
        for shard in shards:
            if (target := self._target(shard)) is None:
                continue
            vector, first = target
            if len(shards) == 1:
                yield placed.of_part(vector, first), gradient
                return
            place = self._exchange.layout.shards[shard]
            start, stop = max(entry.start, place.start), min(entry.stop, place.stop)
            yield vector[start - first : stop - first], flat[start - entry.start : stop - entry.start]

    def _target(self, shard: int) -> tuple[torch.Tensor, int] | None:
        """The vector that a shard's gradient is written to, and the flat vector's word at which it begins."""
        if self._claim(shard):
            return self._exchange.memory.part(shard)
        if self._clip is None and not self._exchange.replica.contributions.active:
            return None
        place = self._exchange.layout.shards[shard]
        if shard not in self._beside:
            self._beside[shard] = torch.zeros(place.words, dtype=torch.float32, device="cpu")
        return self._beside[shard], place.start

    def _claim(self, shard: int) -> bool:
        if shard not in self._claimed:
            self._claimed[shard] = self._exchange.replica.claim(shard)
        return self._claimed[shard]

    def _release(self, index: int) -> None:
        self._done.add(index)
        for shard in self._shards_of[index]:
            self._left[shard] -= 1
            if self._left[shard]:
                continue
            self._open -= 1
            if self._clip is not None:
                self._whole.append(shard)
            elif self._claim(shard):
                if self._open or not self._in_backward:
                    self._send(shard)
                else:
                    self._kept = shard
            elif shard in self._beside:
                self._staging.then(partial(self._exchange.replica.not_needed, shard, self._beside[shard]))

    def _send(self, shard: int) -> None:
        self._staging.then(lambda: self._exchange.replica.filled(shard))

    def _clip_and_send(self, limit: float) -> None:
        """Scale the slots by the norm of the whole gradient, then send them."""
        self._staging.drain()
        values = {shard: self._values(shard) for shard in self._whole}
        scale = clip_scale(total_norm(float(torch.linalg.vector_norm(of)) for of in values.values()), limit)
        for shard, slot in values.items():
            if self._claim(shard):
                if scale != 1.0:
                    slot.mul_(scale)
                self._exchange.replica.filled(shard)

    def _values(self, shard: int) -> torch.Tensor:
        return self._beside[shard] if shard in self._beside else self._exchange.memory.words(shard)

    def _finish_unused(self, index: int, placed: Placed) -> None:
        if placed.tensor.grad is not None:
            self._write(index, placed, placed.tensor)
        elif index not in self._touched:
            for slot, _ in self._pieces(index, placed, placed.tensor.detach()):
                slot.zero_()
        self._release(index)


def _got_nothing(parameter: torch.Tensor) -> bool:
    """True if an operation gave this parameter no gradient (None): torch calls its hooks all the same."""
    return parameter.grad is None and len(parameter._post_accumulate_grad_hooks or ()) == 1  # ours: nobody took it


# ---- Gradients of streamed parameters: each shard's memory is there while its gradient is written and sent ----


class StreamedGradients(GradientHooks):
    """Like `GradientHooks`; it never reads a parameter."""

    def _finish_unused(self, index: int, placed: Placed) -> None:
        if placed.tensor.grad is None and index not in self._touched:
            for shard in self._shards_of[index]:
                if self._claim(shard):
                    self._zero(shard, placed)
            self._release(index)
        else:
            super()._finish_unused(index, placed)

    @torch.no_grad()
    def _zero(self, shard: int, placed: Placed) -> None:
        vector, first = self._exchange.memory.part(shard)
        place = self._exchange.layout.shards[shard]
        start, stop = max(placed.entry.start, place.start), min(placed.entry.stop, place.stop)
        vector[start - first : stop - first].zero_()
