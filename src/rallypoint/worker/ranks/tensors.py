"""The leader's tensors: the unsharded model's places in the flat vector, filled from all ranks and copied to all."""

from __future__ import annotations

import torch

from rallypoint.config import JobConfig, group_of, matrices_of, ranks_of
from rallypoint.core.layout import Entry, Layout, TensorSpec, build_layout
from rallypoint.core.ranks import Spread
from rallypoint.parallel.group import Kind, Order, wire_dtype
from rallypoint.worker.ranks.spread import SpreadModel
from rallypoint.worker.tensors import ModelTensors, Placed, hash_of


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
        own = [
            Placed(here, entry) for entry, tensor in self.spread if (here := spread.here(tensor)) is not None
        ]  # fmt: skip
        self.parameters = [placed for placed in own if placed.entry.spec.group >= 0]
        self.buffers = [placed for placed in own if placed.entry.spec.group < 0]
        self._frozen = self._hashes()
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self._last: tuple[str, torch.Tensor] = "", nothing  # the tensor that `part` has put together last

    def at(self, where: str) -> None:
        """Say what the leader does with the other ranks: see `RankGroup.at`."""
        self._spread.group.at(where)

    def frozen_hashes(self) -> dict[str, str]:
        """Return a hash of every frozen parameter's bytes, whole."""
        return self._frozen

    def _hashes(self) -> dict[str, str]:
        found = {}
        for tensor in self._spread.frozen:
            whole = torch.empty(tensor.shape, dtype=wire_dtype(tensor), device="cpu")
            self._spread.collect_value(tensor, whole)
            found[tensor.name] = hash_of(whole)
        return found

    @torch.no_grad()
    def part(self, start: int, stop: int) -> torch.Tensor:
        """Words `start` to `stop` of the flat vector, as a new 1-D fp32 CPU tensor; gaps between groups are zero."""
        vector = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        for entry, tensor in self.spread:
            first, last = max(start, entry.start), min(stop, entry.stop)
            if first < last:
                words = Placed(self._value(tensor), entry).words()
                vector[first - start : last - start].copy_(words[first - entry.start : last - entry.start])
        return vector

    def _value(self, tensor: Spread) -> torch.Tensor:
        if self._last[0] != tensor.name:
            place = [one.name for _, one in self.spread].index(tensor.name)
            self.at(f"collecting the values of {tensor.name}")
            self._spread.group.tell(Order(Kind.VALUE, place))
            whole = torch.empty(tensor.shape, dtype=wire_dtype(tensor), device="cpu")
            self._spread.collect_value(tensor, whole)
            self.at("")
            self._last = tensor.name, whole
        return self._last[1]

    def gradient(self, tensor: Spread) -> torch.Tensor:
        """Return a parameter's gradient of all ranks, which collect it at the same time: 1-D fp32, on the CPU."""
        whole = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        self._spread.collect_gradient(tensor, whole)
        return whole.view(-1)

    def buffer_words(self, entry: Entry, tensor: Spread) -> torch.Tensor:
        """Return a buffer as its words of the flat vector (1-D fp32), which all ranks collect at the same time."""
        whole = torch.empty(tensor.shape, dtype=wire_dtype(tensor), device="cpu")
        self._spread.collect_value(tensor, whole)
        return Placed(whole, entry).words()

    def read_from(self, vector: torch.Tensor) -> None:
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
    specs += [TensorSpec(t.name, t.shape, t.dtype, -1) for t in spread.buffers]
    return build_layout(specs, config.shard_bytes, ranks_of(config), [], matrices_of(config, specs))


def in_order(spread: SpreadModel, layout: Layout) -> list[tuple[Entry, Spread]]:
    """Return the tensors in the order of the layout, in which all ranks go through them."""
    by_name = {tensor.name: tensor for tensor in (*spread.trained, *spread.buffers)}
    return [(entry, by_name[entry.spec.name]) for entry in layout.entries]
