"""What a worker contributes, and the gradients that it sends during backward."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F

from rallypoint.codec.base import RowSum, encode_gradient, encode_ids
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.shard.clip import clip_scale, total_norm
from rallypoint.core.typed import named
from rallypoint.core.view import ViewNumber
from rallypoint.errors import ModelError, UsageError
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.locked import Rewound
from rallypoint.worker.tensors import ModelTensors, Placed, marked

log = logging.getLogger("rallypoint")

# ---- The interface of a mode's worker side: it makes the contributions of one replica after the other ----


class DeltaSource:
    """The worker's side of a mode, between two versions. All methods are called on the main thread.

    Calls for each replica: `begin_replica`; for each step of the round `begin_step`, then for each micro-batch
    `begin_backward`, the backward pass and `end_backward`, then `end_step`; at last `end_replica`. Or, at any point,
    `abandon`. What a mode has no use for does nothing.
    """

    def install(self) -> None:
        """A new version is about to be copied into the model."""

    def installed(self, shards: Sequence[Shard] | None) -> None:
        """The model holds a new version. `shards` are those that changed; None: all."""

    def show_version(self) -> None:
        """Load the version into the model for an evaluation."""

    def may_go_ahead(self, round: int, replica: int, generation: ViewNumber) -> bool:
        """True if the replica can compute this round's first `steps_ahead` steps before its version is here."""
        return False

    def resume_replica(self, round: int, replica: int) -> None:
        """The version is here: continue the round of a replica that has gone ahead."""
        raise AssertionError(f"replica {replica} has not gone ahead in round {round}")

    def begin_replica(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Begin a replica's round: load what that replica starts from into the model.

        `generation` is the one that was in force when the main thread decided on it: the next may come at any time.
        """

    def begin_step(self, step: int) -> None:
        """A step begins."""

    def begin_backward(self, weight: float, *, finite: Callable[[], bool], last: bool) -> None:
        """Begin a backward pass. `weight` is the replica's; `finite` tells whether all of its losses so far are.

        `last`: this is the round's last micro-batch. Call `finite` in ``staging.then``: by then the losses are here.
        """

    def end_backward(self) -> None:
        """The backward pass is over. Gradients that are computed now belong to the script."""

    def end_step(self, *, finite: Callable[[], bool]) -> None:
        """The step's gradient is complete. `finite` waits for the device, and tells whether its losses are finite.

        Raises Rewound like `Exchange.check`.
        """

    def end_replica(self, replica: int) -> None:
        """The round is over: send what was not sent yet, what the replica carries, and the buffers if it is replica 0.

        Raises Rewound when what was computed is stale.
        """

    def abandon(self) -> None:
        """The replica in progress is stale: drop its work."""

    def remove(self) -> None:
        """The run is over: take every hook off the model."""


def send_buffers(tensors: ModelTensors, exchange: Exchange, replica: int) -> None:
    """Push what the replica has left in buffers: in the model's if it is replica 0, and in those of what it carries.

    Only those of their shards that the servers need are sent.
    """
    places = exchange.replica.buffers_of(replica)
    wanted = [place for place in places if exchange.replica.claim(place.index)]
    if not wanted:
        return
    start, stop, gpu = places[0].start, places[-1].stop, tensors.device.type == "cuda"
    whole = torch.zeros(stop - start, dtype=torch.float32, device="cpu", pin_memory=gpu)
    for placed in tensors.buffers:
        if start <= placed.entry.start and placed.entry.stop <= stop:
            placed.of(whole, start).copy_(placed.tensor, non_blocking=placed.tensor.device == tensors.device)
    tensors.mark()()  # once: a model has dozens of them
    for place in wanted:
        exchange.memory.words(place.index).copy_(whole[place.start - start :][: place.words])
        exchange.replica.filled(place.index)


# ---- How a gradient gets into its slot: in place on a CPU; on a GPU through pinned memory on a side stream ----


class Staging:
    """Copies gradients into slots: in CPU memory, at once."""

    eager = True  # every micro-batch's gradient is added into the slot. Else only the last one's hook writes

    def write(self, slot: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
        """Copy (or add) `gradient` into `slot`, a CPU view of the same shape."""
        if add:
            slot.add_(gradient)
        else:
            slot.copy_(gradient)

    def then(self, call: Callable[[], None]) -> None:
        """Run `call` once everything written so far is in its slot."""
        call()

    def drain(self) -> None:
        """Wait until every `then` so far has run."""

    def close(self) -> None:
        """End any thread."""


class CudaCopies:
    """Copies from a GPU to the host, one after the other, on a stream beside the one that computes. What is elsewhere
    (a loss on the host, or on another GPU) is copied at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._seen: set[torch.cuda.Stream] = set()  # a script may compute on several

    def see(self) -> None:
        """The next `now` is also of the stream on which this thread computes at the moment."""
        self._seen.add(torch.cuda.current_stream(self._device))

    def now(self) -> Callable[[], None]:
        """Return what makes copies that begin later wait for all that this thread has given the device so far."""
        self.see()
        events = [self._seen.pop().record_event() for _ in range(len(self._seen))]

        def wait() -> None:
            for event in events:
                self._stream.wait_event(event)

        return wait

    def copy(self, slot: torch.Tensor, values: torch.Tensor) -> None:
        """Begin to copy `values`, which must live until the copy is complete."""
        if values.device != self._device:
            slot.copy_(values)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):  # the latter alone would end on GPU 0
            slot.copy_(values, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """Return what waits until everything copied so far is in its slot. Any thread may call that."""
        return marked(self._stream)


_CLOSES_WITHIN_S = 10.0  # a device that hangs keeps nobody from leaving the job


class DeviceStaging(Staging):
    """Copies gradients from a device to pinned slots while backward continues.

    A thread does what it is given, in order: calls of `soon`, which may `write`, and calls of `then`, each after its
    copies. `failed` gets an error of that thread. Only one other thread writes, and not while calls of `soon` are left.

    Gradients are held until their copies are complete, and no longer: `record_stream` would hold them until the
    allocator looks, and torch.compile's "reduce-overhead" does not allow it.
    """

    eager = False

    def __init__(self, copies: CudaCopies, failed: Callable[[BaseException], None]) -> None:
        self._copies, self._failed, self.see = copies, failed, copies.see
        self._copied: list[torch.Tensor] = []  # since the last `then`
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], list[torch.Tensor], Callable[[], None]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._do_all, name="device to host", daemon=True)
        self._thread.start()

    def soon(self, call: Callable[[], None]) -> None:
        """Have the thread run `call`, which may wait. It writes what this thread has given the device so far."""
        self._queue.put((self._copies.now(), [], call))

    def write(self, slot: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
        assert not add, "a device accumulates in .grad"
        if threading.current_thread() is not self._thread:  # else `soon` has seen to that
            self._copies.now()()
        self._copied.append(gradient)
        self._copies.copy(slot, gradient)

    def then(self, call: Callable[[], None]) -> None:
        copied, self._copied = self._copied, []
        self._queue.put((self._copies.mark(), copied, call))

    def drain(self) -> None:
        drained = threading.Event()
        self.soon(partial(self.then, drained.set))  # behind what the calls before it stage
        while not drained.wait(1.0) and self._thread.is_alive():
            pass  # (a thread that failed has reported it)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_CLOSES_WITHIN_S)
        self._let_go()

    def _do_all(self) -> None:
        while (item := self._queue.get()) is not None:
            wait, copied, call = item
            try:
                wait()
                copied.clear()
                call()
            except Exception as error:  # the main thread raises it
                self._failed(error)
                self._let_go()
                return
            del item, wait, call  # the next one may be long in coming

    def _let_go(self) -> None:  # nothing is copied any more: hold no gradient
        self._copied = []
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)


