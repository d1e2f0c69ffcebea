"""The order of samples, many positions at once; the micro-batches that a worker needs next; a framework's sampler."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice, product
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from rallypoint.config import JobConfig
from rallypoint.core.order import Permutation, SampleOrder, Windows, derive_seed

Array = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

AT_ONCE = 4096  # positions: arrays shorter than about a thousand cost NumPy's overhead and little else
REPLICAS = 64  # of which the samples computed ahead are kept
EPOCHS = 2  # whose sequences of shards are kept: where one ends, replicas are in two
FEW = 48  # positions: so few are permuted one by one
TABLED_BITS = 12  # of half a position, in data sets of up to 16 million samples: a round is then a look into a table


class OrderAhead:
    """The same samples as `SampleOrder`, for several steps of a replica at once, but for not many more than 16 epochs.

    It keeps what it has computed ahead: a replica's next step costs a look in a dictionary.
    """

    def __init__(self, order: SampleOrder, batch: int) -> None:
        self._order, self._batch = order, batch
        self._of_windows = SamplesOfWindows(order) if order.shards else None
        self._steps = max(1, min(AT_ONCE // batch, 16 * order.length // order.positions(1, 0).start))
        self._windows: dict[int, tuple[int, list[int]]] = {}  # replica -> number of its window, samples

    def samples(self, step: int, replica: int) -> list[int]:
        """The `batch` sample indices of replica `replica` at step `step`, in order."""
        number, offset = divmod(step, self._steps)
        window = self._windows.get(replica)
        if window is None or window[0] != number:
            if window is None and len(self._windows) >= REPLICAS:
                self._windows.clear()
            steps = range(number * self._steps, (number + 1) * self._steps)
            ranges = [self._order.positions(step, replica) for step in steps]
            positions = np.concatenate([np.arange(one.start, one.stop, dtype=np.uint64) for one in ranges])
            samples = samples_at(self._order, positions) if self._of_windows is None else self._of_windows.at(positions)
            window = self._windows[replica] = number, samples
        return window[1][offset * self._batch : (offset + 1) * self._batch]


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


Place = tuple[int, int, int]  # step, replica, index of the micro-batch


def places_after(place: Place, replicas: tuple[int, ...], config: JobConfig) -> Iterator[Place]:
    """Yield the micro-batches that a worker with these `replicas` (ascending) needs after `place`, to the job's end.

    It is a forecast: the view may change, or a step be computed again. Each replica makes all steps of a round before
    the next replica begins. Example: replicas 2 and 3, one micro-batch a step: after (7, 2, 0) come (7, 3, 0),
    (8, 2, 0), (8, 3, 0).
    """
    step, replica, index = place
    round = step // config.steps_per_round
    yield from product((step,), (replica,), range(index + 1, config.accumulate))
    yield from _of_steps(range(step + 1, config.steps_of(round).stop), replica, config)
    yield from _later(round, replica, replicas, config)


def places_from(round: int, replica: int, replicas: tuple[int, ...], config: JobConfig) -> Iterator[Place]:
    """Yield what `replica` needs in this round, and all that the worker needs after that, as `places_after` does."""
    yield from _of_steps(config.steps_of(round), replica, config)
    yield from _later(round, replica, replicas, config)


class Forecast:
    """Places that are still to be requested, in order."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self._places, self._first = iter(places), list[Place]()

    @property
    def ended(self) -> bool:
        if not self._first:
            self._first = list(islice(self._places, 1))
        return not self._first

    def pop(self) -> Place | None:
        """Remove and return the next one; None if there is none."""
        return None if self.ended else self._first.pop()

    def again(self, places: Sequence[Place]) -> None:
        """Put these in front."""
        self._places, self._first = chain(places, self._first, self._places), []


def _later(round: int, replica: int, replicas: tuple[int, ...], config: JobConfig) -> Iterator[Place]:
    for other in replicas[bisect_right(replicas, replica) :]:
        yield from _of_steps(config.steps_of(round), other, config)
    while replicas and (steps := config.steps_of(round := round + 1)):
        for other in replicas:
            yield from _of_steps(steps, other, config)


def _of_steps(steps: range, replica: int, config: JobConfig) -> Iterator[Place]:
    return product(steps, (replica,), range(config.accumulate))


class ReplicaSampler(Sampler[int]):
    """The part of each global batch that one replica computes, in the order of one seed.

    A global batch is `replicas` batches of `batch` samples; replica r reads the r-th of them. So one process with
    ``replicas * batch`` samples a step, or with `replicas` accumulated micro-batches, computes the same mean. Samples
    that fill no global batch are left out of an epoch.

    Attributes:
        replica: which replica reads.
        epoch: the next iteration is this epoch's.
        skip: samples that the next iteration leaves out at its start: those before a process was started again.
    """

    def __init__(self, length: int, *, replicas: int, batch: int, shuffled: bool, seed: int) -> None:
        self._length, self._replicas, self._batch = length, replicas, batch
        self._shuffled, self._seed = shuffled, seed
        self.replica = self.epoch = self.skip = 0

    @property
    def batches(self) -> int:
        """Batches of this replica in an epoch."""
        return self._length // (self._replicas * self._batch)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch's."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches * self._batch

    def __iter__(self) -> Iterator[int]:
        order = range(self._length) if not self._shuffled else torch.randperm(
            self._length, generator=torch.Generator("cpu").manual_seed(derive_seed(self._seed, "epoch", self.epoch)),
            dtype=torch.int64, device="cpu",
        ).tolist()  # fmt: skip
        skip, self.skip = self.skip, 0
        mine = [
            order[at]
            for step in range(self.batches)
            for at in range((step * self._replicas + self.replica) * self._batch,
                            (step * self._replicas + self.replica + 1) * self._batch)
        ]  # fmt: skip
        return iter(mine[skip:])
