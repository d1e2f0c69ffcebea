"""Tables: a model's embeddings whose rows stay on the servers.

A forward pulls the rows of its batch. The rows' gradients are pushed with the replica's other gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from rallypoint.codec.base import RowSum, encode_gradient, encode_ids
from rallypoint.core.layout import Layout, Shard
from rallypoint.errors import ModelError, UsageError
from rallypoint.worker.exchange.exchange import Exchange


class Tables:
    """The tables of one model. It replaces the modules' forwards until `remove`, and collects the rows' gradients."""

    def __init__(self, modules: Sequence[Sequence[torch.nn.Embedding]], exchange: Exchange) -> None:
        """`modules` are the modules that use each of the layout's tables, in the layout's order."""
        self._tables = [_Table(index, exchange) for index in range(len(modules))]
        self._modules = [module for sharing in modules for module in sharing]
        for table, sharing in zip(self._tables, modules, strict=True):
            for module in sharing:
                module.forward = table.lookup  # type: ignore[method-assign]

    def begin_backward(self) -> None:
        """Begin a backward pass. All uses of a row within one pass are summed first, as autograd sums them."""
        for table in self._tables:
            table.settle()

    def push(self) -> None:
        """Push every part of every table for the computed replica; parts without used rows get empty contributions."""
        for table in self._tables:
            table.push()

    def reset(self) -> None:
        """Drop the gradients of the replica in progress."""
        for table in self._tables:
            table.reset()

    def remove(self) -> None:
        """Restore the modules' own forwards."""
        for module in self._modules:
            module.__dict__.pop("forward", None)


class _Table:
    def __init__(self, index: int, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parts = parts_of(exchange.layout, index)
        spec = exchange.layout.tables[index]
        self._name, (self._rows, self._columns) = spec.name, spec.shape
        self.reset()

    def reset(self) -> None:
        self._sum = RowSum(self._columns)
        self._fresh = RowSum(self._columns)  # of the backward pass in progress

    def settle(self) -> None:
        if len(self._fresh.ids):
            self._sum.add(self._fresh.ids, self._fresh.values)
            self._fresh = RowSum(self._columns)

    def lookup(self, input: torch.Tensor) -> torch.Tensor:
        """Like ``torch.nn.Embedding.forward``: `input` (int, any shape) -> its rows, with one dimension more."""
        unique, inverse = torch.unique(input.detach(), return_inverse=True)
        ids = unique.to("cpu", torch.int64)
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self._rows:
            wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
            raise ModelError(f"there is no row {wrong} of {self._name}, which has {self._rows}: they count from 0")
        rows = self._pull(ids).to(input.device)
        if torch.is_grad_enabled():
            rows.requires_grad_().register_post_accumulate_grad_hook(self._keeper(ids))  # type: ignore[no-untyped-call]
        return F.embedding(inverse, rows)

    def _keeper(self, ids: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def keep(rows: torch.Tensor) -> None:
            if rows.grad is not None:  # None: an operation gave these rows no gradient
                self._fresh.add(ids, rows.grad.to("cpu", torch.float32))
                rows.grad = None

        return keep

    def _pull(self, ids: torch.Tensor) -> torch.Tensor:
        if not self._exchange.had_version:
            raise UsageError(f"{self._name} has no values before the first version: use it inside the run's loop")
        places = {part.index: place for part, place in self._split(ids)}
        wanted = {
            shard: (encode_ids(ids[place] // len(self._parts)), 4 * len(place) * self._columns)
            for shard, place in places.items()
        }
        values = torch.empty(len(ids), self._columns, dtype=torch.float32, device="cpu")
        for shard, data in self._exchange.rows.pull(wanted).items():
            values[places[shard]] = torch.frombuffer(data, dtype=torch.float32).view(-1, self._columns)
        return values

    def _split(self, ids: torch.Tensor) -> list[tuple[Shard, torch.Tensor]]:
        """For each part that holds any of the rows `ids`: the part, and the positions of these rows in `ids`."""
        owner = ids % len(self._parts)
        split = [(part, torch.nonzero(owner == number).view(-1)) for number, part in enumerate(self._parts)]
        return [(part, place) for part, place in split if len(place)]

    def push(self) -> None:
        self.settle()
        used = {part.index: place for part, place in self._split(self._sum.ids)}
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        for part in self._parts:
            if self._exchange.replica.claim(part.index):
                place = used.get(part.index, none)
                ids = self._sum.ids[place] // len(self._parts)
                self._exchange.replica.filled_rows(part.index, encode_gradient(ids, self._sum.values[place]))


def parts_of(layout: Layout, table: int) -> list[Shard]:
    """The shards that are the parts of a table, in the parts' order."""
    return [shard for shard in layout.shards if shard.part is not None and shard.part.table == table]
