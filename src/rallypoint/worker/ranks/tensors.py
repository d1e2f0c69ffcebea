"""A model that is spread over the ranks of one worker, and the leader's tensors and contributions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import torch
from torch.distributed.fsdp import FSDPModule

from rallypoint.config import JobConfig, group_of, matrices_of, ranks_of
from rallypoint.core.layout import Entry, Layout, Shard, TensorSpec, build_layout
from rallypoint.core.ranks import HeldTensor, Spread, check_shared, spread_over
from rallypoint.data.dataset import MapDataset
from rallypoint.data.identity import identity_of
from rallypoint.errors import DataError, ModelError
from rallypoint.parallel import (
    OrderKind,
    Parallel,
    RankGroup,
    RankOrder,
    check_data_parallel,
    data_part,
    gradient_of,
    held_of,
    local_of,
    tied_names,
    wire_dtype,
)
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.locked import Rewound
from rallypoint.worker.ranks.followers import GRADIENTS, Figures
from rallypoint.worker.sources.hooks import DeltaSource
from rallypoint.worker.tensors import ModelTensors, Placed, check_apart, check_kept, hash_of, part_of, refuse_unmatched

# ---- A model that is spread over the ranks of one worker, on each of them ----


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
        own = {name: local_of(tensor) for name, tensor in self._tensors.items()}
        parameters = {name for name, tensor in self._tensors.items() if isinstance(tensor, torch.nn.Parameter)}
        trained = {name for name in parameters if self._tensors[name].requires_grad}
        frozen = {name: own[name] for name in own if name in parameters - trained}
        buffers = {name: own[name] for name in own if name not in parameters}
        check_kept(frozen, buffers)
        check_apart({name: own[name] for name in own if name in trained}, {**frozen, **buffers})
        self.part = data_part(parallel.mesh, parallel.dimensions)
        check_data_parallel(self._tensors, parallel.dimensions)
        holdings = [
            msgspec.json.decode(data, type=list[HeldTensor]) for data in group.all_bytes(msgspec.json.encode(held))
        ]
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


# ---- The leader's tensors: the unsharded model's places in the flat vector, filled from all ranks ----


class LeaderTensors(ModelTensors):
    """The same as `ModelTensors` for a worker of one process; here each method moves blocks between the ranks.

    `parameters` and `buffers` are this rank's own only. The other ranks take part: see `RankRun`.
    """

    def __init__(self, spread: SpreadModel, config: JobConfig) -> None:
        self._spread = spread
        self.layout = layout_of(spread, config)
        self.tables, self.tied, self.device, self.carried = [], spread.tied, spread.device, None
        self.frozen = {t.name: here for t in spread.frozen if (here := spread.here(t)) is not None}
        self.spread = in_order(spread, self.layout)
        own = [Placed(here, entry) for entry, tensor in self.spread if (here := spread.here(tensor)) is not None]
        self.parameters = [placed for placed in own if placed.entry.spec.group >= 0]
        self.buffers = [placed for placed in own if placed.entry.spec.group < 0]
        self._frozen = {tensor.name: hash_of(self._whole(tensor)) for tensor in spread.frozen}
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self._last: tuple[str, torch.Tensor] = "", nothing  # the tensor that `part` has put together last

    def at(self, where: str) -> None:
        """Say what the leader does with the other ranks: see `RankGroup.at`."""
        self._spread.group.at(where)

    def frozen_hashes(self) -> dict[str, str]:
        return self._frozen

    @torch.no_grad()
    def part(self, start: int, stop: int) -> torch.Tensor:
        return part_of([(entry, partial(self._words, entry, tensor)) for entry, tensor in self.spread], start, stop)

    def _words(self, entry: Entry, tensor: Spread) -> torch.Tensor:
        if self._last[0] != tensor.name:
            place = [one.name for _, one in self.spread].index(tensor.name)
            self.at(f"collecting the values of {tensor.name}")
            self._spread.group.tell(RankOrder(OrderKind.VALUE, place))
            self._last = tensor.name, self._whole(tensor)
            self.at("")
        return Placed(self._last[1], entry).words()

    def _whole(self, tensor: Spread) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=wire_dtype(tensor), device="cpu")
        self._spread.collect_value(tensor, whole)
        return whole

    def gradient(self, tensor: Spread) -> torch.Tensor:
        """Return a parameter's gradient of all ranks, which collect it at the same time: 1-D fp32, on the CPU."""
        whole = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        self._spread.collect_gradient(tensor, whole)
        return whole.view(-1)

    def buffer_words(self, entry: Entry, tensor: Spread) -> torch.Tensor:
        """Return a buffer as its words of the flat vector (1-D fp32), which all ranks collect at the same time."""
        return Placed(self._whole(tensor), entry).words()

    def read_from(self, vector: torch.Tensor, buffers: torch.Tensor | None = None) -> None:
        """Copy parameters and buffers from a flat fp32 CPU vector to all ranks, which have been told of it."""
        self._last = "", torch.empty(0, dtype=torch.float32, device="cpu")
        self.at("handing a version out to the other ranks")
        for entry, tensor in self.spread:
            like = torch.empty(tensor.shape if tensor.role == "buffer" else 0, dtype=wire_dtype(tensor), device="cpu")
            self._spread.hand_out(tensor, Placed(like, entry).of(vector))
        self.at("")


