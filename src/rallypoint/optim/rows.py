"""torch.optim optimizers on one part of a table. An update changes only the rows of its gradient.

Adam is lazy, as in torch.optim.SparseAdam: a row's moments decay only when the row has a gradient, while the bias
corrections count all updates. Adagrad's sums of squares grow only for rows with a gradient, as in torch. Weight decay,
decoupled (AdamW) or as a part of the gradient, is applied only to the rows of the gradient.
"""

from __future__ import annotations

import torch

from rallypoint.config import GroupSettings, JobConfig, settings_applied
from rallypoint.core.optimizer import SGD, Adagrad, Adam, AdamW, Optimizer
from rallypoint.core.schedule import rate_at
from rallypoint.optim.flat import number


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


def state_names(spec: Optimizer) -> list[tuple[set[str], set[str]]]:
    """The possible names of a part's state, each as (tensors, numbers): before its first step, and after."""
    before: tuple[set[str], set[str]] = (set(), set())
    match spec:
        case AdamW() | Adam():
            return [before, ({"exp_avg", "exp_avg_sq"}, {"step"})]
        case SGD():
            return [before]
        case Adagrad():
            return [({"sum"}, {"step"})]  # torch makes it with the optimizer
        case _:
            raise AssertionError(f"no table has {spec}: see `refusal`")


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
        """The optimizer's state: tensors of shape (rows, columns), not copied, and numbers. See `state_names`."""
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
    match spec:
        case AdamW() | Adam():
            return torch.optim.SparseAdam([parameter], lr=1.0, betas=spec.betas, eps=spec.eps)
        case SGD():
            return torch.optim.SGD([parameter], lr=1.0, foreach=False)
        case Adagrad():
            return torch.optim.Adagrad(
                [parameter], lr=1.0, lr_decay=spec.lr_decay, eps=spec.eps, foreach=False,
                initial_accumulator_value=spec.initial_accumulator_value,
            )  # fmt: skip
        case _:
            raise AssertionError(f"no table has {spec}: see `refusal`")
