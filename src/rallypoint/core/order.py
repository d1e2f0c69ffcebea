"""Samples and random seeds as pure functions of (seed, step, replica) (I6): there is no sampler state to save.

The order of an epoch is a keyed permutation of 0..n-1 that needs no table: a balanced Feistel network over the next
power of four with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It only shuffles;
it is not meant to be secure.
"""

from __future__ import annotations

import hashlib

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


class SampleOrder:
    """The samples that replica r uses at step t. Every epoch is one pass over the data set, shuffled or in order.

    The job reads positions 0, 1, 2, ... in order. Step t has the R * batch positions from t * R * batch on; replica r
    has the r-th `batch` of them. Position p is sample ``permutation_of_epoch(p // samples)(p % samples)``, or without
    `shuffled` ``p % samples``. Example: R = 2, batch = 4: replica 1 at step 3 reads positions 28..31.

    Attributes:
        length: samples of the data set.
    """

    def __init__(self, *, seed: int, samples: int, replicas: int, batch: int, shuffled: bool = True) -> None:
        self._seed, self.length, self._replicas, self._batch = seed, samples, replicas, batch
        self._shuffled = shuffled
        self._epoch = -1
        self._permutation = Permutation(samples, 0)

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
            self._permutation = Permutation(self.length, derive_seed(self._seed, "epoch", epoch))
            self._epoch = epoch
        return self._permutation

    def _sample(self, position: int) -> int:
        epoch, offset = divmod(position, self.length)
        permutation = self.permutation(epoch)
        return offset if permutation is None else permutation(offset)


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)
