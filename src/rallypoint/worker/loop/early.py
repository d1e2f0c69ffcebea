"""Forward passes that begin before all of their version is here: each module waits for its own parameters only.

A module waits in its forward pre-hook, as one of FSDP2 does. Who reads a parameter elsewhere (a layer whose weight
another one uses, a penalty on all parameters, a view that the model keeps) waits too: `Reads`, a mode of torch, sees
each function that the script's thread calls, and knows the tensors that lie in a parameter's memory. A tensor that has
no memory of its own, as inside of a transform of torch.func, may be made of any parameter: all are waited for.

Other threads wait for all of a version when they run a module. What no function of torch reads is not seen: compiled
code, TorchScript, arrays of numpy. Where there is any of the former two, workers wait for all of a version before each
forward pass, and say so once. If a loss depends on a parameter that nobody has waited for, or something was compiled
meanwhile, the forward pass is given up, and later ones wait.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rallypoint.worker.exchange.exchange import Rewound
from rallypoint.worker.habits import reaches
from rallypoint.worker.loop.guard import ModelGuard, NoGuard
from rallypoint.worker.loop.parts import Parts
from rallypoint.worker.loop.versions import Versions
from rallypoint.worker.streamed.late import READ_NO_VALUES, tensors_in

_PIECE = 1 << 16  # words that are swapped at once: they stay in a core's cache


class Reads(TorchFunctionMode):
    """Calls `before` with each tensor that a torch function gets, where it may read its values. One thread only."""

    def __init__(self, before: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._before, self._probe = before, torch.empty(0, dtype=torch.float32, device="cpu")
        self.on = False  # False: `before` is not called
        self._heard = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        if not torch.compiler.is_compiling():  # what is compiled reads whatever is there then: see `finish`
            self._heard = True
            if self.on and func not in READ_NO_VALUES:
                for tensor in tensors_in((args, kwargs)):
                    self._before(tensor)
        return func(*args, **(kwargs or {}))

    def hears(self) -> bool:
        """True if this mode is in effect here: a script that leaves another mode too late takes this one off."""
        self._heard = False
        self._probe.dim()
        return self._heard


class EarlyForward:
    """Installs a version while the forward pass that reads it runs.

    Main thread only, but for `enter`: a model may run its modules in threads.

    Calls: `start` for each replica; then `running` around the script's code of its first micro-batch, in there
    `enter_micro`, `enter` before each module, `finish` before the backward pass. Or, at any point, `undo`.

    Attributes:
        inside: the script is inside of ``with micro:``, so a stale forward pass can be unwound.
    """

    def __init__(self, parts: Parts, guard: ModelGuard | NoGuard, versions: Versions) -> None:
        self.inside = False
        self._parts, self._guard, self._versions = parts, guard, versions
        self._forward, self._tensors = parts.exchange.forward, parts.tensors
        self._reads = Reads(self._settle)
        layout = parts.tensors.layout
        self._read = [placed for placed in parts.tensors.parameters if placed.tensor.numel()]
        self._shards_of = {
            id(placed.tensor): layout.shards_touching(placed.entry.start, placed.entry.stop) for placed in self._read
        }
        self._all = [shard.index for shard in layout.shards]
        self._buffer_shards = [shard.index for shard in layout.shards if shard.role == "buffers"]
        self._parts_in = [parts.tensors.parts_in(shard) for shard in layout.shards]
        self._scratch = torch.empty(min(_PIECE, layout.words), dtype=torch.float32, device=parts.tensors.device)
        self._word = torch.zeros(1, dtype=torch.float32, device="cpu")
        self._starts = self._runs = False
        self._thread = 0  # the script's
        self._lock = threading.RLock()  # one thread installs at a time, and may wait for shards meanwhile
        self._late: dict[int, list[int]] = {}  # the address of parameters' memory -> their shards
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
        if self._why_not is None:
            self._why_not = _read_unseen(self._parts)
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

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the script's code of a micro-batch, between two of the job's. Raises Rewound when it is stale."""
        if not self._starts:
            yield
            return
        with self._reads:
            self.begin()
            yield

    @torch.no_grad()
    def begin(self) -> None:
        """Install the buffers; from now on whoever reads a parameter waits. Raises Rewound when the pass is stale."""
        self._starts, self._runs, self._thread = False, True, threading.get_ident()
        if self._buffer_shards:
            self._in_model.update(dict.fromkeys(self._forward.take(self._buffer_shards)))
            for placed in self._tensors.buffers:
                placed.tensor.copy_(placed.of(self._parts.exchange.buffer))
        self._buffers = [placed.tensor.clone() for placed in self._tensors.buffers]
        for placed in self._read:
            at = placed.tensor.untyped_storage().data_ptr()
            self._late.setdefault(at, []).extend(self._shards_of[id(placed.tensor)])
        self._reads.on = True

    def enter_micro(self) -> None:
        """The script enters ``with micro:``. Raises nothing, as that could not swallow it."""
        if self._runs and not self._reads.hears():
            self._install_or_undo(self._all)
        self.inside = True

    def enter(self, module: torch.nn.Module) -> None:
        """A module is about to run: install its own parameters. Raises Rewound when the forward pass is stale."""
        if not self._runs:
            return
        if threading.get_ident() != self._thread:
            self._install_or_undo(self._all)  # what else this thread reads is not seen
            return
        for parameter in module.parameters(recurse=False):
            self._settle(parameter)

    def finish(self, loss: torch.Tensor) -> bool:
        """The forward pass is over: install what it has not read. Returns True if it has begun early.

        Raises Rewound when it is stale, or when `loss` depends on a parameter that was read unseen.
        """
        if not self._runs:
            return False
        for placed in self._read:
            if not self._has(placed.tensor) and reaches([loss], {id(placed.tensor)}):
                self._why_not = f"parameter {placed.entry.spec.name} is read by something that nobody sees"
        self._why_not = self._why_not or _compiled()
        if self._why_not:
            raise Rewound
        self._install(self._all)
        self._synchronize()
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
            self._synchronize()
            self._end()
            self._write(self._versions.restore_buffers)

    def _end(self) -> None:
        self._runs = self._reads.on = False
        self._late.clear()
        self._in_model.clear()
        self._swapped.clear()

    def _has(self, parameter: torch.Tensor) -> bool:
        """True if the model holds all of a parameter's values in the version."""
        return all(shard in self._in_model for shard in self._shards_of[id(parameter)])

    def _settle(self, tensor: torch.Tensor) -> None:
        """A tensor is read: wait for the parameters in whose memory it lies, and install them."""
        if not self._late:
            return
        try:
            at = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # a transform of torch.func has wrapped it, say
            self._install_or_undo(self._all)
        else:
            if (shards := self._late.get(at)) is not None:
                self._install_or_undo(shards)
                self._late.pop(at, None)

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

    def _swap(self, shards: Sequence[int]) -> None:
        """Swap slots and parameters."""
        self._write(lambda: self._swap_here(list(shards)))

    @torch.no_grad()
    def _swap_here(self, shards: Sequence[int]) -> None:
        buffer = self._parts.exchange.buffer
        for shard in shards:
            for placed, start, stop in self._parts_in[shard]:
                before = placed.tensor._version
                placed.swap(start, buffer[start:stop], self._scratch)
                self._guard.wrote(placed.tensor, placed.tensor._version - before)

    def _write(self, call: Callable[[], None]) -> None:
        """Call it where it may write to the model, and nobody takes that for the script's doing."""
        on, here = self._reads.on, threading.get_ident() == self._thread
        self._reads.on = on and not here
        try:
            try:
                self._word.zero_()
            except RuntimeError:  # inside of torch.func.grad nobody may write to tensors from outside; a thread may
                cuda = self._tensors.device.type == "cuda"
                stream = torch.cuda.current_stream(self._tensors.device) if cuda else None
                with ThreadPoolExecutor(1) as other:
                    other.submit(_on_stream, stream, call).result()
            else:
                call()
        finally:
            self._reads.on = on

    def _synchronize(self) -> None:
        """Wait for the swaps of a GPU: links write to the slots after this."""
        if self._tensors.device.type == "cuda":
            torch.cuda.current_stream(self._tensors.device).synchronize()


def _on_stream(stream: torch.cuda.Stream | None, call: Callable[[], None]) -> None:
    with torch.cuda.stream(stream):  # None: does nothing
        call()


def _read_unseen(parts: Parts) -> str:
    """What in this model reads parameters without a torch function that gets them; "" if nothing is known to."""
    for name, module in parts.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"module {name or type(module).__name__} is TorchScript, which reads its parameters unseen"
        if isinstance(module, torch.nn.DataParallel):
            return f"module {name or type(module).__name__} is a DataParallel, which copies its parameters unseen"
    for placed in parts.tensors.parameters:
        if type(placed.tensor) is not torch.nn.Parameter:
            return f"parameter {placed.entry.spec.name} is a {type(placed.tensor).__qualname__}"
    return ""


def _compiled() -> str:
    """Whether torch.compile has compiled anything in this process: "" if not."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)  # None: not, or not yet, imported
    # (With fullgraph=True no frames are counted)
    compiled = counters is not None and (counters["frames"]["total"] or counters["stats"]["unique_graphs"])
    return "torch.compile is used, and compiled code reads parameters unseen" if compiled else ""
