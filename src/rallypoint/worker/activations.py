"""What a backward pass needs of the forward pass: kept, or computed once more (`recompute`)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator

import torch
from torch.utils.checkpoint import checkpoint

from rallypoint.config import JobConfig
from rallypoint.errors import ModelError


class Activations:
    """The setting `recompute` on one model. Main thread only.

    With ``recompute="blocks"`` the blocks of the model (see `blocks_of`) keep only their inputs; their forward pass
    runs once more in the backward pass (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"), by torch's
    own non-reentrant checkpoint, with the same random numbers: gradients are the same.

    Raises ModelError when the model has no blocks, or some that cannot run twice.
    """

    def __init__(self, model: torch.nn.Module, config: JobConfig) -> None:
        self._blocks = list(blocks_of(model)) if config.recompute == "blocks" else []
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
