"""How a worker tells the process that reads ahead where it is, without ever waiting: see `ahead`.

A write of at most PIPE_BUF bytes goes into a pipe wholly or not at all; a longer one may be cut off where the pipe is
full. So a position goes in parts. One that lacks a part is not believed: the next position tells it too.
"""

from __future__ import annotations

import select
import struct
from multiprocessing.connection import Connection

import msgspec

from rallypoint.data.places import Place

# What is loaded now, the worker's replicas, how often the loop waited; True: nothing is loaded yet, so fetch this too
Position = tuple[Place, tuple[int, ...], int, bool]

_HEADER = struct.Struct("<HH")  # the number of a part, and how many there are
_LENGTH = 4  # bytes that Connection writes in front of each part, in the same write
_MOST = select.PIPE_BUF - _LENGTH - _HEADER.size


def send_whole(pipe: Connection, position: Position) -> None:
    """Send it through a pipe that does not block. BlockingIOError if not all of it went in."""
    data = msgspec.msgpack.encode(position)
    parts = [data[start : start + _MOST] for start in range(0, len(data), _MOST)]
    for number, part in enumerate(parts):
        pipe.send_bytes(_HEADER.pack(number, len(parts)) + part)


class Received:
    """Puts positions together again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def after(self, message: bytes) -> Position | None:
        """The position that is whole with this message; None if it is not whole yet, or lacks a part."""
        number, count = _HEADER.unpack_from(message)
        if number == 0:
            self._parts = []
        if number != len(self._parts):  # it lacks one: the rest of it is not used
            return None
        self._parts.append(message[_HEADER.size :])
        whole = number == count - 1
        return msgspec.msgpack.decode(b"".join(self._parts), type=Position) if whole else None
