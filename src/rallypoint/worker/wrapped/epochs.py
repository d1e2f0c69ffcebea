"""The batches of a script's own loader, epoch after epoch, from the step at which the job is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol, TypeVar

from rallypoint.core.order import derive_seed
from rallypoint.data.randomness import seeded
from rallypoint.errors import UsageError
from rallypoint.worker.wrapped.run import OwnRun

_B = TypeVar("_B", covariant=True)


class Batches(Protocol[_B]):
    """A DataLoader, or anything else that gives the same number of batches each time it is iterated."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[_B]: ...


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
