"""How large the files of a part are: small ones for a slow store, so that its progress is told in time.

Whether a snapshot gets on is judged by its files. Bytes go fast into a store's cache, or into memory for a remote one:
only a file that is durable tells how fast the store is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_BYTES = 8 << 20  # of the first file, when nothing is known of the store
FILE_S = 5.0  # a file should be durable after so many seconds


class Pace:
    """Measures how long files take. It bounds their size, for the next ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bytes, self._began = float(FIRST_BYTES), clock()

    def is_full(self, size: int) -> bool:
        """True if the file that is being written, of `size` bytes until now, should end here."""
        return size >= self._bytes or self._clock() - self._began >= FILE_S

    @contextmanager
    def measured(self) -> Iterator[Callable[[int], None]]:
        """Measure the writing of one file until it is durable. Yields a function that takes its size in bytes."""
        sizes: list[int] = []
        self._began = self._clock()
        yield sizes.append
        took = max(self._clock() - self._began, 1e-9)
        right = sum(sizes) / took * FILE_S
        # Of a small file that was fast enough most of the time may be the store's latency
        self._bytes = right if took > FILE_S else max(self._bytes, right)