def staging_for(device: torch.device, failed: Callable[[BaseException], None]) -> Staging:
    return DeviceStaging(CudaCopies(device), failed) if device.type == "cuda" else Staging()


# ---- Tables: a model's embeddings whose rows stay on the servers. A forward pulls the rows of its batch ----


class Tables:
    """The tables of one model. It replaces the modules' forwards until `remove`, and collects the rows' gradients."""

    def __init__(self, modules: Sequence[Sequence[torch.nn.Embedding]], exchange: Exchange) -> None:
        """`modules` are the modules that use each of the layout's tables, in the layout's order."""
        self._tables = [_Table(index, exchange) for index in range(len(modules))]
        self._modules = [module for sharing in modules for module in sharing]
        for table, sharing in zip(self._tables, modules, strict=True):
            for module in sharing:
                module.forward = table.lookup  # type: ignore[method-assign]

    def settle(self, *, begins: bool) -> None:
        """A backward pass of the job begins, or is over: all uses of a row in it are summed first, as autograd does."""
        for table in self._tables:
            table.settle(begins=begins)

    def push(self) -> None:
        """Push every part of every table for the computed replica; parts without used rows get empty contributions."""
        for table in self._tables:
            table.push()

    def reset(self) -> None:
        for table in self._tables:
            table.reset()

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop("forward", None)


