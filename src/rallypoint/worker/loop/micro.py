"""A micro-batch, the versions that it reads, and forward passes that begin before all of a version is here."""

from __future__ import annotations

import gc
import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from rallypoint.codec.spec import Raw
from rallypoint.core.protocol import NotStored
from rallypoint.core.typed import unnamed
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.errors import NO_SNAPSHOT, JobAborted, UsageError
from rallypoint.parallel import whole_of
from rallypoint.store.manifest import Compression
from rallypoint.store.writer import SnapshotWriter
from rallypoint.worker.exchange.locked import Rewound
from rallypoint.worker.habits import by_the_job, reached
from rallypoint.worker.loop.guard import BufferGuard, Parts
from rallypoint.worker.precision import HeldParameters
from rallypoint.worker.ranks.followers import Logged, is_number
from rallypoint.worker.tensors import Carry, ModelTensors, late_kind

# ---- The versions of a worker's model: the first is uploaded, later ones are installed, some are stored ----

log = logging.getLogger("rallypoint")


class BufferVersions:
    """Moves versions between the exchange buffer and the model. Main thread only, between two micro-batches."""

    def __init__(self, parts: Parts, on_cast: Callable[[], None]) -> None:
        """`on_cast` is called when parameters have got another type: see `HeldParameters`."""
        self._parts, self._exchange = parts, parts.exchange
        self._held = HeldParameters(parts.config, parts.tensors, on_cast)
        self._rounds = parts.config.down != Raw() or parts.config.memory.hold == "bf16"  # what comes, or is held
        self._writer: SnapshotWriter | None = None
        self._updates = -1  # the newest update in the model's version; -1 until one comes from the servers
        self._buffers_at_start: list[torch.Tensor] = []
        self._trace_steps = parts.coordinator.welcome.trace

    def initialise(self) -> None:
        """Upload what all workers start from: this model's values, and the optimizer's state if workers step it.

        It is asked for again when the servers' state is lost before a step is computed. Raises JobAborted if the model
        does not hold the first weights any more.
        """
        exchange, tensors, optimizer = self._exchange, self._parts.tensors, self._parts.optimizer
        if self._parts.streamed is not None:
            exchange.initialise(self._parts.streamed.first_words)
            return
        if optimizer is None:
            if self._updates >= 0:
                if self._updates > 0:
                    raise JobAborted(NO_SNAPSHOT)
                if self._rounds:
                    raise JobAborted(
                        "the servers' state is lost, and here the first weights are rounded, by `down` or `hold`: "
                        "start again"
                    )
                self._parts.source.show_version()
                self.restore_buffers()
            first = _only_buffers(tensors) if exchange.in_place.parameters else tensors.part
            exchange.initialise(first)
            return
        if optimizer.version < 0:
            optimizer.version = exchange.holds = 0
            self._keep_buffers()  # the upload may be lost with a link, and is repeated then
        else:
            self.restore_buffers()
        exchange.initialise(tensors.part, optimizer.record)

    def install(self, version: int) -> ViewNumber | None:
        """Copy a version from the exchange buffer into the model. Returns the generation in which the model holds it.

        Returns None if another version is to be installed by now, or a roll-back has made this one stale.
        """
        parts, exchange = self._parts, self._exchange
        with parts.tracer.span("install", version=version):
            vector, shards = exchange.begin_install(version), exchange.installing
            if vector is None:
                return None
            self._held.before_install(last=version >= exchange.end.last)
            parts.source.install()
            if parts.optimizer is not None:
                states, skipped = exchange.take_states()
                parts.optimizer.install(version, vector, states, skipped=skipped)
                exchange.holds = version
            elif parts.streamed is not None:
                parts.streamed.install()
            elif exchange.in_place.parameters:
                with by_the_job():
                    exchange.in_place.install()
                parts.tensors.follow(exchange.in_place.parameters)
                changed = exchange.layout.shards if shards is None else shards
                parts.tensors.read_shards_from(vector, [shard for shard in changed if shard.role == "buffers"])
            elif shards is None or not parts.alone:
                parts.followers.install(version)
                parts.tensors.read_from(vector, exchange.buffer)
            else:
                parts.tensors.read_shards_from(vector, shards)
        parts.source.installed(shards)
        self._updates = exchange.updates
        self._keep_buffers()
        generation = exchange.installed(version)
        self._trace(version)
        return generation

    def ended(self, version: int) -> None:
        """The model holds the job's last version: from now on exactly. (Where workers step, all have what came.)"""
        may_be_rounded = self._rounds and self._exchange.end.is_early and self._parts.optimizer is None
        if may_be_rounded and (vector := self._exchange.exactly(version)) is not None:
            self._held.before_install(last=True)
            self._parts.followers.install(version)
            self._parts.tensors.read_from(vector)

    def completed(self, buffers: list[torch.Tensor]) -> None:
        """A forward pass has installed a whole version; `buffers` are the buffers' values in it."""
        self._updates = self._exchange.step
        self._buffers_at_start = buffers
        self._trace(self._exchange.step)

    def _trace(self, version: int) -> None:
        self._parts.tracer.on = self._trace_steps[0] <= version < self._trace_steps[1]

    def _keep_buffers(self) -> None:
        self._buffers_at_start = [placed.tensor.clone() for placed in self._parts.tensors.buffers]

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Set the buffers to the version's values.

        Each replica starts from these, even after an evaluation changed them.
        """
        for placed, start in zip(self._parts.tensors.buffers, self._buffers_at_start, strict=True):
            placed.tensor.copy_(start)

    def store(self, wanted: machine.Store) -> None:
        """Store this worker's share of a snapshot, if the model still holds that version."""
        parts = self._parts
        assert parts.optimizer is not None
        if parts.optimizer.version > wanted.version:
            late = NotStored(wanted.snapshot, "the step was over before the request came", parts.optimizer.version)
            parts.coordinator.send(late)
            return
        me, about = self._exchange.me, parts.coordinator.welcome
        shares = parts.tensors.layout.shards[wanted.writers.index(me) :: len(wanted.writers)]
        if not shares:
            return
        if self._buffers_at_start:
            self.restore_buffers()
        if self._writer is None:
            compression = cast(Compression, about.compression)
            self._writer = SnapshotWriter(about.snapshots, compression, me, parts.coordinator.send)
        with parts.tracer.span("capture", version=wanted.version):
            self._writer.begin(wanted.snapshot, len(shares))
            for shard in shares:
                self._writer.put(parts.optimizer.record(shard))

    def close(self) -> None:
        """End the writer of snapshots, if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _only_buffers(tensors: ModelTensors) -> Callable[[int, int], torch.Tensor]:
    """`ModelTensors.part`; of parameters, which the server has, nothing."""
    start = min((placed.entry.start for placed in tensors.buffers), default=tensors.layout.words)
    return lambda first, stop: tensors.part(first, stop if first >= start else first)


def check_last(version: int, rounds: int) -> None:
    """Warn if the job is over and the model, which holds `version`, does not hold its last one. JobAborted if none."""
    if version < 0:
        raise JobAborted("the job was over before this worker had any of its parameters")
    if version < rounds:
        log.warning(
            "the job is over, but this worker's model holds version %d of %d: the job did not wait for it (it was out "
            "of the servers' reach). Use the weights that the others have saved", version, rounds,
        )  # fmt: skip


# ---- Forward passes that begin before all of their version is here: each module waits for its own parameters ----
#
# What stands for "its own": a parameter that is not installed yet is *late* (`tensors.py`). It is waited for when
# a module that has it runs, or when any torch function gets it as an argument, whichever comes first. So modules that
# share a parameter, that run in another order than before or not at all, or that read another module's parameter, are
# right.
#
# What Python does not see is not seen here: compiled code, TorchScript, tensors that share a parameter's memory. Where
# there is any of it, workers wait for all of a version before each forward pass, and say so once. It is looked for
# before each step that does not begin early. Nor are parameters seen that a transform of torch.func gets as arguments,
# unless a module runs in it: then all are waited for there. If a loss depends on a parameter that nobody has read, the
# forward pass is given up, and later ones wait.

_PIECE = 1 << 16  # words that are swapped at once: they stay in a core's cache


class EarlyForward:
    """Installs a version while the forward pass that reads it runs, on a CPU.

    Main thread only, but for `enter`, and for what reads late parameters: a model may run its modules in threads.

    Calls: `start` for each replica; then, if it returned True, `begin` before the script gets its first micro-batch,
    `enter` before each module, `finish` before the backward pass. Or, at any point, `undo`.
    """

    def __init__(self, parts: Parts, guard: BufferGuard, versions: BufferVersions) -> None:
        self.inside = False  # the script is inside of ``with micro:``, so a stale forward pass can be unwound
        self._parts, self._guard, self._versions = parts, guard, versions
        self._forward, self._tensors = parts.exchange.forward, parts.tensors
        self._kind = late_kind(self._settle)
        layout = parts.tensors.layout
        self._shards_of = {
            id(placed.tensor): layout.shards_touching(placed.entry.start, placed.entry.stop)
            for placed in parts.tensors.parameters if placed.tensor.numel()
        }  # fmt: skip
        self._all = [shard.index for shard in layout.shards]
        self._buffer_shards = [shard.index for shard in layout.shards if shard.role == "buffers"]
        self._parts_in = [parts.tensors.parts_in(shard) for shard in layout.shards]
        self._scratch = torch.empty(min(_PIECE, layout.words), dtype=torch.float32, device="cpu")
        self._starts = self._runs = False
        self._lock = threading.RLock()  # one thread installs at a time, and may wait for shards meanwhile
        self._in_model: dict[int, None] = {}  # the shards that the model holds of the version, in the order of need
        self._swapped: list[int] = []  # those of them that it did not hold before
        self._buffers: list[torch.Tensor] = []  # the buffers' values in the version
        self._why_not: str | None = None  # why no forward pass may begin early; None: not looked yet
        self._said = False

    @property
    def waited(self) -> float:
        """Seconds that the forward pass of the replica in progress has waited for parameters."""
        return self._forward.waited

    def allow(self, allowed: bool) -> None:
        """Allow (or not) that the next step begins early. It does not where something reads parameters unseen."""
        if not self._forward.possible:
            return
        if self._why_not is None or not allowed:  # again after the first steps: a forward pass may keep a view
            self._why_not = self._why_not or _read_unseen(self._parts, first=self._why_not is None)
        self._why_not = self._why_not or _compiled()
        self._forward.allow(allowed and not self._why_not)
        if allowed and self._why_not and not self._said and self._parts.leads():
            self._said = True
            self._parts.say(
                f"every forward pass waits until all parameters are here, and does not overlap with their arrival: "
                f"{self._why_not}"
            )

    def start(self, step: int, replica: int) -> bool:
        """A replica begins. Returns True if its forward pass begins early."""
        self.inside, self._starts = False, self._forward.begin(step, replica)
        return self._starts

    @torch.no_grad()
    def begin(self) -> None:
        """Install the buffers, and make the parameters late. Does nothing unless the forward pass begins early.

        Raises Rewound when it is stale.
        """
        if not self._starts:
            return
        self._starts, self._runs = False, True
        if self._buffer_shards:
            self._in_model.update(dict.fromkeys(self._forward.take(self._buffer_shards)))
            for placed in self._tensors.buffers:
                placed.tensor.copy_(placed.of(self._parts.exchange.buffer))
        self._buffers = [placed.tensor.clone() for placed in self._tensors.buffers]
        for placed in self._tensors.parameters:
            if placed.tensor.numel():
                placed.tensor.__class__ = self._kind

    def enter(self, module: torch.nn.Module) -> None:
        """A module is about to run: install its own parameters. Raises Rewound when the forward pass is stale."""
        if self._runs:
            if torch._C._functorch.peek_interpreter_stack() is not None:
                self._install_or_undo(self._all)  # a transform of torch.func may have wrapped any of them
                self._none_is_late()
            for parameter in module._parameters.values():
                if type(parameter) is self._kind:
                    self._settle(parameter)

    def finish(self, loss: torch.Tensor) -> bool:
        """The forward pass is over: install what it has not read. Returns True if it has begun early.

        Raises Rewound when it is stale, or when `loss` depends on a parameter that was read unseen.
        """
        if not self._runs:
            return False
        unread = {id(placed.tensor): placed for placed in self._tensors.parameters if type(placed.tensor) is self._kind}
        if unread and (found := reached([loss], unread)) is not None:
            name = unread[found].entry.spec.name
            self._why_not = f"parameter {name} is read by something that gets a copy of it, such as torch.func"
            raise Rewound
        self._install(self._all)
        self._forward.installed()
        self._forward.learn(list(self._in_model))
        self._end()
        self._versions.completed(self._buffers)
        return True

    def undo(self) -> None:
        """Give up the forward pass: the model holds the version before again."""
        self._starts = False
        if self._runs:
            self._swap(self._swapped)
            self._end()
            with temporarily_clear_interpreter_stack():  # as in `_swap`
                self._versions.restore_buffers()

    def _end(self) -> None:
        self._runs = False
        self._in_model.clear()
        self._swapped.clear()
        self._none_is_late()

    def _none_is_late(self) -> None:
        for placed in self._tensors.parameters:
            if type(placed.tensor) is self._kind:
                placed.tensor.__class__ = torch.nn.Parameter

    def _settle(self, parameter: torch.nn.Parameter) -> None:
        """Wait for a late parameter, and install it."""
        self._install_or_undo(self._shards_of.get(id(parameter), ()))  # none: a copy of a late one
        parameter.__class__ = torch.nn.Parameter

    def _install_or_undo(self, shards: Sequence[int]) -> None:
        try:
            self._install(shards)
        except Rewound:
            if self.inside:
                raise
            self.undo()  # the script reads them before `with micro:`, where it learns that this is stale

    def _install(self, shards: Sequence[int]) -> None:
        with self._lock:
            if left := [shard for shard in shards if shard not in self._in_model]:
                with self._parts.tracer.span("install", shards=len(left)):
                    new = self._forward.take(left)
                    self._swap(new)
                    self._swapped += new
                    self._in_model.update(dict.fromkeys(left))

    @torch.no_grad()
    def _swap(self, shards: Sequence[int]) -> None:
        buffer = self._parts.exchange.buffer
        # Inside of a transform of torch.func, nobody may write to a tensor that is not the transform's own
        with torch._C.DisableTorchFunctionSubclass(), temporarily_clear_interpreter_stack():
            for shard in shards:
                for placed, start, stop in self._parts_in[shard]:
                    before = placed.tensor._version
                    placed.swap(start, buffer[start:stop], self._scratch)
                    self._guard.wrote(placed.tensor, placed.tensor._version - before)


def _read_unseen(parts: Parts, *, first: bool) -> str:
    """What in this model reads parameters without a torch function that gets them; "" if nothing is known to. Unless it
    is the `first` look, what only graphs of earlier steps hold does not count: no forward pass reads that."""
    for name, module in parts.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"module {name or type(module).__name__} is TorchScript, which reads its parameters unseen"
    alone = _users(torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu")))
    shared = {}
    for placed in parts.tensors.parameters:
        name, tensor = placed.entry.spec.name, placed.tensor
        if type(tensor) is not torch.nn.Parameter:
            return f"parameter {name} is a {type(tensor).__qualname__}"
        if _users(tensor) > alone:
            shared[_memory(tensor)] = name, tensor
    if shared and (name := next(iter(shared.values()))[0] if first else _seen_by_python(shared)):
        return f"parameter {name} shares its memory with another tensor, which a variable or a module keeps"
    return ""


def _seen_by_python(shared: Mapping[int, tuple[str, torch.Tensor]]) -> str:
    """The first of these parameters, by memory, of which Python code has a view: "" if only graphs have."""
    for one in gc.get_objects():  # once for all of them: a data set may be a million objects
        if issubclass(type(one), torch.Tensor) and (found := shared.get(_memory(one))) and one is not found[1]:
            return found[0]
    return ""


def _memory(tensor: torch.Tensor) -> int:
    """What tells a tensor's memory from others'; 0 for one that has none, such as a sparse one."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _users(tensor: torch.Tensor) -> int:
    """How many tensors use this one's memory, and those who count them."""
    users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return users


