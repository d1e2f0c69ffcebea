"""How a worker loads its micro-batches: `Loader`, and what `job.train` takes over of a DataLoader."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from rallypoint.data.dataset import MapDataset
from rallypoint.data.stream import Stream
from rallypoint.data.tokens import Lanes
from rallypoint.errors import DataError, UsageError

Data = MapDataset | DataLoader[Any] | Stream | Iterable[Any] | Callable[..., Iterable[Any]]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """How this worker loads its micro-batches: ``job.train(..., loader=rp.Loader(workers=4))``.

    It changes no byte of the result, unless samples are skipped: which samples a step takes, in which order and with
    which random numbers, follows from the step and the replica.

    Attributes:
        workers: processes that load samples ahead, and collate them; 0: the training thread does, while versions come.
        ahead: micro-batches that may wait, loaded, for the training loop. It begins with two for each process, and
            loads further ahead each time the loop had to wait, up to this.
        retries: how often a micro-batch of which a sample raises an error is loaded again.
        on_error: what happens if the sample still raises it: "stop" the job, or "skip" the sample: the batch has one
            fewer. Skipped samples are named in the run's output.
        pin_memory: copy batches to pinned memory, for a GPU.
        start: how processes are started: "fork", "forkserver" or "spawn", which need a data set that can be pickled;
            "": fork where there is one.
        init: called in each process with its number, before it loads anything.

    Raises UsageError for numbers that are too small.
    """

    workers: int = 0
    ahead: int = 64
    retries: int = 2
    on_error: Literal["stop", "skip"] = "stop"
    pin_memory: bool = False
    start: Literal["", "fork", "forkserver", "spawn"] = ""
    init: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("ahead", 1), ("retries", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"rp.Loader({name}={getattr(self, name)}): give {least} or more")
        if self.on_error not in ("stop", "skip"):
            raise UsageError(f'rp.Loader(on_error={self.on_error!r}): write "stop" or "skip"')


@dataclass(frozen=True, slots=True)
class GivenData:
    """What the script gives `job.train` as data."""

    dataset: Any  # the data set
    collate: Collate | None  # makes a batch of a list of samples; None: torch's ``default_collate``
    loader: Loader  # how it is loaded
    # The job's settings that follow from a DataLoader (`batch` and `order`), from rp.Lanes (`order`), or from a stream
    # (`order` and `passes`)
    settings: dict[str, Any]


def given(data: Any, collate: Collate | None = None, loader: Loader | None = None) -> GivenData:
    """Return the data set, and with a DataLoader what else it says.

    Its data set, collate_fn, batch size, order (shuffled or not), num_workers, pin_memory, worker_init_fn and
    multiprocessing context are taken over; `collate` and `loader` come before its own. Its generator and drop_last mean
    nothing here: the order follows from the job's seed, and epochs run into one another. An iterable, or a function
    that makes one, is an rp.Stream of one part. Raises DataError for one whose order or batches the job cannot compute.
    """
    if not isinstance(loader, Loader | None):
        raise UsageError(f"loader= is a {type(loader).__qualname__}: give rp.Loader(workers=4), or it as the data")
    if not isinstance(data, DataLoader):
        data = Stream(data) if _only_iterable(data) else data
        lanes = {"reading.order": "sequential"} if isinstance(data, Lanes) else {}
        return GivenData(data, collate, loader or Loader(), data.settings if isinstance(data, Stream) else lanes)
    if data.batch_size is None or not (type(data.batch_sampler) is BatchSampler or _torchdatas(data.batch_sampler)):
        raise DataError(
            "a DataLoader with a batch sampler of its own, or without batches, was given: which samples a step takes "
            "is computed from their positions. Give DataLoader(dataset, batch_size=...), or the data set itself"
        )
    if type(data).__iter__ is not DataLoader.__iter__ and not _torchdatas(data):
        raise DataError(
            f"a {type(data).__qualname__} was given, a DataLoader that does something of its own with its batches, "
            "which the job would not do: give a plain DataLoader, and do it in collate_fn= or in the loop"
        )
    own = data.collate_fn if data.collate_fn is not default_collate else None
    if isinstance(data.dataset, IterableDataset):
        stream, like = Stream(data.dataset), replace(_like(data), workers=min(data.num_workers, 1))  # each reads all
        return GivenData(stream, collate or own, loader or like, {"batch": data.batch_size, **stream.settings})
    dataset, order = ordered(data)
    return GivenData(dataset, collate or own, loader or _like(data), {"batch": data.batch_size, "reading.order": order})


def _only_iterable(data: Any) -> bool:
    """True for what has items and no positions, or makes that: a function that is a generator."""
    if isinstance(data, (IterableDataset, Iterator)) or inspect.isgeneratorfunction(data):
        return True
    kind = type(data)
    return hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__") and not isinstance(data, (Mapping, Stream))


def _torchdatas(thing: Any) -> bool:
    """True for torchdata's own: a StatefulDataLoader is a DataLoader with a state, which a job does not need."""
    return type(thing).__module__.startswith("torchdata.")


def ordered(loader: DataLoader[Any]) -> tuple[Any, str]:
    """The data set and the order of its samples. DataError for a sampler that has another one, also of a known kind."""
    sampler: Any = loader.sampler
    kind, length = type(sampler), len(loader.dataset)  # type: ignore[arg-type]
    if kind is SequentialSampler and len(sampler) == length:
        return loader.dataset, "sequential"
    if _is(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == length:
        return loader.dataset, "shuffled"
    if _is(sampler, DistributedSampler):
        return loader.dataset, "shuffled" if sampler.shuffle else "sequential"
    if _is(sampler, SubsetRandomSampler):
        return Subset(loader.dataset, [int(index) for index in sampler.indices]), "shuffled"
    raise DataError(
        f"a DataLoader with a {kind.__qualname__} was given: the job knows a data set's own order and a shuffled one. "
        "Give a data set that has the samples so often and in that order (torch.utils.data.Subset(dataset, indices)), "
        "with shuffle=False or True"
    )


def _is(sampler: Any, kind: type[Any]) -> bool:
    """True for a sampler of that kind that gives the indices as torch's does, or is torchdata's one of that name."""
    own = isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__
    return own or (_torchdatas(sampler) and type(sampler).__name__.endswith(kind.__name__))


def _like(loader: DataLoader[Any]) -> Loader:
    context = loader.multiprocessing_context
    start: Any = context if isinstance(context, str) else context.get_start_method() if context is not None else ""
    return Loader(workers=loader.num_workers, pin_memory=loader.pin_memory, init=loader.worker_init_fn, start=start)
