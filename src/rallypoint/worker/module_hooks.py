"""Hooks on the model's modules, and what backward keeps of a forward pass."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rallypoint.config import JobConfig
from rallypoint.errors import ModelError

# ---- Hooks on the model's modules: they end a forward pass whose result is stale, and bring its parameters ----


class ModuleHooks:
    """Calls `enter` with each module before its forward, and `leave` after it, also when it raises an error, while it
    is `on`. An error from `enter` ends the forward.

    Compiled code calls neither: hooks would be compiled with it, and whatever they read would be a constant.
    """

    def __init__(
        self, model: torch.nn.Module, enter: Callable[[torch.nn.Module], None],
        leave: Callable[[torch.nn.Module], None] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._enter, self._leave = model, Hook(enter), None if leave is None else Hook(leave)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def on(self) -> None:
        """Put the hooks on every module that the model has now; TorchScript takes none."""
        self.off()
        for module in self._model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_forward_pre_hook(self._enter))
                if self._leave is not None:
                    self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class Hook:
    """The hook of one run on one worker. A copied or saved model gets `nothing` in its place."""

    def __init__(self, check: Callable[[torch.nn.Module], None]) -> None:
        self._check = check

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
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


# ---- What a backward pass needs of the forward pass: kept, or computed once more (`recompute`) ----


class Activations:
    """The setting `recompute` on one model. Main thread only.

    With ``recompute="blocks"`` the blocks of the model (see `blocks_of`) keep only their inputs; their forward pass
    runs once more in the backward pass (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"), by torch's
    own non-reentrant checkpoint, with the same random numbers: gradients are the same.

    Raises ModelError when the model has no blocks, or some that cannot run twice.
    """

    def __init__(self, model: torch.nn.Module, config: JobConfig) -> None:
        self._blocks = list(blocks_of(model)) if config.memory.recompute == "blocks" else []
        for block in self._blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def remove(self) -> None:
        """The run is over: blocks compute as before."""
        for block in self._blocks:
            del block.forward
        self._blocks = []


def blocks_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the blocks of a model: in each ModuleList or Sequential, the parts that are of one class and have parts of
    their own. Blocks inside of blocks are left out.

    Raises ModelError when there are none, or one updates statistics in its forward pass, which may run only once then.
    """
    found: dict[int, torch.nn.Module] = {}
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        parts = [part for part in module if any(True for _ in part.children())]
        often = Counter(type(part) for part in parts)
        for part in parts:
            if often[type(part)] > 1:
                found[id(part)] = part
                inside.update(id(inner) for inner in part.modules())
    if not found:
        raise ModelError(
            'memory.recompute="blocks" finds no blocks in the model: they are parts of one class in a '
            "torch.nn.ModuleList or Sequential, at least two of them"
        )
    for name, module in model.named_modules():
        if id(module) in inside and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f'memory.recompute="blocks" would run {name} twice, and its statistics would move twice: use '
                "GroupNorm or LayerNorm in blocks, or leave recompute out"
            )
    yield from found.values()
