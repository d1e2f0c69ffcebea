"""Samples and random seeds as pure functions of (seed, step, replica) (I6): there is no sampler state to save.

The order of an epoch is a keyed permutation of 0..n-1 that needs no table: a balanced Feistel network over the next
power of four with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It only shuffles;
it is not meant to be secure.

A stream has no positions: which items of which of its parts a replica reads is a pure function too. A job that reads
one ends after `passes` over it or after `steps`, whichever comes first. A replica says that its stream is over with the
last step for which it has a full batch. At the job's last step nobody looks any more, for that would read what no step
uses.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

_ROUNDS = 4
_MASK64 = (1 << 64) - 1


def derive_seed(seed: int, *path: int | str) -> int:
    """A 63-bit seed for the place named by `path`, such as ``("compute", step, replica, micro)``."""
    text = "/".join(str(part) for part in (seed, *path)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Permutation:
    """A keyed bijection of ``range(n)``; `permutation(i)` takes O(1) time and memory.

    Attributes:
        n: how many numbers it permutes.
        half_bits: bits of each half of the Feistel network.
        keys: the key of each round.
    """

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} things is impossible")
        self.n = n
        self.half_bits = max(1, -(-(n - 1).bit_length() // 2))
        self._half_mask = (1 << self.half_bits) - 1
        self.keys = [derive_seed(key, "order", r) for r in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(index)
        value = self._encrypt(index)
        while value >= self.n:  # cycle walking: the domain is less than four times n
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self.half_bits, value & self._half_mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return (left << self.half_bits) | right


class Windows:
    """The order of one pass over a data set of shards (files, row groups), in which few shards are read at a time.

    The shards are permuted and laid one after the other. Each replica has a range of that sequence: the ranges are as
    long as the replicas' shares of the pass, whatever the sizes of the shards. A *window* is `of_replica` shards in a
    row, and a *segment* the part of a window that lies in one replica's range: the samples of a segment are permuted.
    Example: R = 2, of_replica = 2, shards of 10 samples, permuted to 3, 0, 2, 1: replica 0 reads the samples of shards
    3 and 0 in an order of their own, replica 1 those of 2 and 1.

    Attributes:
        shards: the shards as they are laid.
        starts: where each of them begins in the sequence, and where the last one ends.
    """

    def __init__(self, shards: Sequence[int], starts: Sequence[int], of_replica: int) -> None:
        self.shards, self.starts = shards, starts
        self._of_replica = of_replica

    def segment(self, place: int, low: int, high: int) -> tuple[int, int]:
        """Where the segment of this place of the sequence begins and ends, in a range from `low` to `high`."""
        window = (bisect_right(self.starts, place) - 1) // self._of_replica * self._of_replica
        end = min(window + self._of_replica, len(self.shards))
        return max(low, int(self.starts[window])), min(high, int(self.starts[end]))

    def shard_at(self, place: int) -> tuple[int, int]:
        """The shard at this place of the sequence, and the number of the sample in it."""
        index = bisect_right(self.starts, place) - 1
        return int(self.shards[index]), place - int(self.starts[index])


class SampleOrder:
    """The samples that replica r uses at step t. Every epoch is one pass over the data set, shuffled or in order.

    The job reads positions 0, 1, 2, ... in order. Step t has the R * batch positions from t * R * batch on; replica r
    has the r-th `batch` of them. Position p is sample ``permutation_of_epoch(p // samples)(p % samples)``, or without
    `shuffled` ``p % samples``. Example: R = 2, batch = 4: replica 1 at step 3 reads positions 28..31.

    With `shards`, the lengths of the data set's shards, a pass has the order of `Windows`: the replicas together read
    from about `mixed` shards at a time, and each from at least one.

    Attributes:
        seed: the job's.
        length: samples of the data set.
        shards: the lengths of its shards; empty where the order does not follow them.
    """

    def __init__(
        self, *, seed: int, samples: int, replicas: int, batch: int, shuffled: bool = True,
        shards: Sequence[int] = (), mixed: int = 1,
    ) -> None:  # fmt: skip
        self.seed, self.length, self._replicas, self._batch = seed, samples, replicas, batch
        self.shards, self._shuffled = shards, shuffled
        self.of_replica = max(1, mixed // replicas)
        self._epoch = -1
        self._permutation = Permutation(samples, 0)
        self._windows: tuple[int, Windows] | None = None

    def samples(self, step: int, replica: int) -> list[int]:
        """The `batch` sample indices of replica `replica` at step `step`, in order."""
        return [self._sample(position) for position in self.positions(step, replica)]

    def positions(self, step: int, replica: int) -> range:
        """The `batch` positions of replica `replica` at step `step`."""
        start = (step * self._replicas + replica) * self._batch
        return range(start, start + self._batch)

    def permutation(self, epoch: int) -> Permutation | None:
        """The order of this epoch; None where samples are not shuffled."""
        if not self._shuffled:
            return None
        if epoch != self._epoch:
            self._permutation = Permutation(self.length, derive_seed(self.seed, "epoch", epoch))
            self._epoch = epoch
        return self._permutation

    def permutation_of_shards(self, epoch: int) -> Permutation:
        """The order in which an epoch's shards are laid."""
        return Permutation(len(self.shards), derive_seed(self.seed, "shards", epoch))

    def permutation_of_segment(self, epoch: int, start: int, stop: int) -> Permutation:
        """The order of the samples of one segment."""
        return Permutation(stop - start, derive_seed(self.seed, "segment", epoch, start))

    def range_of(self, replica: int, epoch: int) -> tuple[int, int, int]:
        """Where a replica's range of the epoch's sequence begins and ends, and how many positions it had before it."""
        begin, end = epoch * self.length, (epoch + 1) * self.length
        low, high = (self._below(end, r) - self._below(begin, r) for r in (replica, replica + 1))
        return low, high, self._below(begin, replica + 1) - self._below(begin, replica)

    def replica_at(self, position: int) -> tuple[int, int]:
        """The replica that reads this position, and how many positions it has read before."""
        block, offset = divmod(position, self._batch)
        step, replica = divmod(block, self._replicas)
        return replica, step * self._batch + offset

    def _below(self, position: int, replica: int) -> int:
        """How many positions before this one are read by replicas before this one."""
        steps, rest = divmod(position, self._replicas * self._batch)
        return steps * replica * self._batch + min(rest, replica * self._batch)

    def _sample(self, position: int) -> int:
        epoch, offset = divmod(position, self.length)
        if self.shards:
            return self._in_windows(position, epoch)
        permutation = self.permutation(epoch)
        return offset if permutation is None else permutation(offset)

    def _in_windows(self, position: int, epoch: int) -> int:
        if self._windows is None or self._windows[0] != epoch:
            permutation = self.permutation_of_shards(epoch)
            shards = [permutation(index) for index in range(len(self.shards))]
            starts = [0, *accumulate(self.shards[shard] for shard in shards)]
            self._windows = epoch, Windows(shards, starts, self.of_replica)
        windows = self._windows[1]
        replica, read = self.replica_at(position)
        low, high, before = self.range_of(replica, epoch)
        start, stop = windows.segment(low + read - before, low, high)
        permuted = self.permutation_of_segment(epoch, start, stop)(low + read - before - start)
        shard, offset = windows.shard_at(start + permuted)
        return sum(self.shards[:shard]) + offset


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)

