"""Calls of a plain PyTorch loop that do nothing in a job's loop, or the wrong thing: each is an error at its line."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from rallypoint.errors import UsageError

_Call = Callable[..., Any]
_INPUTS = 4  # the place of `inputs` behind the tensors of torch.autograd.backward
_NOT_THE_SCRIPT = str(Path(__file__).parents[1]), str(Path(str(torch.__file__)).parent)


class InMicro(Protocol):
    """The micro-batch that the script is in."""

    step: int
    index: int
    losses: torch.Tensor | None


class Habits:
    """Watches what the script's thread calls, from the first ``with micro:`` to the end of the run.

    Torch's functions are replaced once in the process, while any run watches, and put back by the last that `leave`s.
    Other threads, and what the job itself does (`by_the_job`), are let through.

    Attributes:
        backward_at: where the script has back-propagated to the job's parameters itself in this micro-batch, before
            `micro.backward`; "": nowhere. That is an error if it leaves gradients.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._known = {id(parameter) for parameter in parameters}
        self._thread = 0  # the script's; 0: it is not watched
        self._micro: InMicro | None = None
        self.backward_at, self._ours = "", False

    def enter(self, micro: InMicro) -> None:
        self._micro, self.backward_at = micro, ""
        if not self._thread:
            self._thread = threading.get_ident()
            with _changing:
                _watched[self._thread] = self
                if not _restore:
                    _replace()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """In the body nothing is the script's own call. See `by_the_job`."""
        before, self._ours = self._ours, True
        try:
            yield
        finally:
            self._ours = before

    def exit(self) -> None:
        """The script leaves ``with micro:``. An evaluation may back-propagate, with a scaler of its own."""
        self._micro = None

    def leave(self) -> None:
        if self._thread:
            with _changing:
                if _watched.get(self._thread) is self:
                    del _watched[self._thread]
                while not _watched and _restore:
                    _restore.pop()()
            self._thread = 0

    def clips(self, name: str, parameters: list[torch.Tensor], *, measures: bool) -> None:
        """The script calls ``clip_grad_norm_`` or ``clip_grad_value_``; `measures`: with a limit of infinity."""
        if not self._ours and any(id(parameter) in self._known for parameter in parameters):
            raise UsageError(
                f"{script_line()}: {name} finds no gradients of the job's parameters: they have left when "
                "micro.backward returns, and are clipped where they are added up. Give job.train clip=1.0 (a norm), "
                "and take the call out (events.jsonl has each step's norm)"
            )

    def scales(self, scaler: torch.amp.GradScaler, outputs: Any) -> None:
        """The script calls ``GradScaler.scale``. A scaler of another model, whose losses stay there, is let through."""
        if self._ours or self._micro is None or not scaler.is_enabled():
            return
        if reached(_tensors_in(outputs), self._known):
            raise UsageError(
                f"{script_line()}: a GradScaler scales the loss, and nobody would unscale the gradients: the servers "
                'step. Take it out, and give job.train precision="fp16" (the servers have the scale) or "bf16", which '
                "needs none"
            )

    def back_propagates(self, losses: Any, inputs: Any) -> None:
        """The script calls ``backward`` itself. `inputs`: the only tensors that get gradients; None: all do."""
        micro = self._micro
        if self._ours or micro is None:
            return
        if inputs is None and not reached(_tensors_in(losses), self._known):
            return
        if inputs is not None and not any(id(one) in self._known for one in _tensors_in(inputs)):
            return
        self.backward_at = script_line()
        if micro.index > 0 or micro.losses is not None:
            raise UsageError(
                f"{self.backward_at}: backward() is called by the script, beside micro.backward at step {micro.step}: "
                "give micro.backward the sum of all losses, or each of them, all but the last with more=True; "
                "torch.autograd.grad leaves no gradient behind"
            )


