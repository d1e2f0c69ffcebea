"""What servers do in place of an optimizer where a version is a sum: the sum becomes the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Latest(torch.optim.Optimizer):
    """Each step replaces the parameters by their gradient. It keeps no state."""

    def __init__(self, params: Iterable[Any], lr: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take the gradients over. `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)
