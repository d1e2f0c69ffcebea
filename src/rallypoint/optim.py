"""torch.optim optimizers on shards: one table of them, on flat shards and on parts of tables."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rallypoint.config import GroupSettings, JobConfig, settings_applied
from rallypoint.core import optimizer as specs
from rallypoint.core.optimizer import SGD, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop, of_shard
from rallypoint.core.schedule import rate_at

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


# ---- One table of the optimizers: torch's class of each, how it is built, and what it keeps for each parameter ----
#
# All but Muon work on each element by itself, so a server may step any piece of a parameter, and gets the bytes that
# torch gets for all of it. Muon gets whole matrices. Tests compare both.


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One of torch's optimizers, or `Latest`."""

    kind: type[torch.optim.Optimizer]  # torch's class
    tensors: frozenset[str]  # the names of the tensors that it keeps, each of the parameter's shape
    numbers: frozenset[str] = frozenset({"step"})  # the names of the numbers that it keeps
    # Use torch's foreach implementation: twice as fast as the for-loop, which is torch's default on a CPU, where it
    # gives the same bytes. None: torch's class has only one.
    foreach: bool | None = True
    begun: bool = False  # torch makes the state with the optimizer, not with the first step


_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
_TABLE: dict[type[Optimizer], OptimizerRow] = {
    specs.AdamW: OptimizerRow(torch.optim.AdamW, _MOMENTS),
    specs.Adam: OptimizerRow(torch.optim.Adam, _MOMENTS),
    specs.SGD: OptimizerRow(torch.optim.SGD, frozenset({"momentum_buffer"}), frozenset()),
    specs.Adagrad: OptimizerRow(torch.optim.Adagrad, frozenset({"sum"}), begun=True),
    specs.NAdam: OptimizerRow(torch.optim.NAdam, _MOMENTS, frozenset({"step", "mu_product"}), foreach=False),
    specs.RAdam: OptimizerRow(torch.optim.RAdam, _MOMENTS, foreach=False),
    specs.Adamax: OptimizerRow(torch.optim.Adamax, frozenset({"exp_avg", "exp_inf"})),
    specs.Adadelta: OptimizerRow(torch.optim.Adadelta, frozenset({"square_avg", "acc_delta"})),
    specs.RMSprop: OptimizerRow(torch.optim.RMSprop, frozenset({"square_avg", "momentum_buffer", "grad_avg"})),
    specs.ASGD: OptimizerRow(torch.optim.ASGD, frozenset({"ax"}), frozenset({"step", "eta", "mu"}), foreach=False),
    specs.Muon: OptimizerRow(torch.optim.Muon, frozenset({"momentum_buffer"}), frozenset(), foreach=None),
    specs.Sum: OptimizerRow(Latest, frozenset(), frozenset(), foreach=None),
}
NUMBERS = frozenset[str]().union(*(row.numbers for row in _TABLE.values()))
_NOT_TORCHS = frozenset(  # set for each group, or in another way
    {"lr", "weight_decay", "fused", "adamw", "adamw_betas", "adamw_eps"}
)


def row_of(spec: Optimizer) -> OptimizerRow:
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


# ---- A model whose server is in its own process: the server steps it where it lies ----