class _Table:
    def __init__(self, index: int, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parts = parts_of(exchange.layout, index)
        spec = exchange.layout.tables[index]
        self._name, (self._rows, self._columns) = spec.name, spec.shape
        self.reset()

    def reset(self) -> None:
        self._sum, self._in_backward = RowSum(self._columns), False
        self._fresh = RowSum(self._columns)  # of the backward pass in progress

    def settle(self, *, begins: bool) -> None:
        self._in_backward = begins
        if len(self._fresh.ids):
            self._sum.add(self._fresh.ids, self._fresh.values)
            self._fresh = RowSum(self._columns)

    def lookup(self, input: torch.Tensor) -> torch.Tensor:
        """Like ``torch.nn.Embedding.forward``: `input` (int, any shape) -> its rows, with one dimension more."""
        unique, inverse = torch.unique(input.detach(), return_inverse=True)
        ids = unique.to("cpu", torch.int64)
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self._rows:
            wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
            raise ModelError(f"there is no row {wrong} of {self._name}, which has {self._rows}: they count from 0")
        rows = self._pull(ids).to(input.device)
        if torch.is_grad_enabled():
            rows.requires_grad_().register_post_accumulate_grad_hook(self._keeper(ids))  # type: ignore[no-untyped-call]
        return F.embedding(inverse, rows)

    def _keeper(self, ids: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def keep(rows: torch.Tensor) -> None:
            if not self._in_backward and self._exchange.rows.in_micro:
                raise UsageError(
                    f"the script itself calls backward(), which gives rows of {self._name} a gradient: give "
                    "micro.backward the sum of all losses, or each of them, all but the last with more=True"
                )
            if self._in_backward and rows.grad is not None:  # None: an operation gave these rows no gradient
                self._fresh.add(ids, rows.grad.to("cpu", torch.float32))
            rows.grad = None  # (what an evaluation computes is the script's)

        return keep

    def _pull(self, ids: torch.Tensor) -> torch.Tensor:
        if not self._exchange.had_version:
            raise UsageError(f"{self._name} has no values before the first version: use it inside the run's loop")
        places = {shard: place for shard, place in split_rows(ids, self._parts).items() if len(place)}
        wanted = {
            shard: (encode_ids(ids[place] // len(self._parts)), 4 * len(place) * self._columns)
            for shard, place in places.items()
        }
        values = torch.empty(len(ids), self._columns, dtype=torch.float32, device="cpu")
        for shard, data in self._exchange.rows.pull(wanted).items():
            values[places[shard]] = torch.frombuffer(data, dtype=torch.float32).view(-1, self._columns)
        return values

    def push(self) -> None:
        for shard, place in split_rows(self._sum.ids, self._parts).items():
            if self._exchange.replica.claim(shard):
                ids = self._sum.ids[place] // len(self._parts)
                self._exchange.replica.filled_rows(shard, encode_gradient(ids, self._sum.values[place]))


def parts_of(layout: Layout, table: int) -> list[int]:
    """The shards that are the parts of a table, in the parts' order."""
    return [shard.index for shard in layout.shards if shard.part is not None and shard.part.table == table]


def split_rows(ids: torch.Tensor, parts: Sequence[int]) -> dict[int, torch.Tensor]:
    """For each of a table's `parts` (see `parts_of`): the positions of its rows among these row numbers."""
    owner = ids % len(parts)
    return {shard: torch.nonzero(owner == number).view(-1) for number, shard in enumerate(parts)}


# ---- Gradients during backward: a hook per parameter fills slots; each shard is sent when it is complete ----


class GradientHooks(DeltaSource):
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
        self._parameters_in, self._used = counts, sum(count > 0 for count in counts)
        self._last, self._in_backward, self._looked, self._none = False, False, False, (-1, -1)
        self._tables = Tables(tensors.tables, exchange)
        self._reset()
        self._handles = [
            placed.tensor.register_post_accumulate_grad_hook(self._hook(index, placed))  # type: ignore[no-untyped-call]
            for index, placed in enumerate(tensors.parameters)
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._tables.remove()

    def begin_backward(self, weight: float, *, finite: Callable[[], bool], last: bool) -> None:
        """Begin a backward pass. With `last`, shards are sent as they become complete."""
        self._last, self._in_backward = last, True
        self._tables.settle(begins=True)
        if last:
            self._staging.then(lambda: self._exchange.replica.weigh(weight, finite=finite()))

    def end_backward(self) -> None:
        self._in_backward = False
        self._tables.settle(begins=False)

    def end_replica(self, replica: int) -> None:
        """Send what is left after the last backward, and the buffers to which this replica contributes.

        Raises UsageError if no parameter got a gradient in two replicas. Of some that got none it tells once.
        """
        if not self._looked and self._exchange.step < 2 and not self._tensors.tables:
            self._look_who_got_none(replica)
        for index, placed in enumerate(self._tensors.parameters):
            if index not in self._done:
                self._finish_unused(index, placed)
        self._send_last()
        self._staging.drain()  # what follows is sent from this thread, after the losses are known
        self._exchange.check(stale=False)
        send_buffers(self._tensors, self._exchange, replica)
        self._tables.push()
        self._reset()
        self._exchange.replica.computed()

    def _look_who_got_none(self, replica: int) -> None:
        """At the job's start: a batch may have no loss, and a worker that takes over may begin with some such."""
        got, at, before = {*self._done, *self._touched, *self._wide}, (self._exchange.step, replica), self._none
        some = {i: placed for i, placed in enumerate(self._tensors.parameters) if placed.tensor.numel()}
        without = [p.entry.spec.name for i, p in some.items() if i not in got and p.tensor.grad is None]
        self._looked, self._none = len(without) < len(some), at
        if some and not self._looked and before not in ((-1, -1), at):  # (the same one may be computed again)
            raise UsageError(
                "no parameter of the job's model got a gradient: compute the loss with it, not with another or a copy"
            )
        if without and self._looked and replica == 0:
            log.warning("step %d: no gradient for %s: zeros are used (weight decay acts)", at[0], named(without, 3))

    def abandon(self) -> None:
        self._in_backward = False
        self._staging.drain()
        for placed in self._tensors.parameters:
            placed.tensor.grad = None
        self._reset()
        self._exchange.replica.abandoned()

    def _reset(self) -> None:
        self._tables.reset()
        self._left = list(self._parameters_in)
        self._open = self._used  # shards that are not complete yet
        self._kept: int | None = None
        self._claimed: dict[int, bool] = {}  # False: the servers do not need this shard's contribution from us
        self._touched, self._done = set[int](), set[int]()
        self._wide: dict[int, torch.Tensor] = {}  # sums of micro-batches, of parameters in bf16
        self._whole: list[int] = []
        self._beside: dict[int, torch.Tensor] = {}  # of shards that servers do not need: for `clip`, the record

    def _hook(self, index: int, placed: Placed) -> object:
        def hook(parameter: torch.Tensor) -> None:
            if not self._in_backward:
                return
            if parameter.grad is None and len(parameter._post_accumulate_grad_hooks or ()) == 1:
                return  # nobody took it (the hook is ours): an operation gave it none, and torch calls hooks anyway
            if self._last:
                gradient = self._taken(index, placed, parameter)
                self._done.add(index)
                self._whole_gradient(index, placed, gradient)
            elif self._staging.eager:
                self._write(index, placed, self._taken(index, placed, parameter))
            elif parameter.dtype is not torch.float32:
                # In fp32, as a slot adds: autograd would in the parameter's own type
                assert parameter.grad is not None
                gradient = parameter.grad.to(torch.float32)
                self._wide[index] = self._wide[index].add_(gradient) if index in self._wide else gradient
                parameter.grad = None

        return hook

    def _whole_gradient(self, index: int, placed: Placed, gradient: torch.Tensor) -> None:
        """A hook has the replica's last gradient of a parameter."""
        self._write(index, placed, gradient)
        self._release(index, keeps=True)

    def _taken(self, index: int, placed: Placed, parameter: torch.Tensor) -> torch.Tensor:
        """Take the gradient off the parameter: its memory is free as soon as it is in its slot."""
        gradient, parameter.grad = parameter.grad, None
        if (before := self._wide.pop(index, None)) is not None:
            gradient = before if gradient is None else before.add_(gradient)
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
        return gradient

    def _write(self, index: int, placed: Placed, gradient: torch.Tensor) -> None:
        for slot, part in self._places(index, placed):
            if part is not None and gradient.dim() != 1:
                gradient = gradient.reshape(-1)
            self._staging.write(slot, gradient if part is None else gradient[part], add=index in self._touched)
        self._touched.add(index)

    def _places(self, index: int, placed: Placed) -> Iterator[tuple[torch.Tensor, slice | None]]:
        """Yield where the parameter's gradient belongs for the shards that need it, and which words of it; None: all of
        it at once, in its shape."""
        shards, entry = self._shards_of[index], placed.entry
        targets = list(map(self._target, shards))
        if len(targets) == 1 or len({target and id(target[0]) for target in targets}) == 1:  # in one vector, or nowhere
            if (target := targets[0]) is not None:
                yield placed.of(*target), None
            return
        for shard, target in zip(shards, targets, strict=True):
            if target is not None:
                place, (vector, first) = self._exchange.layout.shards[shard], target
                start, stop = max(entry.start, place.start), min(entry.stop, place.stop)
                yield vector[start - first : stop - first], slice(start - entry.start, stop - entry.start)

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

    def _release(self, index: int, *, keeps: bool) -> None:
        """A parameter's gradient is written. `keeps`: the shard that is complete last waits for `end_replica`."""
        for shard in self._shards_of[index]:
            self._left[shard] -= 1
            if self._left[shard]:
                continue
            self._open -= 1
            if self._clip is not None:
                self._whole.append(shard)
            elif self._claimed[shard]:
                if self._open or not keeps:
                    self._send(shard)
                else:
                    self._kept = shard
            elif shard in self._beside:
                self._staging.then(partial(self._exchange.replica.not_needed, shard, self._beside[shard]))

    def _send(self, shard: int) -> None:
        self._staging.then(partial(self._exchange.replica.filled, shard))

    def _send_last(self) -> None:
        """Send what may leave only when the backward pass is over."""
        if self._kept is not None:
            self._send(self._kept)
        if self._clip is not None:
            self._staging.drain()
            slots = self._exchange.memory.words
            values = {shard: self._beside[shard] if shard in self._beside else slots(shard) for shard in self._whole}
            scale = clip_scale(total_norm(float(torch.linalg.vector_norm(of)) for of in values.values()), self._clip)
            for shard, slot in values.items():
                if self._claim(shard):
                    if scale != 1.0:
                        slot.mul_(scale)
                    self._exchange.replica.filled(shard)

    def _finish_unused(self, index: int, placed: Placed) -> None:
        if placed.tensor.grad is not None or index in self._wide:
            self._write(index, placed, self._taken(index, placed, placed.tensor))
        elif index not in self._touched:
            for slot, _ in self._places(index, placed):
                slot.zero_()
        self._release(index, keeps=False)


# ---- Gradients that a server of this process takes where they are ----


class InPlaceGradients(GradientHooks):
    """Like `GradientHooks`; a gradient stays in the memory that autograd has made, and leaves when backward is over."""

    def _reset(self) -> None:
        super()._reset()
        self._own: dict[int, torch.Tensor] = {}  # this replica's gradients, by parameter

    def _write(self, index: int, placed: Placed, gradient: torch.Tensor) -> None:
        gradient = gradient.to(torch.float32)
        if index in self._touched:
            self._own[index] = self._own[index] + gradient  # (its memory may be another gradient's too)
        else:
            alone = len(placed.tensor._post_accumulate_grad_hooks or ()) <= 1
            self._own[index] = gradient if alone else gradient.clone()  # a script's hook may go on with it
        self._touched.add(index)

    def _release(self, index: int, *, keeps: bool) -> None:
        self._done.add(index)

    def _finish_unused(self, index: int, placed: Placed) -> None:
        if placed.tensor.grad is None and index not in self._touched:
            placed.tensor.grad = torch.zeros_like(placed.tensor)
        super()._finish_unused(index, placed)

    def _send_last(self) -> None:
        of = {id(placed): self._own[index].reshape(-1) for index, placed in enumerate(self._tensors.parameters)}
        self._own.clear()
        for shard, gradient in self._tensors.pieces_of(lambda placed: of[id(placed)]).items():
            if self._claim(shard):
                self._exchange.in_place.gradients[shard] = gradient
                self._exchange.replica.filled(shard)


# ---- Gradients of a model on a device ----

_BUCKET_BYTES = 16 << 20  # of gradients that are waited for together: two events of the device for all of them


class DeviceGradients(GradientHooks):
    """Like `GradientHooks`; its hooks wait for nobody. The staging's thread claims slots and begins the copies.

    Hooks run on autograd's thread, and the main thread, inside of ``backward()``, sees no signal until they return: a
    spot machine's notice must not wait there for a server.
    """

    _staging: DeviceStaging

    def end_replica(self, replica: int) -> None:
        self._stage_bucket()
        self._staging.drain()
        if self._stale:
            raise Rewound
        super().end_replica(replica)

    def _reset(self) -> None:
        super()._reset()
        self._bucket: list[tuple[int, Placed, torch.Tensor]] = []
        self._bytes = 0  # in the bucket
        self._complete: list[int] | None = None  # shards of the bucket that is being staged
        self._stale = False

    def _whole_gradient(self, index: int, placed: Placed, gradient: torch.Tensor) -> None:
        gradient = gradient.contiguous()  # here: the staging's thread would do it on a stream that no copy waits for
        self._staging.see()
        self._bucket.append((index, placed, gradient))
        self._bytes += gradient.nbytes
        if self._bytes >= _BUCKET_BYTES:
            self._stage_bucket()

    def _stage_bucket(self) -> None:
        self._staging.soon(partial(self._stage, self._bucket))
        self._bucket, self._bytes = [], 0

    def _stage(self, bucket: list[tuple[int, Placed, torch.Tensor]]) -> None:
        if self._stale:
            return
        complete = self._complete = []
        try:
            for index, placed, gradient in bucket:
                super()._whole_gradient(index, placed, gradient)
        except Rewound:  # the main thread raises it
            self._stale = True
        self._complete = None
        self._staging.then(partial(self._send_all, complete))

    def _send(self, shard: int) -> None:
        if self._complete is None:
            super()._send(shard)
        else:
            self._complete.append(shard)

    def _send_all(self, shards: Sequence[int]) -> None:
        for shard in shards:
            self._exchange.replica.filled(shard)
