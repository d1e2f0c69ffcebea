"""One micro-batch of one replica, as the user's loop sees it."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from rallypoint.errors import UsageError
from rallypoint.worker.exchange.exchange import Rewound

if TYPE_CHECKING:
    from rallypoint.worker.loop.run import Run


class Micro:
    """``with micro:`` seeds the replica's randomness; `backward` computes gradients and sends them on their way.

    Attributes:
        batch: the collated samples, on the model's device.
        step, replica, index: where in the job this is.
    """

    def __init__(self, run: Run, *, step: int, replica: int, index: int, batch: Any) -> None:
        self._run = run
        self.step, self.replica, self.index, self.batch = step, replica, index, batch
        self._finished = self.abandoned = False

    def __enter__(self) -> Micro:
        self._run.enter_micro(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if isinstance(error, Rewound):
            self.abandoned = True  # the loop will yield what is to be computed instead
            return True
        if error is None and not self._finished:
            raise UsageError(
                f"step {self.step}, replica {self.replica}: the micro-batch ended without micro.backward(loss)"
            )
        return False

    def backward(self, loss: torch.Tensor, *, weight: float = 1.0) -> None:
        """Back-propagate `loss` (a scalar tensor: the mean over this micro-batch); call it once.

        `weight` is what this replica counts in the mean over replicas (say, its number of tokens); all micro-batches
        of one replica must pass the same. UsageError when it is called twice or the weight is not positive;
        NonFiniteLoss when the loss is not finite and the job is to stop on that.
        """
        if self._finished:
            raise UsageError(f"step {self.step}, replica {self.replica}: micro.backward came twice: add the losses")
        if loss.dim() != 0:
            raise UsageError(f"micro.backward needs a scalar loss, not one of shape {list(loss.shape)}: take its mean")
        if not (weight > 0 and math.isfinite(weight)):
            raise UsageError(f"a weight of {weight}: weights are positive and finite")
        self._finished = True
        self._run.backward_micro(self, loss, weight)
