"""Rows of a table and their gradients as payloads: only the rows that a batch uses are sent.

    count (u32), `count` row numbers within the part (u32, ascending), `count` rows of fp32 values

Little-endian, no padding. A payload of no rows is only its count.
"""

from __future__ import annotations

import numpy as np
import torch

from rallypoint.errors import ProtocolError

_ID = np.dtype("<u4")
_HEAD = 4


def gradient_bytes(count: int, columns: int) -> int:
    """Return the bytes of a payload of `count` rows of `columns` values."""
    return _HEAD + count * (_ID.itemsize + 4 * columns)


def encode_gradient(ids: torch.Tensor, values: torch.Tensor, into: memoryview | None = None) -> memoryview:
    """Encode the rows `ids` (1-D int64, ascending) with `values` (fp32, len(ids) by columns).

    Writes `into` memory of `gradient_bytes`, or into new memory if None.
    """
    count, columns = len(ids), values.shape[1]
    data = memoryview(bytearray(gradient_bytes(count, columns))) if into is None else into
    words = np.frombuffer(data, _ID)
    words[0] = count
    words[1 : 1 + count] = ids.numpy()
    words[1 + count :].view("<f4").reshape(count, columns)[:] = values.numpy()
    return data


def check_gradient(data: memoryview, rows: int, columns: int) -> None:
    """Raise ProtocolError unless `data` is a payload for a part of `rows` rows and `columns` columns."""
    words = np.frombuffer(data, _ID, len(data) // _ID.itemsize)
    count = int(words[0]) if len(words) else -1
    if count < 0 or count > rows or len(data) != gradient_bytes(count, columns):
        raise ProtocolError(f"{len(data)} bytes that claim to be {count} rows of a part that has {rows}")
    check_ids(words[1 : 1 + count], rows)


def check_ids(ids: np.ndarray[tuple[int], np.dtype[np.uint32]], rows: int) -> None:
    """Raise ProtocolError unless `ids` are ascending row numbers of a part of `rows` rows."""
    if len(ids) and (int(ids[-1]) >= rows or not bool(np.all(ids[1:] > ids[:-1]))):
        raise ProtocolError(f"row numbers that do not ascend, or not of a part that has {rows} rows")


def decode_gradient(data: memoryview, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row numbers (int64), and the values as a view of `data` (fp32, count by columns).

    Check `data` first.
    """
    words = np.frombuffer(data, _ID)
    count = int(words[0])
    ids = torch.from_numpy(words[1 : 1 + count].astype(np.int64))
    return ids, torch.from_numpy(words[1 + count :].view("<f4")).view(count, columns)


def encode_ids(ids: torch.Tensor) -> memoryview:
    """Return row numbers (1-D int64) as the payload of a pull."""
    return memoryview(bytearray(ids.numpy().astype(_ID).tobytes()))


def decode_ids(data: bytearray, rows: int) -> torch.Tensor:
    """Return the row numbers (int64) of a pull from a part of `rows` rows. Raises ProtocolError if they are invalid."""
    if len(data) % _ID.itemsize:
        raise ProtocolError(f"{len(data)} bytes that claim to be row numbers")
    ids = np.frombuffer(data, _ID)
    check_ids(ids, rows)
    return torch.from_numpy(ids.astype(np.int64))


class RowSum:
    """A sum of gradients of few rows: `ids` (int64, ascending) and `values` (fp32, len(ids) by columns).

    Each row is summed in the order of the `add` calls, so the values equal those of the same sum over the whole table.
    """

    def __init__(self, columns: int) -> None:
        self.ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self.values = torch.empty(0, columns, dtype=torch.float32, device="cpu")

    def add(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Add the rows `ids` (ascending, each once). Later calls may change the memory of `values`."""
        if not len(self.ids):
            self.ids, self.values = ids, values
            return
        union = torch.from_numpy(np.union1d(self.ids.numpy(), ids.numpy()))
        if len(union) > len(self.ids):
            grown = torch.zeros(len(union), self.values.shape[1], dtype=torch.float32, device="cpu")
            grown[torch.searchsorted(union, self.ids)] = self.values
            self.ids, self.values = union, grown
        self.values.index_add_(0, torch.searchsorted(union, ids), values)