def layout_of(spread: SpreadModel, config: JobConfig) -> Layout:
    """Return the layout of the unsharded model: the same on all ranks."""
    specs = [TensorSpec(t.name, t.shape, t.dtype, group_of(config, t.name, len(t.shape))) for t in spread.trained]
    refuse_unmatched(config, specs)
    specs += [TensorSpec(t.name, t.shape, t.dtype, -1) for t in spread.buffers]
    return build_layout(specs, config.network.shard_bytes, ranks_of(config), [], matrices_of(config, specs))


def in_order(spread: SpreadModel, layout: Layout) -> list[tuple[Entry, Spread]]:
    """Return the tensors in the order of the layout, in which all ranks go through them."""
    by_name = {tensor.name: tensor for tensor in (*spread.trained, *spread.buffers)}
    return [(entry, by_name[entry.spec.name]) for entry in layout.entries]


# ---- The leader's contributions: after a replica's last micro-batch, its gradient comes from all ranks ----


class RankGradients(DeltaSource):
    """The gradient as contribution, of a worker of several ranks.

    Gradients stay on the ranks until the replica's end: a script's pipeline schedule may run several backward passes,
    and nobody may be unwound alone in the middle of a collective. A replica that has become stale is computed to its
    end, and what comes of it is dropped.
    """

    def __init__(self, tensors: LeaderTensors, exchange: Exchange, figures: Figures) -> None:
        self._tensors, self._exchange, self._figures = tensors, exchange, figures
        layout = exchange.layout
        self._shards_of = [
            [layout.shards[index] for index in layout.shards_touching(entry.start, entry.stop)] if spread.pieces else []
            for entry, spread in tensors.spread
        ]

    def end_replica(self, replica: int) -> None:
        """Collect the gradients of all ranks, and the buffers if this replica contributes them, and send them.

        Raises Rewound, after all ranks have sent theirs, when they are stale.
        """
        self._tensors.at(GRADIENTS)
        try:
            self._send(replica)
        finally:
            self._tensors.at("")

    def _send(self, replica: int) -> None:
        pushes = self._exchange.replica
        pushes.weigh(self._figures.weight, finite=self._figures.finite)
        sends = _Sends(self._exchange)
        buffers = pushes.buffers_of(replica)
        for (entry, spread), shards in zip(self._tensors.spread, self._shards_of, strict=True):
            if entry.spec.group >= 0:
                sends.write(shards, entry.start, self._tensors.gradient(spread))
            elif buffers:
                sends.write(shards, entry.start, self._tensors.buffer_words(entry, spread))
            else:
                self._tensors.buffer_words(entry, spread)
        sends.end()
        pushes.computed()

    def abandon(self) -> None:
        self._exchange.replica.abandoned()


class _Sends:
    """Writes one replica's gradient into slots, tensor by tensor in the order of the layout, and sends full slots."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._claimed: dict[int, bool] = {}
        self._stale: Rewound | None = None

    def write(self, shards: Sequence[Shard], start: int, words: torch.Tensor) -> None:
        """Write a tensor's words (1-D fp32), which begin at word `start` of the vector, into these shards' slots."""
        for shard in shards:
            if self._claim(shard):
                first, last = max(start, shard.start), min(start + len(words), shard.stop)
                self._exchange.buffer[first:last].copy_(words[first - start : last - start])
        for shard in shards[:-1]:  # whatever comes next begins in or after the last one
            self._full(shard.index)

    def end(self) -> None:
        """Send the last slots. Raises Rewound if the replica has become stale."""
        for shard in list(self._claimed):
            self._full(shard)
        if self._stale is not None:
            raise self._stale

    def _claim(self, shard: Shard) -> bool:
        if self._stale is None and shard.index not in self._claimed:
            try:
                claimed = self._claimed[shard.index] = self._exchange.replica.claim(shard.index)
            except Rewound as stale:
                self._stale = stale
                return False
            if claimed and shard.role == "buffers":
                self._exchange.buffer[shard.start : shard.stop].zero_()  # there are gaps between buffers
        return self._stale is None and self._claimed[shard.index]

    def _full(self, shard: int) -> None:
        if self._claimed.get(shard) and self._stale is None:
            self._claimed[shard] = False
            self._exchange.replica.filled(shard)
