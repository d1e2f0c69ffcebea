"""What a backward pass needs of the forward pass: kept, computed once more (`recompute`), or moved to the host."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from rallypoint.config import JobConfig
from rallypoint.errors import ModelError


class Activations:
    """The settings `recompute` and `offload` on one model. Main thread only.

    With ``recompute="blocks"`` the blocks of the model (see `blocks_of`) keep only their inputs; their forward pass
    runs once more in the backward pass (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"), by torch's
    own non-reentrant checkpoint, with the same random numbers: gradients are the same. With ``offload="activations"``
    everything that the forward pass keeps on a GPU is copied to the host, and back when it is needed.

    Raises ModelError when the model has no blocks, or some that cannot run twice.
    """

    def __init__(self, model: torch.nn.Module, config: JobConfig, device: torch.device) -> None:
        self._blocks = list(blocks_of(model)) if config.recompute == "blocks" else []
        self._moves, self._pinned = config.offload == "activations", device.type == "cuda"
        self._entered: Any = None
        for block in self._blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def enter(self) -> None:
        """A forward pass begins."""
        if self._moves:
            self._entered = save_on_cpu(pin_memory=self._pinned)
            self._entered.__enter__()

    def leave(self) -> None:
        """It is over, also by an error; called outside of `enter`, this does nothing."""
        if (entered := self._entered) is not None:
            self._entered = None
            entered.__exit__(None, None, None)

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
            'recompute="blocks" finds no blocks in the model: they are parts of one class in a torch.nn.ModuleList or '
            "Sequential, at least two of them"
        )
    for name, module in model.named_modules():
        if id(module) in inside and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f'recompute="blocks" would run {name} twice, and its statistics would move twice: use GroupNorm or '
                "LayerNorm in blocks, or leave recompute out"
            )
    yield from found.values()
