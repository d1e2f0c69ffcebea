"""Deep Gradient Compression: top-k of an accumulated velocity (Lin et al., 2018, "Deep Gradient Compression").

The servers must apply plain SGD, because the momentum is in the payload already.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rallypoint.codec.base import Scratch, all_finite, checked, nonfinite, pieces, room
from rallypoint.codec.feedback import require_like
from rallypoint.codec.sparse import TopKCodec, checked_ratio, count_for, largest, sparse_bytes, write_sparse
from rallypoint.errors import ConfigError, UsageError

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
        self,
        words: int,
        *,
        ratio: float = 0.001,
        momentum: float = 0.9,
        clip: float | None = None,
        warmup_steps: int = 0,
        sampled: bool = True,
        scratch: Scratch | None = None,
    ) -> None:
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
