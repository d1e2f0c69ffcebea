"""The samples of many positions at once: `core/order.py` with NumPy, for loaders of 10^5 samples a second."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rallypoint.core.order import Permutation, SampleOrder, Windows

Array = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

AT_ONCE = 4096  # positions: arrays shorter than about a thousand cost NumPy's overhead and little else
REPLICAS = 64  # of which the samples computed ahead are kept
EPOCHS = 2  # whose sequences of shards are kept: where one ends, replicas are in two
FEW = 48  # positions: so few are permuted one by one
TABLED_BITS = 12  # of half a position, in data sets of up to 16 million samples: a round is then a look into a table


class OrderAhead:
    """The same samples as `SampleOrder`, for several steps of a replica at once.

    It keeps what it has computed ahead: a replica's next step costs a look in a dictionary.
    """

    def __init__(self, order: SampleOrder, batch: int) -> None:
        self._order, self._batch = order, batch
        self._of_windows = SamplesOfWindows(order) if order.shards else None
        self._steps = max(1, AT_ONCE // batch)
        self._windows: dict[int, tuple[int, list[int]]] = {}  # replica -> number of its window, samples

    def samples(self, step: int, replica: int) -> list[int]:
        """The `batch` sample indices of replica `replica` at step `step`, in order."""
        number, offset = divmod(step, self._steps)
        window = self._windows.get(replica)
        if window is None or window[0] != number:
            if window is None and len(self._windows) >= REPLICAS:
                self._windows.clear()
            steps = range(number * self._steps, (number + 1) * self._steps)
            positions = np.concatenate([_numbers(self._order.positions(step, replica)) for step in steps])
            samples = samples_at(self._order, positions) if self._of_windows is None else self._of_windows.at(positions)
            window = self._windows[replica] = number, samples
        return window[1][offset * self._batch : (offset + 1) * self._batch]


def _numbers(positions: range) -> Array:
    return np.arange(positions.start, positions.stop, dtype=np.uint64)


class SamplesOfWindows:
    """The samples of a data set of shards, in the order of `Windows`. It keeps what it has computed of an epoch."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order
        self._lengths: Numbers = np.asarray(order.shards, np.int64)
        self._first: Numbers = np.concatenate([[0], np.cumsum(self._lengths)[:-1]])
        self._epochs: dict[int, tuple[Windows, Numbers, Numbers]] = {}

    def at(self, positions: Array) -> list[int]:
        """Return the sample indices at these positions of the job, all of them of one replica and ascending."""
        order, replica = self._order, self._order.replica_at(int(positions[0]))[0]
        read = np.array([order.replica_at(position)[1] for position in positions.tolist()], np.int64)
        epochs = (positions // np.uint64(order.length)).astype(np.int64)
        samples = np.empty_like(read)
        begin = 0
        while begin < len(positions):  # one segment after another
            epoch = int(epochs[begin])
            windows, shards, starts = self._epoch(epoch)
            low, high, before = order.range_of(replica, epoch)
            place = low + int(read[begin]) - before
            start, stop = windows.segment(place, low, high)
            end = begin + min(stop - place, int(np.searchsorted(epochs, epoch, "right")) - begin)
            offsets = read[begin:end] + (low - before - start)
            places = start + _permuted_all(order.permutation_of_segment(epoch, start, stop), offsets)
            index = np.searchsorted(starts, places, "right") - 1
            samples[begin:end] = self._first[shards[index]] + places - starts[index]
            begin = end
        found: list[int] = samples.tolist()
        return found

    def _epoch(self, epoch: int) -> tuple[Windows, Numbers, Numbers]:
        found = self._epochs.get(epoch)
        if found is None:
            if len(self._epochs) >= EPOCHS:
                del self._epochs[max(self._epochs, key=lambda known: abs(known - epoch))]
            count = len(self._lengths)
            shards = _permuted_all(self._order.permutation_of_shards(epoch), np.arange(count, dtype=np.int64))
            starts: Numbers = np.concatenate([[0], np.cumsum(self._lengths[shards])])
            windows = Windows(cast(Sequence[int], shards), cast(Sequence[int], starts), self._order.of_replica)
            found = self._epochs[epoch] = windows, shards, starts
        return found


def _permuted_all(permutation: Permutation, offsets: Numbers) -> Numbers:
    if len(offsets) <= FEW:
        return np.array([permutation(offset) for offset in offsets.tolist()], np.int64)
    return _permuted(permutation, offsets.astype(np.uint64)).astype(np.int64)


def samples_at(order: SampleOrder, positions: Array) -> list[int]:
    """Return the sample indices at these positions of a job whose order does not follow shards."""
    samples = np.empty_like(positions)
    epochs, offsets = np.divmod(positions, np.uint64(order.length))
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        permutation = order.permutation(int(epoch))
        samples[chosen] = offsets[chosen] if permutation is None else _permuted(permutation, offsets[chosen])
    found: list[int] = samples.tolist()
    return found


def _permuted(permutation: Permutation, offsets: Array) -> Array:
    values = _encrypt(permutation, offsets)
    outside = np.flatnonzero(values >= permutation.n)
    while len(outside):  # cycle walking
        values[outside] = again = _encrypt(permutation, values[outside])
        outside = outside[again >= permutation.n]
    return values


def _encrypt(permutation: Permutation, values: Array) -> Array:
    bits, mask = np.uint64(permutation.half_bits), np.uint64((1 << permutation.half_bits) - 1)
    left, right = values >> bits, values & mask
    keys = tuple(permutation.keys)
    if permutation.half_bits <= TABLED_BITS:
        for table in _tables(keys, permutation.half_bits):
            left, right = right, left ^ table[right]
    else:
        for key in keys:
            left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    joined: Array = (left << bits) | right
    return joined


@lru_cache(maxsize=4)
def _tables(keys: tuple[int, ...], bits: int) -> list[Array]:
    """What each round's key makes of every right half."""
    halves, mask = np.arange(1 << bits, dtype=np.uint64), np.uint64((1 << bits) - 1)
    return [_mix(halves ^ np.uint64(key)) & mask for key in keys]


def _mix(values: Array) -> Array:
    """As `core/order.py`'s: products of uint64 arrays wrap around."""
    mixed: Any = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))  # type: ignore[no-any-return]
