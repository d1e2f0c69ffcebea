"""Error feedback: what a lossy codec did not send of a shard is added to the shard's next values.

Seide et al., 2014, "1-Bit Stochastic Gradient Descent", equations 2 and 3; Karimireddy et al., 2019, "Error Feedback
Fixes SignSGD", algorithm 2, on gradients instead of updates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rallypoint.codec.base import Codec, Scratch, Stateful, checked
from rallypoint.errors import UsageError

_INNER = "inner."


class ErrorFeedback:
    """Encodes values + residual with `inner`. The new residual is that sum minus what the receiver decodes.

    So the sum of everything decoded is the sum of everything encoded, minus one residual. It serves one shard of one
    replica, of `words` words. Each `encode` is a step: to send a payload again, keep it, or restore the state from
    before it. Codecs that lose nothing or turn large values into infinities (raw, fp16, bf16) raise UsageError. Memory:
    the residual, fp32, and as much of scratch.

    If `inner` refuses the values (a NaN or an infinity, also one that comes from adding the residual), the residual
    stays as it was.
    """

    def __init__(self, inner: Codec, words: int, scratch: Scratch | None = None) -> None:
        if inner.lossless or inner.carries_nonfinite:
            raise UsageError(f"error feedback is of no use around codec {inner.code}: it sends all that it can")
        self.inner = inner
        self._scratch = scratch or Scratch()
        self._residual = torch.zeros(words, dtype=torch.float32, device="cpu")

    @property
    def code(self) -> int:
        return self.inner.code

    @property
    def lossless(self) -> bool:
        return False

    @property
    def carries_nonfinite(self) -> bool:
        return False

    def bytes_for(self, words: int) -> int:
        return self.inner.bytes_for(words)

    def encode(self, values: Tensor, out: memoryview, *, seed: int) -> int:
        values = checked(values)
        if values.numel() != self._residual.numel():
            raise UsageError(f"this codec serves a shard of {self._residual.numel()} words, not of {values.numel()}")
        wanted = torch.add(values, self._residual, out=self._scratch.whole(values.numel()))
        used = self.inner.encode(wanted, out, seed=seed)
        self.inner.decode(out[:used], self._residual)
        torch.sub(wanted, self._residual, out=self._residual)
        return used

    def decode(self, payload: memoryview, into: Tensor) -> None:
        self.inner.decode(payload, into)

    def decode_add(self, payload: memoryview, into: Tensor, weight: float = 1.0) -> None:
        self.inner.decode_add(payload, into, weight)

    def state(self) -> dict[str, Tensor]:
        """Return `residual` (1-D fp32), and the state of `inner` as `inner.<name>`."""
        inner = self.inner.state() if isinstance(self.inner, Stateful) else {}
        return {"residual": self._residual} | {_INNER + name: tensor for name, tensor in inner.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        require_like(state, self.state())
        self._residual.copy_(state["residual"])
        if isinstance(self.inner, Stateful):
            self.inner.load_state({n.removeprefix(_INNER): t for n, t in state.items() if n.startswith(_INNER)})

    def reset(self) -> None:
        self._residual.zero_()
        if isinstance(self.inner, Stateful):
            self.inner.reset()


def require_like(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Raise UsageError unless `state` has the names, shapes and dtypes of `own`."""
    theirs = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
    ours = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    if theirs != ours:
        raise UsageError(f"this is another codec's state: it has {theirs} where {ours} is needed")