class WrappedHabits(Habits):
    """The same in a loop of the script's own (`rp.wrap`), which back-propagates itself: from its begin to the end."""

    def clips(self, name: str, parameters: list[torch.Tensor], *, measures: bool) -> None:
        """The same. With a limit of infinity it only measures, which bridges and loggers do."""
        if not (self._ours or measures) and any(id(parameter) in self._known for parameter in parameters):
            raise UsageError(
                f"{script_line()}: {name} clips the gradient of this process alone, before the mean of all is taken: "
                "give rp.wrap clip=1.0 (a norm), and take the call out (torch.nn.utils.get_total_norm only measures)"
            )

    def scales(self, scaler: torch.amp.GradScaler, outputs: Any) -> None:
        """The script calls ``GradScaler.scale``."""
        if not self._ours and scaler.is_enabled() and reached(_tensors_in(outputs), self._known):
            raise UsageError(
                f"{script_line()}: a GradScaler scales the loss, and optimizer.step() of rp.wrap would push the scaled "
                "gradients: take it out, and use torch.autocast with bf16, which needs none"
            )

    def back_propagates(self, losses: Any, inputs: Any) -> None:
        """That is what such a loop does."""


@contextmanager
def by_the_job() -> Iterator[None]:
    """In the body the job back-propagates or steps on this thread: an optimizer of the script's own may clip."""
    habits = _here()
    with nullcontext() if habits is None else habits.ours():
        yield


def script_line() -> str:
    """Return where the script is, as ``train.py:31``: the newest call that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def reached(losses: Iterable[torch.Tensor], known: Container[int]) -> int | None:
    """Of the tensors whose ids are `known`: the id of one to which gradients of these losses go; None: to none."""
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in known:
            return id(node.variable)
        waiting += [function for function, _ in node.next_functions]
    return None


def _tensors_in(given: Any) -> list[torch.Tensor]:
    """The tensors of an argument that may be one, or hold several. (An iterator could be read only once.)"""
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, Mapping):
        given = list(given.values())
    if not isinstance(given, Iterable) or isinstance(given, Iterator):
        return []
    return [tensor for one in given for tensor in _tensors_in(one)]


# ---- torch's functions: replaced while any run of this process watches ----

_changing = threading.Lock()
_watched: dict[int, Habits] = {}  # by the script's thread
_restore: list[Callable[[], None]] = []


def _here() -> Habits | None:
    return _watched.get(threading.get_ident())


def _replace() -> None:
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        _replace_wrapped(clip)
    scale = torch.amp.GradScaler.scale
    backward = torch.autograd.backward

    def scaled(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if (habits := _here()) is not None:
            habits.scales(self, outputs)
        return scale(self, outputs)

    def back_propagated(tensors: Any, *args: Any, **named: Any) -> None:
        if (habits := _here()) is not None:
            habits.back_propagates(tensors, named.get("inputs", args[_INPUTS] if len(args) > _INPUTS else None))
        backward(tensors, *args, **named)

    _set(torch.amp.GradScaler, "scale", scaled)
    _set(torch.autograd, "backward", back_propagated)  # Tensor.backward calls it by this name


def _set(owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    setattr(owner, name, value)
    _restore.append(lambda: setattr(owner, name, before))


def _replace_wrapped(clip: _Call) -> None:
    """Replace what torch's wrapper `clip` calls: a script may have imported the wrapper itself by name."""
    inner = getattr(clip, "__wrapped__", None)
    cell = next((cell for cell in clip.__closure__ or () if cell.cell_contents is inner), None)
    if inner is None or cell is None:
        return

    def clipped(parameters: Any, *args: Any, **named: Any) -> Any:
        if (habits := _here()) is not None:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            limit = args[0] if args else named.get("max_norm", 0.0)
            habits.clips(clip.__name__, parameters, measures=limit == math.inf)
        return inner(parameters, *args, **named)

    cell.cell_contents = clipped
    _restore.append(lambda: setattr(cell, "cell_contents", inner))
