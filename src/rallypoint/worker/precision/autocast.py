"""Autocast around the script's code: forward passes and evaluations in bf16 or fp16, backward passes outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from rallypoint.config import JobConfig

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Autocast:
    """`torch.autocast` on the model's device, as `precision` says; with "fp32" it does nothing.

    Main thread only, as autocast belongs to a thread. `enter` and `leave` are for ``with micro:``, which has no body to
    put into a context manager.
    """

    def __init__(self, config: JobConfig, device: torch.device) -> None:
        self._type, self._device = _TYPES.get(config.precision), device.type
        self._entered: Any = None

    def enter(self) -> None:
        """Begin autocast."""
        if self._type is not None:
            self._entered = torch.autocast(self._device, dtype=self._type)
            self._entered.__enter__()

    def leave(self) -> None:
        """End what `enter` has begun, if it has begun anything. Drops the weights that autocast has cast."""
        if (entered := self._entered) is not None:
            self._entered = None
            entered.__exit__(None, None, None)

    @contextmanager
    def on(self) -> Iterator[None]:
        """The body runs with autocast."""
        with nullcontext() if self._type is None else torch.autocast(self._device, dtype=self._type):
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """The body runs without autocast, as torch recommends for backward passes: they use the forward's types."""
        with nullcontext() if self._type is None else torch.autocast(self._device, enabled=False):
            yield