def _compiled() -> str:
    """Whether torch.compile has compiled anything in this process: "" if not."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)  # None: not, or not yet, imported
    compiled = counters is not None and counters["frames"]["total"]
    return "torch.compile is used, and compiled code reads parameters unseen" if compiled else ""


# ---- One micro-batch of one replica, as the user's loop gets it ----


class Loop:
    """What a micro-batch needs of the loop that yields it: `Passes`, or `RankRun` on a rank that does not lead."""

    logged: Logged  # the figures that the script has logged of the replica

    def check(self) -> None:
        """Raise Rewound if what is being computed is stale. Raise the error of whatever has failed."""

    def enter_micro(self, micro: Micro) -> None:
        """Begin ``with micro:``."""

    def exit_micro(self) -> None:
        """End ``with micro:``."""

    def backward_micro(
        self, micro: Micro, loss: torch.Tensor, weight: float, *, last: bool = True, retain_graph: bool = False
    ) -> None:
        """Back-propagate one loss of a micro-batch; the `last` one ends it."""

    def computed_micro(self, micro: Micro, loss: torch.Tensor | None, weight: float) -> None:
        """The script has back-propagated one micro-batch by itself."""

    def backward_at(self) -> str:
        """Return where the script has called backward() itself in this micro-batch, as ``train.py:31``; "": nowhere."""
        return ""

    def carried_micro(self, micro: Micro) -> Carry:
        """Return what the micro-batch's replica carries. Raises UsageError where none may carry anything."""
        raise UsageError("micro.carry is not supported together with --ranks")

    def carry_micro(self, micro: Micro, state: Carry) -> None:
        """Set what the micro-batch's replica carries. Raises UsageError like `carried_micro`."""
        self.carried_micro(micro)