class Pieces:
    """The words of one shard that lie in several tensors: `parts`, each 1-D fp32, one after the other.

    Gradients may be views of one another, or of a script's own tensors: the first change makes new memory.

    Attributes:
        finite: it is known that each value is finite. Two threads that look one after the other wait for each other.
    """

    def __init__(self, parts: Iterable[torch.Tensor]) -> None:
        self.parts, self._own, self.finite = list(parts), False, False

    def owned(self) -> Pieces:
        """Copy the words, unless the memory is `own`."""
        if not self._own:
            self.parts, self._own = [part.clone() for part in self.parts], True
        return self

    def mul_(self, factor: float) -> Pieces:
        self.finite = False
        if self._own:
            torch._foreach_mul_(self.parts, factor)
        else:
            self.parts, self._own = list(torch._foreach_mul(self.parts, factor)), True
        return self

    def add_(self, other: Pieces) -> Pieces:
        """Add another shard's words, cut in the same way."""
        self.finite = False
        if self._own:
            torch._foreach_add_(self.parts, other.parts)
        else:
            self.parts, self._own = list(torch._foreach_add(self.parts, other.parts)), True
        return self

    def copy_(self, values: torch.Tensor) -> Pieces:
        for part, new in zip(self.parts, torch.split(values, [part.numel() for part in self.parts]), strict=True):
            part.copy_(new)
        return self

    def flat(self) -> torch.Tensor:
        """The words as one vector: a copy, if there are several parts."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)


class InPlace:
    """What a worker and the server of its own process share where no byte has to move (`python train.py` alone).

    The shard's words on the server *are* the model's parameters, and its gradient is what autograd has made. Frames
    between the two carry no payload. The server only prepares its updates, and the worker's main thread makes all of
    them when it installs the version: until then the model holds the version before, whatever breaks, and nothing
    changes it beside the script's code.
    """

    def __init__(self) -> None:
        # By shard. Empty: the job's parameters are sent as between processes. Set before the job is proposed.
        self.parameters: dict[int, Pieces] = {}
        # By shard, the sum over all replicas, which the server takes. Set before the frame that says so.
        self.gradients: dict[int, Pieces] = {}
        self.means: dict[int, Pieces] = {}  # by shard, where the worker steps: what the server has made of the gradient
        self.updates: dict[int, Callable[[], None]] = {}  # by shard; the server's thread sets them

    def install(self) -> None:
        """Make the updates. For the main thread, when all shards have the version."""
        for shard in list(self.updates):
            self.updates.pop(shard)()


# ---- torch.optim optimizers on one shard. The learning rate comes from the job's schedule ----


def build_optimizer(
    spec: Optimizer, groups: list[tuple[list[torch.nn.Parameter], GroupSettings]]
) -> torch.optim.Optimizer:
    """The torch optimizer of `spec` over these groups. Its learning rate is 0: set it before every step.

    The bytes are those of torch's default (the for-loop), however the vector is cut into shards. Those of the fused
    kernels are not: they round the tail of a tensor differently.
    """
    row = row_of(spec)
    how: dict[str, Any] = {} if row.foreach is None else {"foreach": row.foreach}
    if getattr(spec, "fused", False):
        how = {"fused": True}
    param_groups = [{"params": params, "weight_decay": settings.weight_decay} for params, settings in groups]
    return row.kind(param_groups, **{"lr": 0.0, **arguments_of(spec), **how})


def number(value: float) -> torch.Tensor:
    """A number of an optimizer's state, such as `step`, as torch keeps it: float64 where that is the default type of
    the process, else fp32; on the CPU."""
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    return torch.tensor(value, dtype=dtype, device="cpu")


def load_exactly(
    optimizer: torch.optim.Optimizer, state: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[Any] = ()
) -> None:
    """Load the state of its parameters, and the `groups`, if there are any. Each tensor keeps its type: torch casts all
    to their parameter's, also numbers (NAdam's `mu_product`), and a parameter may be in bf16."""
    order = [p for group in optimizer.param_groups for p in group["params"]]
    known = {index: state[p] for index, p in enumerate(order) if p in state}
    optimizer.load_state_dict({"state": known, "param_groups": groups or optimizer.state_dict()["param_groups"]})
    for index, came in known.items():
        loaded = optimizer.state[order[index]]
        for key, value in came.items():
            if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def import_for_optimizers() -> None:
    """Import what torch imports only with a process's first optimizer: its compiler, about a second.

    A server calls it while workers come. Later the first snapshot, and with it the job, would wait for it.
    """
    importlib.import_module("torch._dynamo")


class ShardOptimizer:
    """Owns one shard's fp32 master weights (`master`, shape (words,)) and their optimizer state."""

    def __init__(
        self, config: JobConfig, group: int, words: int, columns: int = 0, pieces: Pieces | None = None
    ) -> None:
        """`columns`: see `core.layout.Shard`. Only Muon steps a matrix as such. `pieces`: what to step, in place of a
        master of its own.
        """
        self._config, self._spec = config, of_shard(config.applied, columns)
        self._settings = settings_applied(config, group)
        if pieces is None:
            self.master = torch.zeros(words, dtype=torch.float32, device="cpu")
            pieces = Pieces([self.master])
        matrix = isinstance(self._spec, Muon)
        self._parameters = [torch.nn.Parameter(p.view(-1, columns) if matrix else p) for p in pieces.parts]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._optimizer = build_optimizer(self._spec, [(self._parameters, self._settings)])
        self._schedule, self._rounds = config.applied_schedule, config.rounds

    def apply(self, gradient: torch.Tensor | Pieces, step: int, times: float = 1.0, reductions: int = 0) -> None:
        """Make update number `step` (from 0) with the mean gradient (fp32, shape (words,), or cut like the master).

        The learning rate is the schedule's, after so many `reductions`, times `times` and the group's scale.
        """
        rate = rate_at(self._schedule, step, self._rounds)
        if (plateau := self._config.evaluation.plateau) is not None:
            rate = plateau.reduced(rate, reductions)
        self._optimizer.param_groups[0]["lr"] = times * rate * self._settings.lr_scale
        parts = gradient.parts if isinstance(gradient, Pieces) else [gradient]
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The optimizer's state: tensors of shape (words,), not copied if the shard is in one piece, and numbers.

        See `state_names`.
        """
        kept = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        scalars = {n: float(v) for n, v in kept[0].items() if n in NUMBERS and v is not None}
        names = [n for n, t in kept[0].items() if n not in NUMBERS and t is not None]
        return {name: Pieces(one[name].view(-1) for one in kept).flat() for name in names}, scalars

    def load(self, arrays: dict[str, torch.Tensor], scalars: dict[str, float]) -> None:
        """Replace the optimizer's state, by a copy of one from another server or a snapshot."""
        kept: dict[str, torch.Tensor] = {name: tensor.clone() for name, tensor in arrays.items()}
        if kept and isinstance(self._spec, RMSprop):  # a setting may have changed what it keeps
            tensors, _ = state_names(self._spec)[-1]
            zeros = torch.zeros(sum(self._sizes), dtype=torch.float32, device="cpu")
            kept = {name: kept.get(name, zeros.clone()) for name in sorted(tensors)}
        cut = {name: torch.split(values, self._sizes) for name, values in kept.items()}
        self._optimizer.state.clear()
        for place, parameter in enumerate(self._parameters):
            own = {name: parts[place].view(parameter.shape) for name, parts in cut.items()}
            own |= {name: number(value) for name, value in scalars.items()}
            if own:
                self._optimizer.state[parameter] = own


