"""The first values of streamed parameters: those of a model that was built, or made one module at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rallypoint.core.order import derive_seed
from rallypoint.data.randomness import seeded
from rallypoint.errors import NO_SNAPSHOT, JobAborted, ModelError
from rallypoint.worker.tensors import ModelTensors

Init = Callable[[torch.nn.Module], Any]


class FirstValues:
    """Version 0 of a model's parameters and buffers. Main thread only.

    A parameter that has values gives those, until the first version is installed. One without (built on the meta
    device) gets them when it is uploaded: its module is given memory for its own parameters, and
    ``module.reset_parameters()``, then ``init(module)``, fill it. The random generators are seeded from the job's seed
    and the module's name, so that every worker makes the same.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: ModelTensors, made: frozenset[str], seed: int, init: Init | None
    ) -> None:
        """`made` are the names of the parameters without values."""
        self._model, self._tensors, self._made, self._seed, self._init = model, tensors, made, seed, init
        self._last: tuple[str, dict[str, torch.Tensor]] = "", {}  # the module made last, and its parameters
        self._gone = False

    def installed(self) -> None:
        """A version is installed: the values of a model that was built are not kept."""
        self._last = "", {}
        self._gone = any(placed.entry.spec.name not in self._made for placed in self._tensors.parameters)

    @torch.no_grad()
    def words(self, start: int, stop: int) -> torch.Tensor:
        """Words [start, stop) of the flat vector, a new 1-D fp32 CPU tensor; gaps between groups are zero.

        Raises ModelError when nothing initialises a parameter, JobAborted when the values are not kept any more.
        """
        if self._gone:
            raise JobAborted(NO_SNAPSHOT)
        vector = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        for placed in (*self._tensors.parameters, *self._tensors.buffers):
            first, last, entry = max(start, placed.entry.start), min(stop, placed.entry.stop), placed.entry
            if first < last:
                made = entry.spec.name in self._made
                words = self._value(entry.spec.name).reshape(-1) if made else placed.words()
                vector[first - start : last - start].copy_(words[first - entry.start : last - entry.start])
        return vector

    def _value(self, name: str) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        if self._last[0] != owner or not self._last[1]:
            self._last = "", {}  # free it first
            with seeded(derive_seed(self._seed, "init", owner)):
                self._last = owner, initialised(self._model.get_submodule(owner), owner, self._init)
        return self._last[1][leaf]


@torch.no_grad()
def initialised(module: torch.nn.Module, name: str, init: Init | None) -> dict[str, torch.Tensor]:
    """The first values of a module's own parameters, on the CPU. The module is as before when this returns.

    Raises ModelError when nothing initialises one of them.
    """
    before = dict(module._parameters)
    try:
        for leaf, parameter in before.items():
            if parameter is not None:
                values = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device="cpu")
                module._parameters[leaf] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        initialise(module, init)
        found = {leaf: p.detach() for leaf, p in module._parameters.items() if p is not None}
    finally:
        module._parameters.update(before)
    for leaf, value in found.items():
        if value.isnan().any():
            raise ModelError(
                f"{name}.{leaf} was built on the meta device, and nothing gives it first values: "
                f"{type(module).__qualname__} has no reset_parameters() that sets it; give job.train init=, a function "
                "of a module that sets the parameters of the module itself"
            )
    return found


def initialise(module: torch.nn.Module, init: Init | None) -> None:
    """Call ``module.reset_parameters()``, if there is one, then ``init(module)``."""
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    if init is not None:
        init(module)