class Micro:
    """A micro-batch: ``with micro:`` seeds the random generators; `backward` computes gradients and sends them.

    Attributes:
        batch: the collated samples, on the model's device.
        step, replica, index: which micro-batch of the job this is.
        losses: the sum of the losses back-propagated so far; None before the first.
    """

    losses: torch.Tensor | None = None

    def __init__(
        self, run: Loop, *, step: int, replica: int, index: int, batch: Any,
        scale: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._run, self._scale = run, scale
        self.step, self.replica, self.index, self.batch = step, replica, index, batch
        self._inside = self._finished = self.abandoned = False
        self._weight: float | None = None  # of the backward passes so far
        self._failure: BaseException | None = None  # the error that `backward` raised

    def __enter__(self) -> Micro:
        self._inside = True
        self._run.enter_micro(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self._inside = False
        self._run.exit_micro()
        if isinstance(error, Rewound):
            self.abandoned = True  # the loop yields what is to be computed instead
            return True
        if error is None and (self._failure is not None or not self._finished):
            self._end_unfinished()
        return False

    def _end_unfinished(self) -> None:
        """Raise an error: the body ended without `backward`. If `backward` failed and the script caught that, name the
        reason."""
        try:
            if self._failure is not None:
                raise self._failure
            self._run.check()
        except Rewound:
            self.abandoned = True
        else:
            begun = "" if self.losses is None else ": the last backward pass has no more=True"
            own = self._run.backward_at()
            begun = begun or (own and f": {own} calls backward() itself, which the job does not see")
            raise UsageError(f"{self._where}: the micro-batch ended without micro.backward(loss){begun}")

    def backward(
        self, loss: torch.Tensor, *, weight: float = 1.0, more: bool = False, retain_graph: bool = False
    ) -> None:
        """Back-propagate `loss` (a tensor of one element: the mean over this micro-batch).

        Call it once; or several times, all but the last with ``more=True``: their gradients add up, as in plain
        PyTorch, and the micro-batch's loss is the sum. `retain_graph` is as in ``Tensor.backward``.

        `weight` is the replica's weight in the mean over replicas, for example its number of tokens. All micro-batches
        of one replica, and all passes of one micro-batch, must pass the same.

        Raises UsageError when it is called after the last or outside of ``with micro:``, for a loss without a gradient,
        and for a weight that is not positive. Raises NonFiniteLoss when the loss is not finite and the job is to stop
        on that.
        """
        self._check_place("backward")
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                f"micro.backward needs the loss as a tensor, not as a {type(loss).__qualname__}: pass it without "
                ".item() or float()"
            )
        if loss.numel() != 1:
            raise UsageError(f"micro.backward needs a scalar loss, not one of shape {list(loss.shape)}: take its mean")
        if not loss.requires_grad:
            raise UsageError(
                f"{self._where}: the loss depends on no trained parameter: it was computed under torch.no_grad(), "
                "detached, or with another model than the one that job.train has got"
            )
        one = loss.reshape(())
        self._end(
            lambda: self._run.backward_micro(self, one, weight, last=not more, retain_graph=retain_graph), weight,
            last=not more,
        )  # fmt: skip

    def computed(self, loss: torch.Tensor | None = None, *, weight: float = 1.0) -> None:
        """Say that the script has run forward and backward by itself, as a pipeline's schedule does. Call it once.

        For a worker of several ranks (``--ranks``) only. The gradients of this micro-batch are in ``.grad``, or added
        to what is there, and divided by `accumulate`. `loss` is its mean loss; None on ranks that have none.

        Raises UsageError as `backward` does, and in a worker of one process.
        """
        self._check_place("computed")
        self._end(lambda: self._run.computed_micro(self, loss, weight), weight)

    def _check_place(self, called: str) -> None:
        if self._finished:
            raise UsageError(
                f"{self._where}: micro.{called} came twice: add the losses, or give all but the last more=True "
                "(micro.backward(loss, more=True))"
            )
        if not self._inside:
            raise UsageError(
                f"{self._where}: micro.{called} was called outside of `with micro:`: put forward and backward inside "
                "it, as it seeds the replica's randomness and unwinds what is to be computed again"
            )

    def _end(self, call: Callable[[], None], weight: float, *, last: bool = True) -> None:
        if not (weight > 0 and math.isfinite(weight)):
            raise UsageError(f"a weight of {weight}: weights are positive and finite")
        if self._weight not in (None, weight):
            raise UsageError(f"{self._where}: its backward passes weigh {self._weight} and {weight}: pass one to each")
        self._finished, self._weight = last, weight
        try:
            call()
        except BaseException as error:
            self._failure = error
            raise

    def log(self, **figures: float | torch.Tensor) -> None:
        """Log figures of this micro-batch, such as ``accuracy=0.5``: numbers, or tensors of one element.

        Each is averaged over the replica's micro-batches, then over replicas by their weights, and shown and logged
        with the step's loss. Tensors are read when the replica is computed: nobody waits for a device before.

        Raises UsageError for what is no number, for too many figures and for names that are too long.
        """
        if why := unnamed(figures):
            raise UsageError(f"{self._where}: micro.log got {why}")
        for name, value in figures.items():
            if not is_number(value):
                raise UsageError(
                    f"{self._where}: micro.log({name}=...) got a {type(value).__qualname__}: give one number, or a "
                    "tensor of one element"
                )
        self._run.logged.add({n: whole_of(v) if isinstance(v, torch.Tensor) else float(v) for n, v in figures.items()})

    @property
    def carry(self) -> Any:
        """The state that the replica carries from step to step, such as a recurrent model's hidden state.

        It is what the replica's micro-batch before this one has left, or (at the first step) what ``carry=`` of
        `job.train` gives: new tensors in the same form, which belong to no graph. Set it inside of ``with micro:`` to
        what this micro-batch leaves; its graph is cut off. If it is not set, the state stays.

            hidden = micro.carry
            output, hidden = model(micro.batch, hidden)
            micro.carry = hidden

        It is a part of the version, so it survives whatever is killed: see docs/loops.md. Raises UsageError where
        replicas carry nothing, for a state of another form, and when it is set outside of ``with micro:``.
        """
        return self._run.carried_micro(self)

    @carry.setter
    def carry(self, state: Any) -> None:
        if not self._inside:
            raise UsageError(f"{self._where}: micro.carry is set outside of `with micro:`: set it inside")
        self._run.carry_micro(self, state)

    @property
    def finished(self) -> bool:
        """True if `backward` has ended without an error."""
        return self._finished and self._failure is None and not self.abandoned

    @property
    def loss_scale(self) -> float:
        """The factor by which `backward` multiplies the loss: 1 except with fp16. (Reading it waits for a GPU.)"""
        return 1.0 if self._scale is None else float(self._scale[0])

    @property
    def _where(self) -> str:
        return f"step {self.step}, replica {self.replica}"
