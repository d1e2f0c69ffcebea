"""`Stream`: an iterable whose items have no positions, as data of a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rallypoint.config import JobConfig
from rallypoint.config.plain import step_by_step
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
        return {"order": "stream", "passes": self.passes or 0}

    def order(self, config: JobConfig) -> StreamOrder:
        """Return which items each replica reads. Raises DataError for settings that do not fit."""
        if config.order != "stream":
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
        self._seed, self._passes = config.seed, config.passes
        self._keep = STEPS_KEPT * order.stride
        self._lanes = 1 if step_by_step(config) else order.sharing
        self._batch = config.batch
        self._readers: dict[tuple[int, int], Reader] = {}
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
