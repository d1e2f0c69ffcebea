"""Codecs that send a few words of a shard: top-k, random-k, deep gradient compression."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from rallypoint.codec.base import (
    Array,
    Scratch,
    all_finite,
    body_of,
    body_of_exactly,
    checked,
    draw,
    nonfinite,
    pieces,
    require_finite,
    require_like,
    room,
)
from rallypoint.errors import ConfigError, ProtocolError, UsageError

# ---- A few words of a shard and their positions: the largest words (top-k), or random ones (random-k) ----
#
# The payload of top-k, for shards of at most 2^32 words, cut into segments of 64 Ki words:
#     counts    u32, words sent of each segment
#     values    fp32, in ascending order of position
#     places    u16, position within the segment
#
# The payload of random-k: the seed (u64), then fp32 values. The receiver draws the same positions from the seed.

SEGMENT_WORDS = 1 << 16
_WORD_BYTES = 6  # value and place of one sent word
_TINIEST = np.float32(1e-45)  # zeros are never worth sending
_SAMPLED_HITS = 64  # how many of the k largest the sample holds: the threshold's rank is then right to about an eighth
_OVERSAMPLING = 1.3  # so that the sampled threshold rarely lets too few words through


class _SparseCodec(ABC):
    """What codecs that send a few words have in common."""

    lossless = False
    carries_nonfinite = False

    @abstractmethod
    def read(self, payload: memoryview, words: int) -> tuple[Array, Array]:
        """Return the positions of the words that a payload has, and the words."""

    def decode(self, payload: memoryview, into: Tensor) -> None:
        into = checked(into)
        places, sent = self.read(payload, into.numel())
        into.zero_()
        into.numpy()[places] = sent

    def decode_add(self, payload: memoryview, into: Tensor, weight: float = 1.0) -> None:
        into = checked(into)
        places, sent = self.read(payload, into.numel())
        into.numpy()[places] += sent * np.float32(weight)


class TopKCodec(_SparseCodec):
    """The `ratio` * words (rounded up) words of largest magnitude, exact in fp32; the other words decode to zero.

    Takes 1.5 * `ratio` of fp32's bytes. Zeros are never sent, so there may be fewer words. Among equal magnitudes the
    first are sent. (Aji and Heafield, 2017, "Sparse Communication for Distributed Gradient Descent"; Stich et al.,
    2018, "Sparsified SGD with Memory".)

    With `sampled`, a random sample gives the threshold (Lin et al., 2018, section 3.1), and what passes it is cut to k
    words. Then k/2 to k words are sent, usually k, and nearly all of them are among the k largest. Without `sampled`,
    the maxima of small groups give a bound that the k largest certainly pass.

    NaN and infinities raise NonFinitePayload. Scratch: one piece and its mask. In addition 20 bytes for each candidate
    (at most 4 k or one piece of them), and for the exact threshold 4 bytes for each group of 1 / (2 `ratio`) words.
    """

    code = 5

    def __init__(self, ratio: float, *, sampled: bool = True, scratch: Scratch | None = None) -> None:
        self.ratio = checked_ratio(ratio)
        self.sampled = sampled
        self._scratch = scratch or Scratch()

    def bytes_for(self, words: int) -> int:
        """Return the largest possible size. For values without zeros it is exact, unless `sampled`."""
        return sparse_bytes(words, count_for(self.ratio, words))

    def encode(self, values: Tensor, out: memoryview, *, seed: int) -> int:
        values = checked(values)
        room(out, self.bytes_for(values.numel()))
        places = largest(values, self.ratio, seed=seed, sampled=self.sampled, scratch=self._scratch)
        return write_sparse(values, places, out)

    def read(self, payload: memoryview, words: int) -> tuple[Array, Array]:
        return read_sparse(payload, words)


class RandomKCodec(_SparseCodec):
    """`ratio` * words (rounded up) words, one drawn from each of as many equal strata; the other words decode to zero.

    Takes `ratio` of fp32's bytes, and 8 bytes. With `unbiased`, a word is multiplied by the size of its stratum, so the
    mean over seeds is the value (Wangni et al., 2018, "Gradient Sparsification", equation 2, with equal probabilities).
    Without, words are sent unchanged, as error feedback needs (Stich et al., 2018). NaN and infinities, in the values
    or after multiplying, raise NonFinitePayload. Memory: 20 bytes for each word sent.
    """

    code = 6
    _SEED_BYTES = 8

    def __init__(self, ratio: float, *, unbiased: bool = True) -> None:
        self.ratio = checked_ratio(ratio)
        self.unbiased = unbiased

    def bytes_for(self, words: int) -> int:
        return self._SEED_BYTES + 4 * count_for(self.ratio, words) if words else 0

    def encode(self, values: Tensor, out: memoryview, *, seed: int) -> int:
        values = checked(values)
        nbytes = self.bytes_for(values.numel())
        body = room(out, nbytes).numpy()
        if not nbytes:
            return 0
        require_finite(values, "random-k")
        body[: self._SEED_BYTES].view("<u4")[:] = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        places, sizes = self._draw(seed, values.numel())
        sent = values.numpy()[places]
        if self.unbiased:
            with np.errstate(over="ignore"):
                sent = sent * sizes.astype(np.float32)
            if not np.isfinite(sent).all():
                raise nonfinite("random-k")
        body[self._SEED_BYTES :].view("<f4")[:] = sent
        return nbytes

    def _draw(self, seed: int, words: int) -> tuple[Array, Array]:
        """Return the drawn positions, ascending, and the size of each one's stratum."""
        count = count_for(self.ratio, words)
        edges = np.arange(count + 1, dtype=np.int64) * words // count
        sizes = np.diff(edges)
        return edges[:-1] + draw(seed, sizes), sizes

    def read(self, payload: memoryview, words: int) -> tuple[Array, Array]:
        body = body_of_exactly(payload, self.bytes_for(words), words).numpy()
        if not words:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        low, high = body[: self._SEED_BYTES].view("<u4").tolist()
        sent = body[self._SEED_BYTES :].view("<f4")
        _check_sent(sent)
        return self._draw(high << 32 | low, words)[0], sent


