"""`Stream`: an iterable whose items have no positions, as data of a job."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rallypoint.config import JobConfig
from rallypoint.config.tree import step_by_step
from rallypoint.core.streams.order import StreamOrder
from rallypoint.data.streams.opening import PartIterator, asked_for
from rallypoint.data.streams.reader import Reader
from rallypoint.errors import DataError, UsageError

STEPS_KEPT = 3  # the step in progress, the one before it, and the one after, of which the end is looked for
_inherited: list[object] = []  # iterators of the process that this one was forked from, kept so that none is finalized


class Stream:
    """Items that come one after the other, without positions: ``rp.Stream(read_lines, parts=8)``.

    The items of a part are numbered as they come, and which numbers a replica reads follows from its step, as for any
    other data (I6). So the iterator must be *repeatable*: opened again, it gives the same items in the same order.
    Whoever computes a replica opens its part and skips what was read before.

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
        once: each item comes only once, to whoever asks first: a queue, a socket, a generator. Each worker opens the
            parts of its replicas once and uses what it gets; what it had read and not used is lost with it, and no item
            is used twice. Not the same bytes: see docs/data.md. Then `source` may also be an iterator.
        passes: the job ends with the last step for which each replica has a full batch, after so many passes over its
            part; None: begun again without end, and `steps` counts.
        transform: makes a sample of an item. It is not called for items that are skipped.

    Raises UsageError for what cannot be opened twice, and for numbers below 1.
    """

    def __init__(
        self, source: Callable[..., Iterable[Any]] | Iterable[Any], *, parts: int = 1, passes: int | None = None,
        transform: Callable[[Any], Any] | None = None, once: bool = False,
    ) -> None:  # fmt: skip
        for name, number in (("parts", parts), ("passes", passes)):
            if number is not None and number < 1:
                raise UsageError(f"rp.Stream({name}={number}): give 1 or more")
        if once and passes not in (None, 1):
            raise UsageError(f"rp.Stream(once=True, passes={passes}): it cannot be opened again; give 1 or None")
        if isinstance(source, Iterator) and not once:
            raise UsageError(
                f"rp.Stream got a {type(source).__qualname__}, which can be read only once, and whoever takes over a "
                "replica has to read it from its beginning: give the function that makes it, or once=True"
            )
        if not hasattr(source, "__iter__"):
            if not callable(source):
                raise UsageError(f"rp.Stream got a {type(source).__qualname__}: give an iterable, or a function")
            asked_for(source)
        self.source, self.parts, self.passes, self.transform, self.once = source, parts, passes, transform, once

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a job that reads it."""
        return {"order": self._order, "passes": self.passes or 0}

    @property
    def _order(self) -> str:
        return "once" if self.once else "stream"

    def order(self, config: JobConfig) -> StreamOrder:
        """Return which items each replica reads. Raises DataError for settings that do not fit."""
        if config.order != self._order:
            raise DataError(f'order="{config.order}" with a stream: it has its iterator\'s order; leave order= out')
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


class PartItems(abc.ABC):
    """Items of a stream by number, as a map-style data set without a length.

    Item i of part p has the number ``i * parts + p``.
    """

    _stream: Stream

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of these numbers, ascending and of one part, transformed."""
        numbers = [index // self._stream.parts for index in indices]
        items = self._taken(indices[0] % self._stream.parts, numbers)
        return items if self._stream.transform is None else [self._stream.transform(item) for item in items]

    @abc.abstractmethod
    def _taken(self, part: int, numbers: Sequence[int]) -> list[Any]:
        """Return these items of a part, as its iterator gives them."""


class StreamItems(PartItems):
    """The items of a stream that can be read again. For one thread of each process.

    It pickles without its open iterators, and a forked process opens its own: an inherited one shares its place in a
    file or a connection with its parent's.

    Replicas that share a part read it with one iterator where all are at one step; else each has its own, because one
    would begin anew whenever a replica is behind another.
    """

    def __init__(self, stream: Stream, order: StreamOrder, config: JobConfig) -> None:
        self._stream, self._order = stream, order
        self._seed, self._passes = config.seed, config.passes
        self._keep = STEPS_KEPT * order.stride
        self._lanes = 1 if step_by_step(config) else order.sharing
        self._batch = config.batch
        self._readers: dict[tuple[int, int], Reader] = {}
        self._process = os.getpid()

    def _taken(self, part: int, numbers: Sequence[int]) -> list[Any]:
        return self._reader(part, numbers[0]).take(numbers)

    def name_of(self, index: int) -> str:
        """Return what to call an item in a sentence."""
        item, part = divmod(index, self._stream.parts)
        return f"item {item} of the stream" if self._stream.parts == 1 else f"item {item} of part {part} of the stream"

    def continues(self, step: int, replica: int) -> bool:
        """True if there is a full batch for the replica at this step, which is read now."""
        part, first, stop = self._order.items(step, replica)
        return self._reader(part, first).has(stop - 1)

    def _reader(self, part: int, item: int) -> Reader:
        """The one that reads this item of the part."""
        if self._process != os.getpid():
            _inherited.append(self._readers)
            self._readers, self._process = {}, os.getpid()
        which = part, item // self._batch % self._lanes
        if which not in self._readers:
            self._readers[which] = Reader(
                self._stream.source, part, self._stream.parts, seed=self._seed, passes=self._passes, keep=self._keep
            )
        return self._readers[which]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}

