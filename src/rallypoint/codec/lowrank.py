"""PowerSGD: a matrix as the product of two thin factors (Vogels et al., 2019, "PowerSGD", algorithm 1).

    P   fp32, rows x rank, columns orthonormal, row by row
    Q   fp32, columns x rank, row by row

With all-reduce, the paper sums P over the replicas before it orthonormalises, and sums Q after: the result is rank r of
the *mean*. Servers have no second round trip: each replica sends its own P and Q, and the server adds the products P
Q^T. So each gradient has rank r by itself, and their sum has up to r * replicas. It costs the server 2 r operations for
each word and replica.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rallypoint.codec.base import body_of_exactly, checked, nonfinite, require_like, room, source, within
from rallypoint.core.layout import factors_pay
from rallypoint.errors import ConfigError, UsageError

_LARGEST, _LEAST = torch.finfo(torch.float32).max, 2.0**-120  # the first Q, of normal numbers, divided by it is finite
_NAME = "PowerSGD"


class LowRankCodec:
    """One step of subspace iteration, starting from the last step's Q, for a parameter of `shape` (rows, columns).

    Takes (rows + columns) * rank words of 4 bytes. A constant matrix of rank at most `rank` is exact up to rounding
    from its first step. Other matrices approach their best approximation over the steps, as Q converges. Wrap it in
    ErrorFeedback. `state` is Q (columns x rank, fp32, largest magnitude 1); a decoder needs none.

    Each `encode` is a step, as in ErrorFeedback. NaN, infinities and products beyond fp32's range raise
    NonFinitePayload and leave Q unchanged. Raises ConfigError when the factors would not be smaller than the matrix.
    Memory: the factors, and inside LAPACK a few more of P's size.
    """

    code = 8
    lossless = False
    carries_nonfinite = False

    def __init__(self, shape: tuple[int, int], rank: int) -> None:
        if not worthwhile(shape, rank):
            raise ConfigError(f"PowerSGD of rank {rank} saves nothing on a matrix of {list(shape)}: send it raw")
        self.rows, self.columns = shape
        self.rank = rank
        self._limit = _LARGEST / (2 * rank)  # the bound on Q: nothing decodes to an infinity
        self._q = torch.empty(self.columns, rank, dtype=torch.float32, device="cpu")
        self.reset()

    def bytes_for(self, words: int) -> int:
        """Return exactly the bytes of the factors. Raises UsageError when `words` is not rows * columns."""
        if words != self.rows * self.columns:
            raise UsageError(f"this codec serves a parameter of {self.rows} x {self.columns}, not of {words} words")
        return 4 * self.rank * (self.rows + self.columns)

    def encode(self, values: Tensor, out: memoryview, *, seed: int) -> int:
        """Like Codec.encode. Nothing here is random, so `seed` is not used."""
        matrix = self._matrix(values)
        nbytes = self.bytes_for(matrix.numel())
        p, q = self._factors(room(out, nbytes))
        largest = float(torch.maximum(matrix.amax(), -matrix.amin()))
        if not math.isfinite(largest):
            raise nonfinite(_NAME)
        # Scaling Q does not change the subspace, and keeps the product in range for a matrix of any magnitude.
        torch.mm(matrix, self._q / max(largest, _LEAST), out=p)
        p.copy_(torch.linalg.qr(p).Q)
        torch.mm(matrix.t(), p, out=q)
        peak = float(q.abs().amax())
        if not peak <= self._limit:
            raise nonfinite(_NAME)
        if peak > 0.0:
            torch.div(q, peak, out=self._q)
        return nbytes

    def decode(self, payload: memoryview, into: Tensor) -> None:
        matrix = self._matrix(into)
        p, q = self._open(payload, matrix.numel())
        torch.mm(p, q.t(), out=matrix)

    def decode_add(self, payload: memoryview, into: Tensor, weight: float = 1.0) -> None:
        """Like Codec.decode_add, but the product's terms are added one by one: equal only up to rounding."""
        matrix = self._matrix(into)
        p, q = self._open(payload, matrix.numel())
        matrix.addmm_(p, q.t(), alpha=weight)

    def state(self) -> dict[str, Tensor]:
        """Return `q`: columns x rank, fp32."""
        return {"q": self._q}

    def load_state(self, state: dict[str, Tensor]) -> None:
        require_like(state, self.state())
        self._q.copy_(state["q"])

    def reset(self) -> None:
        """Set the first Q: the same normal numbers in every process."""
        normal = np.random.Generator(source(0)).standard_normal((self.columns, self.rank), dtype="f4")
        self._q.copy_(torch.from_numpy(normal))

    def _matrix(self, values: Tensor) -> Tensor:
        values = checked(values)
        self.bytes_for(values.numel())
        return values.view(self.rows, self.columns)

    def _factors(self, body: Tensor) -> tuple[Tensor, Tensor]:
        floats = body.view(torch.float32)
        p, q = floats[: self.rank * self.rows], floats[self.rank * self.rows :]
        return p.view(self.rows, self.rank), q.view(self.columns, self.rank)

    def _open(self, payload: memoryview, words: int) -> tuple[Tensor, Tensor]:
        p, q = self._factors(body_of_exactly(payload, self.bytes_for(words), words))
        within(p, -1.001, 1.001, "orthonormal columns")
        within(q, -self._limit, self._limit, "factors")
        return p, q


def worthwhile(shape: tuple[int, ...], rank: int) -> bool:
    """Return True if a parameter of this shape is a matrix, and factors of `rank` are smaller than it."""
    if rank < 1:
        raise ConfigError(f"PowerSGD of rank {rank}: use 1 or more")
    return len(shape) == 2 and factors_pay(*shape, rank)