def checked_ratio(ratio: float) -> float:
    """Return `ratio`; raise ConfigError unless 0 < ratio <= 1."""
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(f"a sparse codec cannot send {ratio} of the words: use a ratio above 0, of at most 1")
    return ratio


def count_for(ratio: float, words: int) -> int:
    """Return k: the largest number of words sent of `words` words."""
    return min(words, math.ceil(ratio * words))


def sparse_bytes(words: int, count: int) -> int:
    """Return the bytes of a top-k payload with `count` of `words` words."""
    return 4 * _segments(words) + _WORD_BYTES * count


def write_sparse(values: Tensor, places: Array, out: memoryview) -> int:
    """Write the words of `values` at `places` (int64, ascending) to `out`. Returns the bytes used."""
    words = values.numel()
    nbytes = sparse_bytes(words, len(places))
    body = room(out, nbytes).numpy()
    head, tail = 4 * _segments(words), nbytes - 2 * len(places)
    edges = np.searchsorted(places, np.arange(_segments(words) + 1) * SEGMENT_WORDS)
    body[:head].view("<u4")[:] = np.diff(edges)
    body[head:tail].view("<f4")[:] = values.numpy()[places]
    body[tail:].view("<u2")[:] = places & (SEGMENT_WORDS - 1)
    return nbytes


def read_sparse(payload: memoryview, words: int) -> tuple[Array, Array]:
    """Return the positions (int64, ascending) and the fp32 values of a top-k payload.

    Raises ProtocolError if it is invalid.
    """
    body = body_of(payload).numpy()
    head = 4 * _segments(words)
    sent_bytes = len(body) - head
    if sent_bytes < 0 or sent_bytes % _WORD_BYTES:
        raise ProtocolError(f"a sparse payload of {len(body)} bytes for {words} words is cut short or too long")
    count, tail = sent_bytes // _WORD_BYTES, len(body) - sent_bytes // 3
    counts = body[:head].view("<u4").astype(np.int64)
    if counts.sum() != count or count > words:
        raise ProtocolError(f"a sparse payload announces {counts.sum()} of {words} words and carries {count}")
    places = body[tail:].view("<u2") + np.repeat(np.arange(len(counts)) * SEGMENT_WORDS, counts)
    if count and (places[-1] >= words or not (places[1:] > places[:-1]).all()):
        raise ProtocolError(f"a sparse payload's positions do not ascend, or pass the end of {words} words")
    sent = body[head:tail].view("<f4")
    _check_sent(sent)
    return places, sent


