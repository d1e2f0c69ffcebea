"""What `rp.wrap` returns: an optimizer whose `step` is the job's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rallypoint.config.tree import rate_of
from rallypoint.core.order import derive_seed
from rallypoint.core.placing.pinned import lost_place, lost_step
from rallypoint.core.view import View
from rallypoint.data.randomness import seed_everything, seeded, untouched
from rallypoint.errors import ConfigError, StartAgain, UsageError
from rallypoint.observe.lenient import say
from rallypoint.worker.loop.guard import Parts
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.run import Run

# ---- Steps a learning-rate schedule up to where the job is, in a process that is started again ----


class Replay:
    """Remembers the rates with which `schedule` begins; `to` steps it from them.

    A torch schedule computes a rate from the one before, and the optimizer of a process that is started again already
    has the rate of the step in progress. Raises ConfigError for a schedule whose steps need a metric.
    """

    def __init__(self, schedule: LRScheduler) -> None:
        if isinstance(schedule, ReduceLROnPlateau):
            raise ConfigError(
                f"the schedule is a {type(schedule).__qualname__}, whose steps depend on metrics that a process that "
                "is started again has not seen: use a schedule by steps"
            )
        self._schedule = schedule
        groups = schedule.optimizer.param_groups
        self._groups = [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def to(self, steps: int) -> None:
        """Step the schedule so many times, from its start."""
        if steps == 0:
            return
        for group, first in zip(self._schedule.optimizer.param_groups, self._groups, strict=True):
            group.update(first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the optimizer has not stepped in this process
            for _ in range(steps):
                self._schedule.step()


# ---- The run of a script whose loop is its own: it is driven by `step`, and its gradients are in ``.grad`` ----

Figures = Mapping[str, float | torch.Tensor]


class OneSample:
    """The data set of a job whose batches are the script's: nothing reads what it holds."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return 0


class OwnRun(Run):
    """A run whose micro-batches are the steps of the script's own loop. Main thread only.

    This process computes one replica, from `begin` to its end. When a server is lost it sends its gradients again. When
    the job goes back to a snapshot, or has gone on without this process, its loop is at the wrong step: StartAgain. So
    it ends too when it is told to leave: its replica needs another process.

    Attributes:
        position: the step that the loop is to compute next: updates that the model holds.
        replica: which replica this process computes.
        seeded: the global random generators are seeded for each step; else they are the loop's alone.
        over: the job has ended.
        replaced: this process is at the wrong step, and ends.
        released: the run has let go of its model.
    """

    own = True
    seeded = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.position, self.replica, self.over, self.replaced = -1, -1, False, False
        self.released = False
        self._micros: Iterator[Micro] = iter(())
        self._micro: Micro | None = None
        parts.exchange.viewed = self._viewed

    def begin(self) -> bool:
        """Wait until this process has a replica, and the model its version. Returns False if the job is over."""
        self._micros = iter(self)
        with self._generators():
            if not self._advance():
                return False
        assert self._micro is not None
        self.position, self.replica = self._micro.step, self._micro.replica
        self._viewed(self._exchange.view)
        self._passes.watch(self._micro)
        self._seed()
        return True

    def push(self, loss: torch.Tensor | None, figures: Figures) -> None:
        """Send the gradients that are in ``.grad`` (None: zeros), and wait for the next version.

        `loss` (one element) is shown and logged; None: it is not known. Afterwards ``.grad`` is None.

        Raises StartAgain when the loop is not where the job is. Raises UsageError after the last step.
        """
        if self.over or self._micro is None:
            raise UsageError(f"the job has ended with step {self.position}: let the loop end there (optimizer.over)")
        gradients = [placed.tensor.grad for placed in self._parts.tensors.parameters]
        buffers = [placed.tensor.clone() for placed in self._parts.tensors.buffers]
        while True:
            with self._generators():
                with self._micro as micro:
                    micro.log(**figures)
                    micro.computed(loss)
                if not self._advance():
                    self.position = self._exchange.step
                    return
            if why := lost_step(self.position, self.replica, self._micro.step, self._micro.replica):
                raise self._start_again(why)
            if self._micro.step > self.position:
                self.position = self._micro.step
                self._seed()
                return
            with torch.no_grad():
                for placed, gradient in zip(self._parts.tensors.parameters, gradients, strict=True):
                    placed.tensor.grad = gradient
                for placed, value in zip(self._parts.tensors.buffers, buffers, strict=True):
                    placed.tensor.copy_(value)

    def leave(self) -> None:
        """End the job with the version that the model holds: the loop has ended, on all processes at this step."""
        if not self.over and self._micro is not None:
            self._micros.close()  # type: ignore[attr-defined]
            self.finish()
            self.over = True

    def give_up(self, reason: str) -> None:
        """The script ends before the job: nobody else can compute its replica."""
        end = self._exchange.end
        self._parts.coordinator.send(end.given_up(reason))
        end.wait_until_applied()

    def trains(self, model: torch.nn.Module) -> bool:
        """True if this run is not over, and a parameter of `model` is one of its own."""
        own = {id(placed.tensor) for placed in self._parts.tensors.parameters}
        return not self.released and any(id(parameter) in own for parameter in model.parameters())

    def release_model(self) -> None:
        self.released = True
        super().release_model()

    def _advance(self) -> bool:
        """Go on to the next micro-batch; False if the job is over."""
        self._micro = next(self._micros, None)
        self.over = self._micro is None
        return not self.over

    def _generators(self) -> AbstractContextManager[None]:
        """What a micro-batch does to the global generators, which it seeds, is none of the loop's without `seeded`."""
        return nullcontext() if self.seeded else untouched()

    def _seed(self) -> None:
        if self.seeded:
            seed_everything(self._parts.batches.compute_seed(self.position, self.replica, 0))

    def _viewed(self, view: View) -> None:
        if self.replica >= 0 and (why := lost_place(view, self._exchange.me, self.replica)):
            self._exchange.fail(self._start_again(why))

    def _end(self) -> None:
        if self._exchange.gone and not self.replaced:
            raise self._start_again("it was told to leave")
        super()._end()

    def _start_again(self, why: str) -> StartAgain:
        self.replaced = True
        say(StartAgain.LINE)
        sentence = f"{self._exchange.me} ends, to be started again: {why}, and its loop has batches of its own"
        self.say(sentence)
        return StartAgain(sentence)


