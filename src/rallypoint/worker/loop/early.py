"""Forward passes that begin before all of their version is here: each module waits for its own parameters only.

What stands for "its own": a parameter that is not installed yet is *late* (`late.py`). It is waited for when a module
that has it runs, or when any torch function gets it as an argument, whichever comes first. So modules that share a
parameter, that run in another order than before or not at all, or that read another module's parameter, are right.

What Python does not see is not seen here: compiled code, TorchScript, tensors that share a parameter's memory. Where
there is any of it, workers wait for all of a version before each forward pass, and say so once. It is looked for before
each step that does not begin early. Nor are parameters seen that a transform of torch.func gets as arguments, unless a
module runs in it: then all are waited for there. If a loss depends on a parameter that nobody has read, the forward
pass is given up, and later ones wait.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from rallypoint.worker.exchange.exchange import Rewound
from rallypoint.worker.loop.guard import ModelGuard, NoGuard
from rallypoint.worker.loop.late import late_kind
from rallypoint.worker.loop.parts import Parts
from rallypoint.worker.loop.versions import Versions

_PIECE = 1 << 16  # words that are swapped at once: they stay in a core's cache


class EarlyForward:
    """Installs a version while the forward pass that reads it runs.

    Main thread only, but for `enter`, and for what reads late parameters: a model may run its modules in threads.

    Calls: `start` for each replica; then, if it returned True, `begin` before the script gets its first micro-batch,
    `enter` before each module, `finish` before the backward pass. Or, at any point, `undo`.

    Attributes:
        inside: the script is inside of ``with micro:``, so a stale forward pass can be unwound.
    """

    def __init__(self, parts: Parts, guard: ModelGuard | NoGuard, versions: Versions) -> None:
        self.inside = False
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
        self._scratch = torch.empty(min(_PIECE, layout.words), dtype=torch.float32, device=parts.tensors.device)
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
            self._why_not = self._why_not or _read_unseen(self._parts)
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
        if unread and (found := _in_graph(loss, unread)) is not None:
            name = unread[found].entry.spec.name
            self._why_not = f"parameter {name} is read by something that gets a copy of it, such as torch.func"
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
        """Swap slots and parameters."""
        buffer = self._parts.exchange.buffer
        # Inside of a transform of torch.func, nobody may write to a tensor that is not the transform's own
        with torch._C.DisableTorchFunctionSubclass(), temporarily_clear_interpreter_stack():
            for shard in shards:
                for placed, start, stop in self._parts_in[shard]:
                    before = placed.tensor._version
                    placed.swap(start, buffer[start:stop], self._scratch)
                    self._guard.wrote(placed.tensor, placed.tensor._version - before)

    def _synchronize(self) -> None:
        """Wait for the swaps of a GPU: links write to the slots after this."""
        if self._tensors.device.type == "cuda":
            torch.cuda.current_stream(self._tensors.device).synchronize()


def _read_unseen(parts: Parts) -> str:
    """What in this model reads parameters without a torch function that gets them; "" if nothing is known to."""
    for name, module in parts.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"module {name or type(module).__name__} is TorchScript, which reads its parameters unseen"
    alone = _users(torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu")))
    for placed in parts.tensors.parameters:
        name, tensor = placed.entry.spec.name, placed.tensor
        if type(tensor) is not torch.nn.Parameter:
            return f"parameter {name} is a {type(tensor).__qualname__}"
        if _users(tensor) > alone:
            return f"parameter {name} shares its memory with another tensor"
    return ""


def _in_graph(loss: torch.Tensor, wanted: Container[int]) -> int | None:
    """The id of one of these leaves on which `loss` depends; None if it depends on none."""
    seen: set[Any] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return id(node.variable)
        left += [before for before, _ in node.next_functions]
    return None


def _users(tensor: torch.Tensor) -> int:
    """How many tensors use this one's memory, and those who count them."""
    users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return users


def _compiled() -> str:
    """Whether torch.compile has compiled anything in this process: "" if not."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)  # None: not, or not yet, imported
    compiled = counters is not None and counters["frames"]["total"]
    return "torch.compile is used, and compiled code reads parameters unseen" if compiled else ""
