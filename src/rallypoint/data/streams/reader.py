"""Reads one part of a stream: items by their number, forward, the newest ones once more."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

from rallypoint.data.dataset import NotASample
from rallypoint.data.streams.opening import PartIterator


class EndOfStream(NotASample):
    """A part has no item of that number."""


class _Raised:
    """Stands for an item whose iterator raised an error."""


class Reader:
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