# ---- The batches of a script's own loader, epoch after epoch, from the step at which the job is ----

_B_co = TypeVar("_B_co", covariant=True)
_B = TypeVar("_B")


class Batches(Protocol[_B_co]):
    """A DataLoader, or anything else that gives the same number of batches each time it is iterated."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[_B_co]: ...


def epochs_of(run: OwnRun, loader: Batches[_B]) -> Iterator[tuple[int, _B]]:
    """Yield (epoch, batch) until the job is over, from the batch of the step that is to be computed next.

    What an epoch draws at random when it begins (a shuffled order, the seeds of loading processes) follows from the
    job's seed, the epoch and the replica, so a process that is started again reads the same batches: it loads those
    before its step in that epoch too, and drops them. Raises UsageError like `WrappedOptimizer.epochs`.
    """
    if (length := len(loader)) < 1:
        raise UsageError("optimizer.epochs was given a loader without a batch: give it one with data")
    while not run.over:
        epoch, gone = divmod(run.position, length)
        batches, upcoming = _begun(run, loader, epoch, gone)
        for _ in range(gone, length):
            if not upcoming:
                raise UsageError(
                    f"the loader ended epoch {epoch} before its {length} batches: its len() must be what it gives, "
                    "else a process that is started again cannot know where it is"
                )
            step = run.position
            yield epoch, upcoming[0]
            if run.over:
                return
            if run.position != step + 1:
                raise UsageError(
                    f"optimizer.epochs gives one batch for each step, and the loop took one at step {step} and "
                    f"asked for the next one at step {run.position}: call optimizer.step() once for each batch"
                )
            upcoming = _next(batches) if step + 1 < (epoch + 1) * length else []


def _begun(run: OwnRun, loader: Batches[_B], epoch: int, gone: int) -> tuple[Iterator[_B], list[_B]]:
    """Begin an epoch and drop its first `gone` batches. Returns its other batches, and the first of them."""
    seed = derive_seed(run.config.seed, "epoch", epoch, run.replica)
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
    for owner in (loader, getattr(loader, "sampler", None)):
        generator: Any = getattr(owner, "generator", None)
        if callable(reseed := getattr(generator, "manual_seed", None)):
            reseed(seed)
    with seeded(seed):
        batches = iter(loader)
        upcoming = _next(batches)  # here, because a sampler draws its order when it is first asked
        for _ in range(gone - 1):
            upcoming = _next(batches)
    return batches, _next(batches) if gone else upcoming


def _next(batches: Iterator[_B]) -> list[_B]:
    """The next batch in a list; an empty one if there is none."""
    return list(islice(batches, 1))


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

    def __init__(
        self, run: OwnRun, inner: torch.optim.Optimizer, *, steps_here: bool, schedule: LRScheduler | None = None
    ) -> None:  # fmt: skip
        # (not the base class's: this one has no groups and no state of its own)
        self.inner, self.run, self._steps_here = inner, run, steps_here
        self._schedule, self._scheduled = schedule, getattr(schedule, "last_epoch", None)
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
        """The replica that this process computes, from 0; DDP's rank."""
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
        if not self._steps_here and [group.get("lr") for group in self.inner.param_groups] != self._rates:
            raise UsageError(
                "the script has set a learning rate, and servers step: give the schedule to the optimizer, "
                "rp.AdamW(lr=rp.cosine(3e-4, warmup=100)), or give rp.wrap a torch optimizer, which steps here"
            )
        if (schedule := self._schedule) is not None and self.run.position > self._begins_at:  # at the second step here
            self._schedule = None  # once
            if self._scheduled is not None and schedule.last_epoch == self._scheduled and self.run.replica == 0:
                self.run.say(
                    "warning: rp.wrap was given schedule=, and the loop does not step it, so the learning rate stays: "
                    f"call the {type(schedule).__qualname__}'s step() after each optimizer.step()"
                )
        loss, figures, self._loss, self._figures = self._loss, self._figures, None, {}
        self.run.push(None if loss is None else loss.detach().reshape(()), figures)
        if not self._steps_here:
            for group in self.inner.param_groups:
                group["lr"] = rate_of(self.run.config, self.run.position)
            self._rates = [group["lr"] for group in self.inner.param_groups]
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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.shape == other.shape and torch.equal(one.to(other.device), other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