# ---- streams: items without positions ----


class Items(NamedTuple):
    """Items `first` to `stop` - 1 of one part. They are numbered from 0, pass after pass, by the part's iterator."""

    part: int
    first: int
    stop: int


class StreamOrder:
    """The items of each (step, replica), of a stream in `parts` parts that are read side by side.

    With fewer parts than replicas, R / parts neighbouring replicas share one, batch after batch. With more, a replica
    has parts / R of them and takes its batches from each in turn. Examples: R = 4, batch = 8, two parts: replica 3 at
    step 5 reads items 88 to 95 of part 1. R = 1 and two parts: step 5 reads items 16 to 23 of part 1.

    Raises ValueError if neither number divides the other.

    Attributes:
        parts: how many parts there are.
        sharing: how many replicas share a part.
    """

    def __init__(self, parts: int, *, replicas: int, batch: int) -> None:
        if replicas % parts and parts % replicas:
            raise ValueError(f"{parts} parts for {replicas} replicas: neither divides the other")
        self.parts, self._batch = parts, batch
        self.sharing, self._alternating = max(1, replicas // parts), max(1, parts // replicas)

    @property
    def stride(self) -> int:
        """How many items of one part lie between the beginnings of two batches of a replica in it."""
        return self.sharing * self._batch

    def items(self, step: int, replica: int) -> Items:
        """The `batch` items of replica `replica` at step `step`."""
        if self._alternating > 1:
            block, part = divmod(step, self._alternating)
            return self._block(replica * self._alternating + part, block)
        part, place = divmod(replica, self.sharing)
        return self._block(part, step * self.sharing + place)

    def samples(self, step: int, replica: int) -> range:
        """The same items as numbers of the whole stream: item i of part p is ``i * parts + p``."""
        part, first, stop = self.items(step, replica)
        return range(first * self.parts + part, stop * self.parts + part, self.parts)

    def _block(self, part: int, number: int) -> Items:
        return Items(part, number * self._batch, (number + 1) * self._batch)


def stream_looks_ahead(passes: int, step: int, steps: int) -> bool:
    """Return True if a replica has to know at `step` whether it has a batch for the next one. `passes` 0: no end."""
    return passes > 0 and step + 1 < steps


def stream_reads(passes: int, steps: int, *, given: bool) -> str:
    """Return what is said as the job begins; "" if only its steps end it. `given`: the script says how many steps."""
    default = "" if given else " (steps= is not given)"
    return f"the stream is read passes={passes} times, for {steps} steps at most{default}" if passes else ""


def stream_unread(passes: int, steps: int) -> str:
    """Return what is said when the steps have ended the job, and nobody has said that the stream is over."""
    if not passes:
        return ""
    return f"the job's {steps} steps are over, and its stream, with passes={passes}, may not be: give more to read all"
