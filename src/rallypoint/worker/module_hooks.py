"""Hooks on the model's modules: they end a forward pass whose result is stale, and bring its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ForwardChecks:
    """Calls `check` with each module before its forward, while it is `on`. An error from `check` ends the forward.

    Compiled code makes no checks: the hook would be compiled with it, and whatever `check` reads would be a constant.
    """

    def __init__(self, model: torch.nn.Module, check: Callable[[torch.nn.Module], None]) -> None:
        self._model, self._hook = model, Hook(check)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def on(self) -> None:
        """Put a hook on every module that the model has now; TorchScript takes none."""
        self.off()
        modules = [module for module in self._model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._handles = [module.register_forward_pre_hook(self._hook) for module in modules]

    def off(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class Hook:
    """The hook of one run on one worker. A copied or saved model gets `nothing` in its place."""

    def __init__(self, check: Callable[[torch.nn.Module], None]) -> None:
        self._check = check

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._check(module)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _the_hook_of_a_copy, ()


def nothing(*_: Any) -> None:
    """Do nothing: the hook of a model that was copied or saved during a run."""


def _the_hook_of_a_copy() -> Callable[..., None]:
    return nothing


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
