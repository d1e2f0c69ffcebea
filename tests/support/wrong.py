"""Workers that compute wrong, on purpose: errors of four kinds, to see whether audits find them (`audit=`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

KINDS = ("bit", "scale", "sample", "kernel")


class WrongComputation:
    """Plants an error of one kind into the computation of a model on this worker, while `active`.

        bit      the lowest bit of one value of the gradient of `weight` is flipped
        scale    the gradient of `weight` is 0.1 % too large
        sample   the first sample of a batch is replaced by the second
        kernel   the forward pass runs in bfloat16

    Use it around each micro-batch: ``with wrong.computing(step >= 8): ... wrong.batch(x) ...``.
    """

    def __init__(self, kind: str, weight: torch.Tensor) -> None:
        if kind not in KINDS:
            raise ValueError(f"no error {kind!r}: use one of {', '.join(KINDS)}")
        self.kind, self.active = kind, False
        if kind in ("bit", "scale"):
            weight.register_hook(self._changed)  # type: ignore[no-untyped-call]

    @contextmanager
    def computing(self, active: bool) -> Iterator[None]:
        """Compute a forward and backward pass, with the error if `active`."""
        self.active = active
        with torch.autocast("cpu", torch.bfloat16, enabled=active and self.kind == "kernel"):
            yield
        self.active = False

    def batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor of the batch, samples first."""
        if not self.active or self.kind != "sample":
            return tensor
        return torch.cat([tensor[1:2], tensor[1:]])

    def _changed(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self.active:
            return gradient
        if self.kind == "scale":
            return gradient * 1.001
        wrong = gradient.clone()
        wrong.view(-1).view(torch.int32)[0] ^= 1
        return wrong
