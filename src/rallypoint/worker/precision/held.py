"""Parameters that a worker holds in bf16, while the servers keep them in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rallypoint.config import JobConfig
from rallypoint.worker.tensors import ModelTensors

_LEAST_DIMENSIONS = 2  # norms and biases are few, and BatchNorm wants its own in fp32


class HeldParameters:
    """With ``hold="bf16"``, fp32 parameters of two or more dimensions are bf16 from the first version to the last.

    The model keeps its parameters' objects: only their memory changes. The first weights are uploaded as the script has
    made them, and the last version is installed in fp32. `on_cast` is called after each change. Main thread only.
    """

    def __init__(self, config: JobConfig, tensors: ModelTensors, on_cast: Callable[[], None]) -> None:
        held = config.hold == "bf16"
        self._parameters = [
            placed.tensor for placed in tensors.parameters
            if held and placed.tensor.dim() >= _LEAST_DIMENSIONS and placed.tensor.dtype == torch.float32
        ]  # fmt: skip
        self._on_cast = on_cast
        self._narrow = False

    def before_install(self, *, last: bool) -> None:
        """A version is about to be installed; `last`: it is the job's last."""
        if self._narrow is not last or not self._parameters:
            return
        self._narrow = not last
        for parameter in self._parameters:
            parameter.data = parameter.data.to(torch.bfloat16 if self._narrow else torch.float32)
        self._on_cast()
