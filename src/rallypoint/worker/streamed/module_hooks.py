"""Hooks around the forward of every module of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rallypoint.worker.loop.forward_checks import Hook


class ModuleHooks:
    """Calls `enter` with each module before its forward, and `leave` after it, also when it raises an error."""

    def __init__(
        self, model: torch.nn.Module, enter: Callable[[torch.nn.Module], None],
        leave: Callable[[torch.nn.Module], None],
    ) -> None:  # fmt: skip
        self._model, self._enter, self._leave = model, Hook(enter), _After(leave)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def on(self) -> None:
        """Put the hooks on every module that the model has now."""
        self.off()
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def off(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _After(Hook):
    def __call__(self, module: torch.nn.Module, arguments: Any, result: Any = None) -> None:
        super().__call__(module, arguments)
