"""`Stream`: an iterable whose items have no positions, as data of a job."""

from __future__ import annotations

import copy
import inspect
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as of_torch

from rallypoint.config import JobConfig
from rallypoint.config.tree import step_by_step
from rallypoint.core.order import StreamOrder, derive_seed
from rallypoint.data.dataset import NotASample
from rallypoint.data.randomness import seed_everything, untouched
from rallypoint.errors import DataError, UsageError

STEPS_KEPT = 3  # the step in progress, the one before it, and the one after, of which the end is looked for
_inherited: list[object] = []  # iterators of the process that this one was forked from, kept so that none is finalized


class Stream:
    """Items that come one after the other, without positions: ``rp.Stream(read_lines, parts=8)``.

    The items of a part are numbered as they come, and which numbers a replica reads follows from its step, as for any
    other data (I6). So the iterator must be *repeatable*: opened again, it gives the same items in the same order.
    A worker that takes a replica over opens its part and skips the items read before.

    Example::

        def lines(part, epoch):
            for path in shuffled(files[part::8], seed=epoch):
                yield from open(path)

        run = job.train(model, rp.Stream(lines, parts=8, transform=tokenize, passes=3), replicas=8, ...)

    Arguments:
        source: a function that returns an iterable, called with those of `part`, `parts` and `epoch` (the pass) that
            it takes; or an iterable, such as a ``torch.utils.data.IterableDataset``. In its iterator
            ``torch.utils.data.get_worker_info()`` says "worker `part` of `parts`"; a streaming data set of Hugging
            Face's is split by its own `shard`.
        parts: how many streams are read side by side: a divisor or a multiple of `replicas`. A worker reads the parts
            of its own replicas.
        passes: the job ends with the last step for which each replica has a full batch, after so many passes over its
            part; None: begun again without end, and `steps` counts.
        transform: makes a sample of an item. It is not called for items that are skipped.

    Raises UsageError for what cannot be opened twice, and for numbers below 1.
    """

    def __init__(
        self, source: Callable[..., Iterable[Any]] | Iterable[Any], *, parts: int = 1, passes: int | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        for name, number in (("parts", parts), ("passes", passes)):
            if number is not None and number < 1:
                raise UsageError(f"rp.Stream({name}={number}): give 1 or more")
        if isinstance(source, Iterator):
            raise UsageError(
                f"rp.Stream got a {type(source).__qualname__}, which can be read only once, and whoever takes over a "
                "replica has to read it from its beginning: give the function that makes it"
            )
        if not hasattr(source, "__iter__"):
            if not callable(source):
                raise UsageError(f"rp.Stream got a {type(source).__qualname__}: give an iterable, or a function")
            asked_for(source)
        self.source, self.parts, self.passes, self.transform = source, parts, passes, transform

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a job that reads it."""
        return {"reading.order": "stream", "reading.passes": self.passes or 0}

    def order(self, config: JobConfig) -> StreamOrder:
        """Return which items each replica reads. Raises DataError for settings that do not fit."""
        if config.reading.order != "stream":
            raise DataError(
                f'reading.order="{config.reading.order}" with a stream: it has its iterator\'s order; leave it out'
            )
        try:
            return StreamOrder(self.parts, replicas=config.replicas, batch=config.batch)
        except ValueError:
            raise DataError(
                f"rp.Stream has {self.parts} parts, and the job {config.replicas} replicas: give a divisor or a "
                f"multiple of {config.replicas} as parts"
            ) from None

    def first(self, count: int) -> list[Any]:
        """Return the first items of part 0 (fewer, if it has fewer), as they are before `transform`."""
        with PartIterator(self.source, 0, self.parts, epoch=0, seed=0).running() as iterator:
            return [item for _, item in zip(range(count), iterator, strict=False)]


class StreamItems:
    """The items of a stream by number, as a map-style data set without a length. For one thread of each process.

    Item i of part p has the number ``i * parts + p``.

    It pickles without its open iterators, and a forked process opens its own: an inherited one shares its place in a
    file or a connection with its parent's.

    Replicas that share a part read it with one iterator where all are at one step; else each has its own, because one
    would begin anew whenever a replica is behind another.
    """

    def __init__(self, stream: Stream, order: StreamOrder, config: JobConfig) -> None:
        self._stream, self._order = stream, order
        self._seed, self._passes = config.seed, config.reading.passes
        self._keep = STEPS_KEPT * order.stride
        self._lanes = 1 if step_by_step(config) else order.sharing
        self._batch = config.batch
        self._readers: dict[tuple[int, int], StreamReader] = {}
        self._process = os.getpid()

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of these numbers, ascending and of one part, transformed."""
        numbers = [index // self._stream.parts for index in indices]
        items = self._reader(indices[0] % self._stream.parts, numbers[0]).take(numbers)
        return items if self._stream.transform is None else [self._stream.transform(item) for item in items]

    def name_of(self, index: int) -> str:
        """Return what to call an item in a sentence."""
        item, part = divmod(index, self._stream.parts)
        return f"item {item} of the stream" if self._stream.parts == 1 else f"item {item} of part {part} of the stream"

    def continues(self, step: int, replica: int) -> bool:
        """True if there is a full batch for the replica at this step, which is read now."""
        part, first, stop = self._order.items(step, replica)
        return self._reader(part, first).has(stop - 1)

    def _reader(self, part: int, item: int) -> StreamReader:
        """The one that reads this item of the part."""
        if self._process != os.getpid():
            _inherited.append(self._readers)
            self._readers, self._process = {}, os.getpid()
        which = part, item // self._batch % self._lanes
        if which not in self._readers:
            self._readers[which] = StreamReader(
                self._stream.source, part, self._stream.parts, seed=self._seed, passes=self._passes, keep=self._keep
            )
        return self._readers[which]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}


class EndOfStream(NotASample):
    """A part has no item of that number."""


class _Raised:
    """Stands for an item whose iterator raised an error."""


class StreamReader:
    """The items of one part, numbered from 0, pass after pass (`passes`; 0: without end).

    The newest `keep` items are kept. To give an older one it begins anew and skips, and so it does after an error of
    the iterator. Skipping costs what reading costs.
    """

    def __init__(self, source: Any, part: int, parts: int, *, seed: int, passes: int, keep: int) -> None:
        self._source, self._part, self._parts = source, part, parts
        self._seed, self._passes = seed, passes
        self._kept: deque[Any] = deque(maxlen=keep)
        self._begin()

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return the items of these ascending numbers.

        Raises EndOfStream if the part has ended before the last, what the iterator raises for one of them, and
        NotASample if it gives nothing after an error at an item before them.
        """
        first, last = numbers[0], numbers[-1]
        gone = first < self._first or any(self._item(n) is _Raised for n in numbers if n < self._next)
        if gone or (self._iterator is None and last >= self._next):
            self._begin()
        self._read_to(last + 1, set(numbers))
        return [_own(self._item(number)) for number in numbers]

    def has(self, number: int) -> bool:
        """True if the part has an item of this number, which is read now and kept. Errors show when it is taken."""
        try:
            self._read_to(number + 1, set())
        except EndOfStream:
            return False
        except Exception:  # of an item, or of opening the next pass: `take` meets it again, where it is tried again
            return True
        return True

    @property
    def _first(self) -> int:
        return self._next - len(self._kept)

    def _item(self, number: int) -> Any:
        return self._kept[number - self._first]

    def _begin(self) -> None:
        self._kept.clear()
        self._next = self._begun = self._epoch = 0
        self._raised, self._ended = False, False
        self._open()

    def _open(self) -> None:
        self._iterator: PartIterator | None = PartIterator(
            self._source, self._part, self._parts, epoch=self._epoch, seed=self._seed
        )

    def _read_to(self, stop: int, wanted: set[int]) -> None:
        """Read on to item `stop` - 1. An error is raised for an item that is wanted; others are passed over."""
        while self._next < stop:
            if self._ended:
                raise EndOfStream(f"part {self._part} of the stream has ended after {self._next} items")
            if self._iterator is None:
                raise NotASample("the iterator has raised an error")
            with self._iterator.running() as iterator:
                self._read(iterator, stop, wanted)

    def _read(self, iterator: Any, stop: int, wanted: set[int]) -> None:
        """Read to `stop` or to the end of the pass."""
        while self._next < stop:
            try:
                item = next(iterator)
            except StopIteration:
                self._end_pass()
                return
            except Exception:
                if self._next in wanted:
                    self._iterator = None  # a generator gives nothing after its error: the next try begins anew
                    raise
                item = _Raised
            self._raised = item is _Raised
            self._kept.append(item)
            self._next += 1

    def _end_pass(self) -> None:
        if self._raised:  # the end of the items, or a generator that its error has ended: nobody can tell
            self._iterator = None
            raise NotASample(
                f"part {self._part} of the stream gives nothing after the error at its item {self._next - 1}: do what "
                "may fail in transform= of rp.Stream, which gets one item"
            )
        if self._next == self._begun:
            self._ended = True
            raise NotASample(f"part {self._part} of the stream has no items in pass {self._epoch}")
        self._epoch, self._begun = self._epoch + 1, self._next
        if self._epoch == self._passes:
            self._ended = True
        else:
            self._open()


def _own(item: Any) -> Any:
    """Return the item, or a copy of the outermost dict or list: transforms take entries out, and it is given again."""
    return copy.copy(item) if isinstance(item, (dict, list)) else item


TOLD = ("part", "parts", "epoch")  # what a function may ask for, by the names of its parameters


class PartIterator:
    """One pass over one part.

    Its items are what they would be if nothing else ran in the process: it draws from random generators of its own,
    seeded by (job's seed, part, pass), and ``torch.utils.data.get_worker_info()`` says "worker `part` of `parts`", or
    nothing with one part. Items are read in the body of ``with iterator.running():``.
    """

    def __init__(self, source: Any, part: int, parts: int, *, epoch: int, seed: int) -> None:
        self._source, self._part, self._parts, self._epoch = source, part, parts, epoch
        self._seed = derive_seed(seed, "stream", part, epoch)
        self._states: tuple[Any, Any, torch.Tensor] | None = None
        self._iterator: Iterator[Any] | None = None

    @contextmanager
    def running(self) -> Iterator[Iterator[Any]]:
        """In the body the iterator, which it opens the first time, may be asked for items."""
        before = of_torch._worker_info
        with untouched():
            if self._states is None:
                seed_everything(self._seed)
            else:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
                torch.set_rng_state(self._states[2])
            of_torch._worker_info = self._worker_info()
            try:
                if self._iterator is None:
                    self._iterator = self._open()
                yield self._iterator
            finally:
                of_torch._worker_info = before
                if self._iterator is not None:
                    self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def _open(self) -> Iterator[Any]:
        if not hasattr(self._source, "__iter__"):
            told = {"part": self._part, "parts": self._parts, "epoch": self._epoch}
            return iter(self._source(**{name: told[name] for name in asked_for(self._source)}))
        source = self._source
        if _shards_itself(source, self._parts):
            source = source.shard(num_shards=self._parts, index=self._part)
        else:
            source = copy.copy(source)  # `__iter__` may keep its place on it, and the script may iterate it too
        if callable(set_epoch := getattr(source, "set_epoch", None)):
            set_epoch(self._epoch)
        return iter(source)

    def _worker_info(self) -> Any:
        if self._parts == 1 or _shards_itself(self._source, self._parts):
            return None
        return of_torch.WorkerInfo(id=self._part, num_workers=self._parts, seed=self._seed, dataset=self._source)


def asked_for(function: Any) -> tuple[str, ...]:
    """Return which of `TOLD` a function takes. Raises UsageError if it needs anything else."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a class or a function of C's
        return ()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if strange := [name for name in needed if name not in TOLD]:
        raise UsageError(
            f"rp.Stream got a function that needs {', '.join(strange)}: it is called with those of part, parts and "
            "epoch that it has; bind the others with functools.partial"
        )
    return tuple(p.name for p in parameters if p.name in TOLD and p.kind is not p.POSITIONAL_ONLY)


def _shards_itself(source: Any, parts: int) -> bool:
    """True for a streaming data set of Hugging Face's, which has parts of its own."""
    return parts > 1 and callable(getattr(source, "shard", None)) and hasattr(source, "num_shards")
