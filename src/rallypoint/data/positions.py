"""The samples of many positions at once: `core/order.py` with NumPy, for loaders of 10^5 samples a second."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rallypoint.core.order import Permutation, SampleOrder

Array = npt.NDArray[np.uint64]

AT_ONCE = 4096  # positions: arrays shorter than about a thousand cost NumPy's overhead and little else
REPLICAS = 64  # of which the samples computed ahead are kept


class OrderAhead:
    """The same samples as `SampleOrder`, for several steps of a replica at once.

    It keeps what it has computed ahead: a replica's next step costs a look in a dictionary.
    """

    def __init__(self, order: SampleOrder, batch: int) -> None:
        self._order, self._batch = order, batch
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
            window = self._windows[replica] = number, samples_at(self._order, positions)
        return window[1][offset * self._batch : (offset + 1) * self._batch]


def _numbers(positions: range) -> Array:
    return np.arange(positions.start, positions.stop, dtype=np.uint64)


def samples_at(order: SampleOrder, positions: Array) -> list[int]:
    """Return the sample indices at these positions of the job."""
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
    for key in permutation.keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    joined: Array = (left << bits) | right
    return joined


def _mix(values: Array) -> Array:
    """As `core/order.py`'s: products of uint64 arrays wrap around."""
    mixed: Any = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))  # type: ignore[no-any-return]
