"""What a store's worker has asked for, and what has come."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

Value = tuple[int, bytearray]  # a version of a shard, and its bytes
_NO_ROWS = memoryview(b"")


@dataclass(slots=True, weakref_slot=True, eq=False)
class Asked:
    """A request for one shard. Who wants the answer keeps it: a request that nobody keeps needs no memory.

    Attributes:
        number: its name on the wire.
        rows: of a part of a table, the payload that names the rows.
        nbytes: the length of the answer.
        value: the answer; None until it is here.
    """

    number: int
    rows: memoryview
    nbytes: int
    value: Value | None = None


@dataclass(slots=True)
class Answers:
    """Values that have come. The exchange's lock guards it.

    Attributes:
        asked: by number, the requests that somebody keeps.
        with_push: by shard, the value that came with the last acknowledgement of a push.
    """

    asked: weakref.WeakValueDictionary[int, Asked] = field(default_factory=weakref.WeakValueDictionary)
    with_push: dict[int, Value] = field(default_factory=dict)

    def came(self, numbers: Iterable[int], version: int, data: bytearray) -> None:
        """A value answers these requests. (An answer of another length is of a generation before.)"""
        for number in numbers:
            if (asked := self.asked.get(number)) is not None and asked.nbytes == len(data):
                asked.value = version, data

    def rows_of(self, number: int) -> memoryview:
        """The payload of a pull with that number."""
        asked = self.asked.get(number)
        return _NO_ROWS if asked is None else asked.rows

    def fits(self, number: int, nbytes: int) -> bool:
        """Is this the length of that request's answer, if anybody still wants it?"""
        asked = self.asked.get(number)
        return asked is None or asked.nbytes == nbytes

    def take_with_push(self, shard: int, version: int) -> bytearray | None:
        """Take the value that came with a push, if none newer than this version is known."""
        came = self.with_push.pop(shard, None)
        return None if came is None or came[0] < version else came[1]

    def clear(self) -> None:
        """A new generation: what was asked for has no answer any more."""
        self.asked.clear()
        self.with_push.clear()