def largest(values: Tensor, ratio: float, *, seed: int, sampled: bool, scratch: Scratch) -> Array:
    """Return the positions (int64, ascending) of the `ratio` * words largest nonzero magnitudes; see TopKCodec.

    Raises NonFinitePayload on NaN or infinity.
    """
    k = count_for(ratio, values.numel())
    if not k:
        return np.empty(0, np.int64)
    if sampled and 2 * _SAMPLED_HITS <= k <= values.numel() / _OVERSAMPLING:
        places = _passing(values, _sampled_threshold(values, ratio, seed), k, scratch)
        if len(places) >= k // 2:
            return places
    return _passing(values, _certain_threshold(values, ratio, k, scratch), k, scratch)


def _sampled_threshold(values: Tensor, ratio: float, seed: int) -> np.float32:
    # Odd, so it shares no period with the rows of a matrix
    stride = max(1, int(values.numel() * ratio / _SAMPLED_HITS)) | 1
    offset = seed % min(stride, values.numel())
    sample = np.abs(values.numpy()[offset::stride])
    return _kth_largest(sample, min(len(sample), math.ceil(_OVERSAMPLING * ratio * len(sample))))


def _certain_threshold(values: Tensor, ratio: float, k: int, scratch: Scratch) -> np.float32:
    """Return a magnitude that at least k words reach: the k-th largest of the maxima of disjoint groups of words."""
    group = max(1, min(64, int(1 / (2 * ratio))))
    maxima = []
    for start, stop in pieces(values.numel()):
        magnitude = torch.abs(values[start:stop], out=scratch.floats(0, stop - start))
        size = magnitude.numel() // group * group
        if size:
            maxima.append(torch.amax(magnitude[:size].view(group, -1), 0).numpy())
    found = np.concatenate(maxima) if maxima else np.empty(0, np.float32)
    return _kth_largest(found, k) if len(found) >= k else np.float32(0)


def _kth_largest(magnitudes: Array, k: int) -> np.float32:
    return np.float32(np.partition(magnitudes, len(magnitudes) - k)[len(magnitudes) - k])


def _passing(values: Tensor, threshold: np.float32, k: int, scratch: Scratch) -> Array:
    """Return the positions of the at most `k` largest magnitudes among those that reach `threshold`."""
    floor = max(threshold, _TINIEST)
    all_places: list[Array] = []
    all_magnitudes: list[Array] = []
    held = 0
    for start, stop in pieces(values.numel()):
        magnitude = torch.abs(values[start:stop], out=scratch.floats(0, stop - start))
        if not all_finite(magnitude):
            raise nonfinite("top-k")
        reach = scratch.mask(stop - start).numpy()
        places = np.flatnonzero(np.greater_equal(magnitude.numpy(), floor, out=reach))
        all_magnitudes.append(magnitude.numpy()[places])
        all_places.append(places + start)
        held += len(places)
        if held > 4 * k:
            # From here on a word must be larger than the smallest of the k: among equal ones the first stay.
            floor = np.nextafter(_shrink(all_places, all_magnitudes, k), np.float32(np.inf))
            held = k
    if held > k:
        _shrink(all_places, all_magnitudes, k)
    return np.concatenate(all_places)


def _shrink(all_places: list[Array], all_magnitudes: list[Array], k: int) -> np.float32:
    """Keep the `k` largest in the lists, the first among equal ones. Returns the smallest of them."""
    places, magnitudes = np.concatenate(all_places), np.concatenate(all_magnitudes)
    least = _kth_largest(magnitudes, k)
    keep = magnitudes > least
    keep[np.flatnonzero(magnitudes == least)[: k - np.count_nonzero(keep)]] = True
    all_places[:], all_magnitudes[:] = [places[keep]], [magnitudes[keep]]
    return least


