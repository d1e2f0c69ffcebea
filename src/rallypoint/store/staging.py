"""Copies of shards on their way to the store, in reused memory.

A server copies a shard right before it changes the shard, and workers wait for that. Fresh memory would make the copy
several times as slow, because the system must find and clear each page first.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from weakref import WeakValueDictionary

import numpy as np

from rallypoint.store.record import Array, ShardRecord

KEPT_BYTES = 512 << 20


class Staging:
    """Lends memory to copies and takes it back; any thread may do either. Keeps at most `KEPT_BYTES` unused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[str, int], list[Array]] = {}
        self._lent: WeakValueDictionary[int, Array] = WeakValueDictionary()  # what nobody gives back is freed
        self._kept = 0

    def copy(self, record: ShardRecord) -> ShardRecord:
        """Return the record with arrays of its own, valid until `give_back`."""
        return replace(
            record, arrays={name: self._copy(array) for name, array in record.arrays.items()},
            scalars=dict(record.scalars),
        )  # fmt: skip

    def give_back(self, record: ShardRecord) -> None:
        """Take back the memory of a copy that nobody reads any more.

        Does nothing for a record that is no copy from here.
        """
        with self._lock:
            for array in record.arrays.values():
                if self._lent.pop(id(array), None) is not None and self._kept + array.nbytes <= KEPT_BYTES:
                    self._free.setdefault((array.dtype.name, array.size), []).append(array)
                    self._kept += array.nbytes

    def _copy(self, array: Array) -> Array:
        copy = self._take(array)
        np.copyto(copy, array)
        return copy

    def _take(self, like: Array) -> Array:
        with self._lock:
            if free := self._free.get((like.dtype.name, like.size)):
                taken = free.pop()
                self._kept -= taken.nbytes
            else:
                taken = np.empty_like(like)
            self._lent[id(taken)] = taken
        return taken
