"""A model that is spread over the ranks of one worker, on each of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch.distributed.fsdp import FSDPModule

from rallypoint.core.ranks import Held, Spread, check_shared, spread_over
from rallypoint.data.dataset import MapDataset
from rallypoint.data.identity import identity_of
from rallypoint.errors import DataError, ModelError
from rallypoint.parallel.group import RankGroup
from rallypoint.parallel.holdings import (
    Parallel,
    check_data_parallel,
    data_part,
    gradient_of,
    held_of,
    local_of,
    tied_names,
)
from rallypoint.worker.model_checks import check_apart, check_kept


class SpreadModel:
    """This rank's part of the model. Made by all ranks at the same time.

    Attributes:
        group: the ranks.
        trained, frozen, buffers: the tensors of the unsharded model, in its order; on every rank the same.
        tied: further name of a tied tensor -> its name.
        device: of this rank's first tensor.
        part: (which part, of how many) of a replica's batch this rank computes.

    Raises ModelError when the ranks' models do not fit together, UsageError for a wrong `split`.
    """

    def __init__(self, group: RankGroup, model: torch.nn.Module, parallel: Parallel) -> None:
        self.group, self.model = group, model
        _check(model, parallel)
        held, self._tensors = held_of(model)
        self._check_memory()
        self.part = data_part(parallel.mesh, parallel.dimensions)
        check_data_parallel(self._tensors, parallel.dimensions)
        holdings = [msgspec.json.decode(data, type=list[Held]) for data in group.all_bytes(msgspec.json.encode(held))]
        spread = spread_over(holdings, self._order(parallel.unsharded))
        check_shared(spread, group.size, self.part[1])
        self.trained = [tensor for tensor in spread if tensor.role == "trained"]
        self.frozen = [tensor for tensor in spread if tensor.role == "frozen"]
        self.buffers = [tensor for tensor in spread if tensor.role == "buffer"]
        self.tied: dict[str, str] = {}
        for data in group.all_bytes(msgspec.json.encode(tied_names(model, self._tensors))):
            self.tied |= msgspec.json.decode(data, type=dict[str, str])
        first = next(iter(self._tensors.values()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._buffers_at_start: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _check_memory(self) -> None:
        own = {name: local_of(tensor) for name, tensor in self._tensors.items()}
        parameters = {name for name, tensor in self._tensors.items() if isinstance(tensor, torch.nn.Parameter)}
        trained = {name for name in parameters if self._tensors[name].requires_grad}
        frozen = {name: own[name] for name in own if name in parameters - trained}
        buffers = {name: own[name] for name in own if name not in parameters}
        check_kept(frozen, buffers)
        check_apart({name: own[name] for name in own if name in trained}, {**frozen, **buffers})

    def _order(self, unsharded: torch.nn.Module | None) -> list[str]:
        """Return the names of the whole model's tensors; [] if it was not given. All ranks compare theirs."""
        names = None if unsharded is None else [one.name for one in held_of(unsharded)[0]]
        given = self.group.all_bytes(msgspec.json.encode(names))
        for rank, one in enumerate(given):
            if one != given[0]:
                raise ModelError(
                    f"rank {rank} of this worker was given another whole model than rank 0 (or only one of them was "
                    "given any): pass the same rp.Parallel(mesh, unsharded=...) on all ranks"
                )
        return names or []

    def check_data(self, dataset: MapDataset) -> None:
        """Raise DataError if a rank's data set differs from the leader's, as far as that can be seen."""
        found = self.group.all_bytes(msgspec.json.encode(identity_of(dataset)))
        for rank, one in enumerate(found):
            if one != found[0]:
                raise DataError(f"rank {rank} of this worker has another data set than rank 0: load the same on all")

    def here(self, tensor: Spread) -> torch.Tensor | None:
        """Return this rank's tensor (a DTensor where it is sharded); None if another rank has it alone."""
        return self._tensors.get(tensor.name)

    def collect_value(self, tensor: Spread, whole: torch.Tensor | None) -> None:
        """Put a tensor's values together on the leader: see `RankGroup.collect`."""
        here = self.here(tensor)
        self.group.collect(tensor, None if here is None else local_of(here), whole)

    def collect_gradient(self, tensor: Spread, whole: torch.Tensor | None) -> None:
        """Put a parameter's gradient together on the leader, and drop it here. Without a gradient: zeros."""
        here = self.here(tensor)
        gradient = None if here is None else gradient_of(here)
        self.group.collect(tensor, gradient, whole)
        if here is not None:
            here.grad = None

    def hand_out(self, tensor: Spread, whole: torch.Tensor | None) -> None:
        """Copy the leader's values to all ranks: see `RankGroup.hand_out`."""
        here = self.here(tensor)
        self.group.hand_out(tensor, None if here is None else local_of(here), whole)

    def forget_gradients(self) -> None:
        """Drop the gradients of this rank's parameters."""
        for tensor in self._own(self.trained):
            tensor.grad = None

    def keep_buffers(self) -> None:
        """Remember the values of this rank's buffers: every replica starts from them."""
        own = [local_of(tensor) for tensor in self._own(self.buffers)]
        self._buffers_at_start = [(tensor, tensor.clone()) for tensor in own]

    def restore_buffers(self) -> None:
        """Set this rank's buffers to the values of the version."""
        for tensor, kept in self._buffers_at_start:
            tensor.copy_(kept)

    def _own(self, tensors: Sequence[Spread]) -> list[torch.Tensor]:
        return [here for tensor in tensors if (here := self.here(tensor)) is not None]


def _check(model: torch.nn.Module, parallel: Parallel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(
                f"parameter {name} is on the meta device and has no values: give it memory and values before job.train "
                "(model.to_empty(device=...), then initialise), the same on all ranks"
            )
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise ModelError(f"{name} is a table (sparse=True): a worker of several ranks has none; use sparse=False")
        if isinstance(module, FSDPModule) and not parallel.dimensions:
            raise ModelError(
                "the model is sharded by fully_shard, and every rank would compute the same samples: say which "
                'dimension of the mesh splits the batch, job.train(..., parallel=rp.Parallel(mesh, split="dp"))'
            )
