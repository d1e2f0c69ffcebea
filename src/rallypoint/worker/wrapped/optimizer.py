"""What `rp.wrap` returns: an optimizer whose `step` is the job's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from rallypoint.config.tree import rate_of
from rallypoint.errors import UsageError
from rallypoint.worker.wrapped.epochs import Batches, epochs_of
from rallypoint.worker.wrapped.run import OwnRun

_B = TypeVar("_B")
NOT_ASKED = (
    "this process begins at step {} of the job, and its loop has not asked where: it would train on its first batches "
    "again (nothing of it was sent). Begin the loop there: `for epoch, batch in optimizer.epochs(loader):` in place of "
    "the two loops over epochs and batches, or `for step in range(optimizer.position, steps):` where a batch follows "
    "from its step"
)


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` pushes this process's gradients, and waits until the model has the new parameters.

    Everything else is `inner`'s: groups, state, `zero_grad`. Where servers step, `inner` only shows the parameters, and
    the rate is the job's.

    Attributes:
        inner: the script's own optimizer; its `step` is called with the mean gradient of all replicas.
        run: the run, for `say` and `folder`.
    """

    def __init__(self, run: OwnRun, inner: torch.optim.Optimizer, *, steps_here: bool) -> None:
        # (not the base class's: this one has no groups and no state of its own)
        self.inner, self.run, self._steps_here = inner, run, steps_here
        self._loss: torch.Tensor | None = None
        self._figures: dict[str, float | torch.Tensor] = {}
        self._rates = [group.get("lr") for group in inner.param_groups]
        self._begins_at = run.position
        self._is_asked = run.position == 0  # has the loop asked where it is to begin?

    # ---- where the job is ----

    @property
    def position(self) -> int:
        """The step that the loop is to compute next: 0 at the start, more in a process that is started again, and in a
        job that is resumed. Begin the loop there, or let it be `epochs`."""
        self._is_asked = True
        return self.run.position

    def epochs(self, loader: Batches[_B]) -> Iterator[tuple[int, _B]]:
        """The (epoch, batch) pairs of the job's steps, from `position` on, until the job is over: the loop takes one
        for each `step`.

            for epoch, batch in optimizer.epochs(loader):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        `loader` is a DataLoader, or anything with a length that gives as many batches each time it is iterated; each
        process has its own part of the data (a DistributedSampler; its `set_epoch` is called). A process that is
        started again goes on in mid-epoch: it loads what it drops of that epoch. A shuffled order follows from the
        job's seed and the epoch, and so does a `generator` of the loader or its sampler.

        Raises UsageError for a loader without a batch, for one that gives fewer than its length, and when the loop
        asks for a batch without a `step` in between.
        """
        self._is_asked = True
        return epochs_of(self.run, loader)

    @property
    def replica(self) -> int:
        """Which replica this process computes, from 0: what DDP calls the rank."""
        return self.run.replica

    @property
    def replicas(self) -> int:
        """R, the number of replicas: what DDP calls the world's size."""
        return self.run.config.replicas

    @property
    def over(self) -> bool:
        """True if the job has ended: after its last step, or because another process has called `finish`."""
        return self.run.over

    @property
    def folder(self) -> Path:
        """The run's folder, where results belong."""
        return self.run.folder

    # ---- training ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, and wait for the next version of the model. Returns what `closure` returns.

        Afterwards ``.grad`` is None. Raises UsageError after the last step, and in a process that begins at a later
        step than 0 if nothing has read `position`: its loop would train on its first batches again. Ends the process
        (StartAgain) where its loop is not at the job's step.
        """
        if not self._is_asked:
            raise UsageError(NOT_ASKED.format(self._begins_at))
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            if self._loss is None and isinstance(result, torch.Tensor) and result.numel() == 1:
                self._loss = result
        self._check_rates()
        loss, figures, self._loss, self._figures = self._loss, self._figures, None, {}
        self.run.push(None if loss is None else loss.detach().reshape(()), figures)
        if not self._steps_here:
            self._show_rate()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch's profiling hooks are for the inner one's step

    def log(self, loss: float | torch.Tensor | None = None, **figures: float | torch.Tensor) -> None:
        """Show and log the loss, and other figures, of the step in progress: numbers, or tensors of one element."""
        if loss is not None:
            self._loss = (
                loss if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64, device="cpu")
            )
        self._figures |= figures

    def finish(self) -> None:
        """End the job with the model's version. Call it on all processes after the same step, where that is not the
        last one; it returns when all have. After the last step it does nothing."""
        self.run.leave()

    # ---- what the script's own optimizer does ----

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing if that is the state here, as after ``load_state_dict(state_dict())``. Else raises UsageError:
        the job has the state."""
        if _same(state_dict, self.inner.state_dict()):
            return
        raise UsageError(
            "optimizer.load_state_dict after rp.wrap would change this process only: load before, or let the job go "
            "on from its snapshots (rallypoint resume)"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: the job has its parameters."""
        raise UsageError("add_param_group after rp.wrap: add it before, the job trains what it began with")

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.inner.__getstate__()

    def __repr__(self) -> str:
        return f"rallypoint.wrap({self.inner!r})"

    def _show_rate(self) -> None:
        for group in self.inner.param_groups:
            group["lr"] = rate_of(self.run.config, self.run.position)
        self._rates = [group["lr"] for group in self.inner.param_groups]

    def _check_rates(self) -> None:
        if not self._steps_here and [group.get("lr") for group in self.inner.param_groups] != self._rates:
            raise UsageError(
                "the script has set a learning rate, and servers step: give the schedule to the optimizer, "
                "rp.AdamW(lr=rp.cosine(3e-4, warmup=100)), or give rp.wrap a torch optimizer, which steps here"
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.shape == other.shape and torch.equal(one.to(other.device), other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
