"""A dense key: a tensor, cut into shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rallypoint.core.layout import Entry, Layout
from rallypoint.errors import UsageError
from rallypoint.net.pool import bytes_of

Rows = torch.Tensor | Sequence[int] | None
Wanted = Mapping[int, tuple[memoryview, int]]  # by shard: the payload of a pull, and the bytes of its answer
_NO_ROWS = memoryview(b"")


class DenseKey:
    """A key whose value is one fp32 tensor."""

    def __init__(self, entry: Entry, layout: Layout) -> None:
        self.name, self.shape = entry.spec.name, entry.spec.shape
        touched = layout.shards_touching(entry.start, entry.stop)
        self._ranges = {
            index: slice(layout.shards[index].start - entry.start, layout.shards[index].stop - entry.start)
            for index in touched
        }

    @property
    def shards(self) -> list[int]:
        """The shards that it is made of."""
        return list(self._ranges)

    def first(self, values: torch.Tensor) -> dict[int, memoryview]:
        """By shard, the bytes of a first value. UsageError for a tensor of another shape."""
        return self.pushed(values, None)

    def pushed(self, values: torch.Tensor, rows: Rows) -> dict[int, memoryview]:
        """By shard, the bytes of a push: a copy. UsageError for a tensor of another shape."""
        self._no_rows(rows)
        if tuple(values.shape) != self.shape:
            shapes = f"a tensor of shape {list(values.shape)} for key {self.name}, which has {list(self.shape)}"
            raise UsageError(shapes)
        vector = in_fp32(values, self.name).reshape(-1)
        return {shard: bytes_of(vector[place].clone()) for shard, place in self._ranges.items()}

    def reading(self, rows: Rows) -> Reading:
        """What a pull asks for."""
        self._no_rows(rows)
        return Reading(self.name, self.shape, self._ranges)

    def _no_rows(self, rows: Rows) -> None:
        if rows is not None:
            raise UsageError(
                f"rows of key {self.name}, which is dense: declare it as torch.empty(rows, columns, device='meta')"
            )


class Reading:
    """A pull of one key: what is asked of each shard, and where its answer belongs in a tensor of `shape`.

    `places`: by shard, the positions of its values among all that is asked for, seen as a matrix whose rows have
    `columns` elements.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], places: Mapping[int, slice | torch.Tensor], columns: int = 1,
        payloads: Mapping[int, memoryview] | None = None,
    ) -> None:  # fmt: skip
        self.name, self._shape, self._places, self._columns = name, shape, places, columns
        self._payloads = payloads or {}

    @property
    def wanted(self) -> Wanted:
        """What is asked for."""
        return {
            shard: (self._payloads.get(shard, _NO_ROWS), 4 * self._columns * _count(place))
            for shard, place in self._places.items()
        }

    def check(self, out: torch.Tensor | None) -> None:
        """Raise UsageError if the answer does not fit into `out`."""
        if out is not None and tuple(out.shape) != self._shape:
            raise UsageError(f"out has shape {list(out.shape)}, and what is pulled of {self.name} {list(self._shape)}")

    def filled(self, parts: Mapping[int, bytearray], out: torch.Tensor | None) -> torch.Tensor:
        """What was asked for, from the bytes of each shard, in `out` if it is given."""
        count = sum(map(_count, self._places.values()))
        values = torch.empty(count, self._columns, dtype=torch.float32, device="cpu")  # whatever the script's defaults
        for shard, data in parts.items():
            values[self._places[shard]] = torch.frombuffer(data, dtype=torch.float32).view(-1, self._columns)
        value = self._arranged(values).view(self._shape)
        if out is None:
            return value
        with torch.no_grad():
            return out.copy_(value)

    def _arranged(self, values: torch.Tensor) -> torch.Tensor:
        return values


def _count(place: slice | torch.Tensor) -> int:
    return int(place.stop - place.start) if isinstance(place, slice) else len(place)


def in_fp32(values: torch.Tensor, name: str) -> torch.Tensor:
    """The values on the CPU, in fp32. UsageError for what has no fp32 form."""
    if values.layout is not torch.strided:
        raise UsageError(
            f"a sparse tensor for key {name}: push a table's rows with rows= and values=, or gradient.to_dense()"
        )
    if values.is_meta:
        raise UsageError(f"a tensor without values (on the meta device) for key {name}")
    if values.is_complex():
        raise UsageError(f"a complex tensor for key {name}: servers keep fp32; use torch.view_as_real")
    return values.detach().to("cpu", torch.float32)