def _segments(words: int) -> int:
    return -(-words // SEGMENT_WORDS)


def _check_sent(sent: Array) -> None:
    if not np.isfinite(sent).all():
        raise ProtocolError("a sparse payload holds NaN or infinity, which its sender would have refused")


# ---- Deep Gradient Compression: top-k of an accumulated velocity (Lin et al., 2018) ----
#
# The servers must apply plain SGD, because the momentum is in the payload already.

FIRST_RATIO = 0.25  # at the start of the warm-up: 75 % sparsity, as in the paper's section 3.3


def largest_ratio(ratio: float, warmup_steps: int) -> float:
    """Return the largest ratio of any step."""
    return max(ratio, FIRST_RATIO) if warmup_steps else ratio


class DGCCodec(TopKCodec):
    """Top-k with momentum correction, momentum factor masking, local clipping and a warm-up of the ratio.

    At each step, on one shard of one replica (algorithm 4, equations 4 and 5, with g the shard's gradient):

        g <- g * min(1, clip / |g|);  u <- momentum u + g;  v <- v + u
        send v where |v| is among the ratio * words largest;  there v <- 0 and u <- 0

    `clip` bounds the 2-norm of *this shard's* gradient, where the paper's bounds the whole gradient's: pass the global
    bound / sqrt(replicas) * sqrt(this shard's part of the words). None clips nothing. Over the first `warmup_steps`
    steps the ratio falls from 0.25 to `ratio`, exponentially.

    Wire format and decoding are top-k's. During the warm-up, `bytes_for` returns the warm-up's bound. Each `encode` is
    a step, as in ErrorFeedback. NaN or infinity raises NonFinitePayload before any state changes. Memory: u and v,
    fp32; scratch as for top-k.
    """

    def __init__(
        self, words: int, *, ratio: float = 0.001, momentum: float = 0.9, clip: float | None = None,
        warmup_steps: int = 0, sampled: bool = True, scratch: Scratch | None = None,
    ) -> None:  # fmt: skip
        super().__init__(checked_ratio(ratio), sampled=sampled, scratch=scratch)
        if not 0.0 <= momentum < 1.0 or warmup_steps < 0 or (clip is not None and not 0.0 < clip < math.inf):
            raise ConfigError(
                f"DGC with momentum {momentum}, clip {clip} and {warmup_steps} warm-up steps: momentum must be from 0 "
                "to below 1, clip positive and the steps not negative"
            )
        self._momentum, self._clip, self._warmup_steps = momentum, clip, warmup_steps
        self._velocity = torch.zeros(words, dtype=torch.float32, device="cpu")
        self._unsent = torch.zeros(words, dtype=torch.float32, device="cpu")
        self._steps = torch.zeros((), dtype=torch.int64, device="cpu")

    @property
    def ratio_now(self) -> float:
        """The ratio of the next step."""
        done = int(self._steps)
        if done >= self._warmup_steps or self.ratio >= FIRST_RATIO:
            return self.ratio
        return float(FIRST_RATIO * (self.ratio / FIRST_RATIO) ** (done / self._warmup_steps))

    def bytes_for(self, words: int) -> int:
        return sparse_bytes(words, count_for(largest_ratio(self.ratio, self._warmup_steps), words))

    def encode(self, values: Tensor, out: memoryview, *, seed: int) -> int:
        values = checked(values)
        if values.numel() != self._velocity.numel():
            raise UsageError(f"this codec serves a shard of {self._velocity.numel()} words, not of {values.numel()}")
        room(out, self.bytes_for(values.numel()))
        factor = self._clip_factor(values)
        self._accumulate(values, factor, keep=False)  # a first pass without writing: does everything stay finite?
        self._accumulate(values, factor, keep=True)
        places = largest(self._unsent, self.ratio_now, seed=seed, sampled=self.sampled, scratch=self._scratch)
        used = write_sparse(self._unsent, places, out)
        self._unsent.numpy()[places] = 0.0
        self._velocity.numpy()[places] = 0.0
        self._steps += 1
        return used

    def state(self) -> dict[str, Tensor]:
        """`velocity` (u) and `unsent` (v), 1-D fp32, and `steps`, an int64 scalar."""
        return {"velocity": self._velocity, "unsent": self._unsent, "steps": self._steps}

    def load_state(self, state: dict[str, Tensor]) -> None:
        require_like(state, self.state())
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def reset(self) -> None:
        for tensor in self.state().values():
            tensor.zero_()

    def _clip_factor(self, values: Tensor) -> float:
        if self._clip is None or not values.numel():
            return 1.0
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        return self._clip / norm if norm > self._clip else 1.0

    def _accumulate(self, values: Tensor, factor: float, *, keep: bool) -> None:
        """Compute the next step's u and v; with `keep`, store them. Raises NonFinitePayload if they are not finite."""
        for start, stop in pieces(values.numel()):
            velocity = self._velocity[start:stop] if keep else self._scratch.floats(0, stop - start)
            torch.mul(self._velocity[start:stop], self._momentum, out=velocity)
            velocity.add_(values[start:stop], alpha=factor)
            if keep:
                self._unsent[start:stop].add_(velocity)
            elif not (all_finite(velocity) and all_finite(velocity.add_(self._unsent[start:stop]))):
                raise nonfinite("DGC")
