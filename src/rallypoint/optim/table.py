"""One table of the optimizers: torch's class of each, how it is built, and what it keeps for each parameter.

All but Muon work on each element by itself, so a server may step any piece of a parameter, and gets the bytes that
torch gets for all of it. Muon gets whole matrices. Tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rallypoint.core import optimizer as specs
from rallypoint.core.optimizer import Optimizer

# ---- What servers do in place of an optimizer where a version is a sum: the sum becomes the parameters ----


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


@dataclass(frozen=True, slots=True)
class Row:
    """One of torch's optimizers, or `Latest`.

    Attributes:
        kind: torch's class.
        tensors: the names of the tensors that it keeps, each of the parameter's shape.
        numbers: the names of the numbers that it keeps.
        foreach: use torch's foreach implementation: twice as fast as the for-loop, which is torch's default on a CPU,
            where it gives the same bytes. None: torch's class has only one.
        begun: torch makes the state with the optimizer, not with the first step.
    """

    kind: type[torch.optim.Optimizer]
    tensors: frozenset[str]
    numbers: frozenset[str] = frozenset({"step"})
    foreach: bool | None = True
    begun: bool = False


_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
_TABLE: dict[type[Optimizer], Row] = {
    specs.AdamW: Row(torch.optim.AdamW, _MOMENTS),
    specs.Adam: Row(torch.optim.Adam, _MOMENTS),
    specs.SGD: Row(torch.optim.SGD, frozenset({"momentum_buffer"}), frozenset()),
    specs.Adagrad: Row(torch.optim.Adagrad, frozenset({"sum"}), begun=True),
    specs.NAdam: Row(torch.optim.NAdam, _MOMENTS, frozenset({"step", "mu_product"}), foreach=False),
    specs.RAdam: Row(torch.optim.RAdam, _MOMENTS, foreach=False),
    specs.Adamax: Row(torch.optim.Adamax, frozenset({"exp_avg", "exp_inf"})),
    specs.Adadelta: Row(torch.optim.Adadelta, frozenset({"square_avg", "acc_delta"})),
    specs.RMSprop: Row(torch.optim.RMSprop, frozenset({"square_avg", "momentum_buffer", "grad_avg"})),
    specs.ASGD: Row(torch.optim.ASGD, frozenset({"ax"}), frozenset({"step", "eta", "mu"}), foreach=False),
    specs.Muon: Row(torch.optim.Muon, frozenset({"momentum_buffer"}), frozenset(), foreach=None),
    specs.Sum: Row(Latest, frozenset(), frozenset(), foreach=None),
}
NUMBERS = frozenset[str]().union(*(row.numbers for row in _TABLE.values()))
_NOT_TORCHS = frozenset(  # set for each group, or in another way
    {"lr", "weight_decay", "fused", "adamw", "adamw_betas", "adamw_eps"}
)


def row_of(spec: Optimizer) -> Row:
    """The optimizer's row."""
    return _TABLE[type(spec)]


def arguments_of(spec: Optimizer) -> dict[str, Any]:
    """The settings that torch's class takes under the same name: all but the rate, the decay and `fused`."""
    return {name: getattr(spec, name) for name in spec.__struct_fields__ if name not in _NOT_TORCHS}


def state_names(spec: Optimizer) -> list[tuple[set[str], set[str]]]:
    """The possible names of a shard's state, each as (tensors, numbers): before its first step, and after."""
    row = row_of(spec)
    tensors = set(row.tensors)
    if isinstance(spec, specs.RMSprop):
        tensors -= {*([] if spec.momentum else ["momentum_buffer"]), *([] if spec.centered else ["grad_avg"])}
    after = (tensors, set(row.numbers))
    return [after] if row.begun else [(set(), set()), after]