# ---- torch.optim optimizers on one part of a table. An update changes only the rows of its gradient ----
#
# Adam is lazy, as in torch.optim.SparseAdam: a row's moments decay only when the row has a gradient, while the bias
# corrections count all updates. Adagrad's sums of squares grow only for rows with a gradient, as in torch. Weight
# decay, decoupled (AdamW) or as a part of the gradient, is applied only to the rows of the gradient.


def refusal(spec: Optimizer) -> str:
    """Why this optimizer cannot update tables, as a sentence; "" if it can."""
    if not isinstance(spec, AdamW | Adam | SGD | Adagrad):
        return (
            f"torch's {type(spec).__name__} has no form that leaves the other rows alone: use rp.SGD without momentum, "
            "rp.AdamW, rp.Adam or rp.Adagrad"
        )
    if isinstance(spec, SGD) and spec.momentum:
        return (
            "momentum would move every row at every step: use rp.SGD without momentum, rp.AdamW, rp.Adam or rp.Adagrad"
        )
    if isinstance(spec, (AdamW, Adam)) and not spec.eps > 0:
        return f"eps is {spec.eps}: torch's SparseAdam, which updates tables, needs a positive one"
    return ""


def row_state_names(spec: Optimizer) -> list[tuple[set[str], set[str]]]:
    """The possible names of a part's state, each as (tensors, numbers): before its first step, and after."""
    return state_names(spec)[: 1 if isinstance(spec, SGD) else None]  # SGD has no momentum here: see `refusal`


class RowsOptimizer:
    """Owns one part's fp32 master rows (`master`, shape (rows, columns)) and their optimizer state."""

    def __init__(self, config: JobConfig, group: int, rows: int, columns: int) -> None:
        self._config, self._spec = config, config.applied
        self._settings: GroupSettings = settings_applied(config, group)
        self._parameter = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32, device="cpu"))
        self._optimizer = _build(self._spec, self._parameter)
        self.master = self._parameter.detach()

    def apply(self, ids: torch.Tensor, values: torch.Tensor, step: int, times: float = 1.0) -> None:
        """Make update number `step` (from 0) with a sparse mean gradient.

        `ids` are the rows (int64, ascending), `values` their gradients (fp32, shape (len(ids), columns)), which are not
        changed. The learning rate is the schedule's, times `times` and the group's scale.
        """
        rate = times * rate_at(self._config.applied_schedule, step, self._config.rounds) * self._settings.lr_scale
        self._optimizer.param_groups[0]["lr"] = rate
        decay = self._settings.weight_decay
        if decay and isinstance(self._spec, AdamW):
            self.master.index_copy_(0, ids, self.master.index_select(0, ids).mul_(1 - rate * decay))
        elif decay:
            values = values.add(self.master.index_select(0, ids), alpha=decay)
        self._parameter.grad = torch.sparse_coo_tensor(
            ids.unsqueeze(0), values, self.master.shape, is_coalesced=True, check_invariants=False
        )
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
            self._optimizer.step()
        self._parameter.grad = None

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The optimizer's state: tensors of shape (rows, columns), not copied, and numbers. See `row_state_names`."""
        kept = self._optimizer.state.get(self._parameter, {})
        shape = self.master.shape
        arrays = {n: t for n, t in kept.items() if isinstance(t, torch.Tensor) and t.shape == shape}
        return arrays, {name: float(v) for name, v in kept.items() if name not in arrays and v is not None}

    def load(self, arrays: dict[str, torch.Tensor], scalars: dict[str, float]) -> None:
        """Replace the optimizer's state, by a copy of one from another server or a snapshot."""
        kept: dict[str, torch.Tensor | int] = {n: t.view_as(self.master).clone() for n, t in arrays.items()}
        counted = number if isinstance(self._spec, Adagrad) else int  # as each torch optimizer stores it
        kept |= {name: counted(value) for name, value in scalars.items()}
        self._optimizer.state.clear()
        if kept:
            self._optimizer.state[self._parameter] = kept


def _build(spec: Optimizer, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    if isinstance(spec, AdamW | Adam):
        return torch.optim.SparseAdam([parameter], lr=1.0, betas=spec.betas, eps=spec.eps)
    if isinstance(spec, SGD):
        return torch.optim.SGD([parameter], lr=1.0, foreach=False)
    assert isinstance(spec, Adagrad)
    return torch.optim.Adagrad([parameter], lr=1.0, foreach=False, **arguments_of(spec))
