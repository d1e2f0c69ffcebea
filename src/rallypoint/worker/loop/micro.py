"""One micro-batch of one replica, as the user's loop gets it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import torch

from rallypoint.core.typed import unnamed
from rallypoint.errors import UsageError
from rallypoint.parallel.holdings import whole_of
from rallypoint.worker.carried import Carry
from rallypoint.worker.exchange.exchange import Rewound
from rallypoint.worker.ranks.figures import is_number


class Loop(Protocol):
    """What a micro-batch needs of the loop that yields it: `Run`, or `RankRun` on a rank that does not lead."""

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

    def log_micro(self, figures: Mapping[str, float | torch.Tensor]) -> None:
        """The script logs figures of one micro-batch."""

    def backward_at(self) -> str:
        """Return where the script has called backward() itself in this micro-batch, as ``train.py:31``; "": nowhere."""

    def carried_micro(self, micro: Micro) -> Carry:
        """Return what the micro-batch's replica carries."""

    def carry_micro(self, micro: Micro, state: Carry) -> None:
        """Set what the micro-batch's replica carries."""


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
        """Raise an error: the body ended without `backward`.

        If `backward` failed and the script caught that, name the reason.
        """
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
        beside the step's loss. Tensors are read when the replica is computed: nobody waits for a device before.

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
        self._run.log_micro({n: whole_of(v) if isinstance(v, torch.Tensor) else float(v) for n, v in figures.items()})

    @property
    def carry(self) -> Any:
        """The state that the replica carries from step to step, such as a recurrent model's hidden state.

        It is what the replica's micro-batch before this one has left, or (at the first step) what ``carry=`` of
        `job.train` gives: new tensors in the same form, which belong to no graph. Set it inside of ``with micro:`` to
        what this micro-batch leaves; its graph is cut off. What is not set stays as it was.

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
        """What `backward` multiplies the loss by: 1 except with fp16. (Reading it waits for a GPU.)"""
        return 1.0 if self._scale is None else float(self._scale[0])

    @property
    def _where(self) -> str:
        return f"step {self.step}, replica {self.replica}"
