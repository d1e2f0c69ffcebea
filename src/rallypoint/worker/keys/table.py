"""A key that is a table: its rows are on the servers only, and are pushed and pulled by their numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rallypoint.codec.base import encode_gradient, encode_ids
from rallypoint.core.layout import Layout
from rallypoint.errors import UsageError
from rallypoint.worker.keys.dense import Reading, Rows, in_fp32
from rallypoint.worker.sources.tables import parts_of

_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class TableKey:
    """A key of `rows` by `columns`, which nobody holds as a whole."""

    def __init__(self, index: int, layout: Layout) -> None:
        spec = layout.tables[index]
        self.name, self.shape = spec.name, spec.shape
        self._parts = [part.index for part in parts_of(layout, index)]

    @property
    def shards(self) -> list[int]:
        """The shards that are its parts. A push goes to all of them: to most of them, few bytes."""
        return list(self._parts)

    def first(self, values: torch.Tensor) -> dict[int, memoryview]:
        """UsageError: servers make a table's first rows."""
        raise UsageError(f"a first value for key {self.name}, which is a table: servers make its rows (table_std=)")

    def begun(self) -> dict[int, memoryview]:
        """By shard, what is sent so that servers make the first rows."""
        return dict.fromkeys(self._parts, memoryview(b""))

    def pushed(self, values: torch.Tensor, rows: Rows) -> dict[int, memoryview]:
        """By shard, the bytes of a push. A row that is named twice gets the sum of its values."""
        ids = self._numbers(rows)
        if tuple(values.shape) != (*ids.shape, self.shape[1]):
            raise UsageError(
                f"values of shape {list(values.shape)} for rows {list(ids.shape)} of key {self.name}: "
                f"{[*ids.shape, self.shape[1]]} are wanted"
            )
        unique, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
        sums = torch.zeros(len(unique), self.shape[1], dtype=torch.float32, device="cpu")
        sums.index_add_(0, inverse, in_fp32(values, self.name).reshape(-1, self.shape[1]))
        split = self._split(unique)
        return {
            shard: encode_gradient(unique[place] // len(self._parts), sums[place]) for shard, place in split.items()
        }

    def reading(self, rows: Rows) -> Reading:
        """What a pull of these rows asks for."""
        ids = self._numbers(rows)
        unique, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
        places = {shard: place for shard, place in self._split(unique).items() if len(place)}
        payloads = {shard: encode_ids(unique[place] // len(self._parts)) for shard, place in places.items()}
        return RowsReading(self.name, (*ids.shape, self.shape[1]), places, payloads, inverse)

    def _split(self, unique: torch.Tensor) -> dict[int, torch.Tensor]:
        """For each part: the positions of its rows among these row numbers, which ascend."""
        owner = unique % len(self._parts)
        return {shard: torch.nonzero(owner == number).view(-1) for number, shard in enumerate(self._parts)}

    def _numbers(self, rows: Rows) -> torch.Tensor:
        if rows is None:
            raise UsageError(f"key {self.name} is a table, of which nobody holds all: say which rows with rows=")
        try:
            ids = torch.as_tensor(rows, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:  # ragged, not numbers, beyond 64 bits
            raise UsageError(f"rows of key {self.name} are whole numbers, in a tensor or a list: {error}") from None
        if not ids.numel():
            ids = ids.to(torch.int64)  # an empty list has no dtype of its own
        if ids.dtype not in _WHOLE:
            raise UsageError(f"rows of key {self.name} are whole numbers, not {str(ids.dtype).removeprefix('torch.')}")
        ids = ids.to(torch.int64)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape[0]:
            wrong, most = int(ids.min()) if int(ids.min()) < 0 else int(ids.max()), self.shape[0]
            raise UsageError(f"there is no row {wrong} of key {self.name}, which has {most}: they count from 0")
        return ids


class RowsReading(Reading):
    """A pull of rows. Each is asked for once, and given wherever it is named: `inverse` has its place for each name."""

    def __init__(
        self, name: str, shape: tuple[int, ...], places: Mapping[int, torch.Tensor], payloads: Mapping[int, memoryview],
        inverse: torch.Tensor,
    ) -> None:  # fmt: skip
        super().__init__(name, shape, places, shape[-1], payloads)
        self._inverse = inverse

    def _arranged(self, values: torch.Tensor) -> torch.Tensor:
        return values[self._inverse]
