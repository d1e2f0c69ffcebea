"""A board in shared memory on which each rank of a worker writes what it does, and that it lives.

A collective waits for all ranks, and does not know for which one. The board does: `worker.ranks.watch` reads it on the
leader. Each rank writes its own row only. Nobody depends on a row for what is computed: it may be read half written.

    rank 0   pid 4711   beat 120   for 12 s   collecting gradients of step 3, replica 0
    rank 1   pid 4712   beat 119   for 12 s   computing step 3, replica 0        train.py:68
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

PULSE_THREAD = "rank-pulse"  # it lives as long as the process
PULSE_S = 0.5
_SPOT_AFTER_S = 2.0  # seconds at the same work after which the line of the script is worth reading
_ROW, _TEXT = 1024, 250
_HEAD = struct.Struct("<qQd")  # pid, beat, when it began
_WHERE, _SPOT, _WORDS = 64, 64 + _TEXT, 64 + 2 * _TEXT  # offsets of the texts


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank has written.

    Attributes:
        rank: which; `pid`: its process, 0 before it has begun.
        beat: rises twice a second while the process runs.
        began: when it began with `where`, on the machine's monotonic clock.
        where: what it does within the group; "" if it does nothing for which another rank waits.
        spot: the line of the script, if it has been there for some time.
        words: its last words: the error with which it ends.
    """

    rank: int
    pid: int
    beat: int
    began: float
    where: str
    spot: str
    words: str


class Board:
    """The rows of all ranks, in the memory behind a descriptor (which it duplicates). Any thread may call it."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        if os.fstat(descriptor).st_size < size * _ROW:
            os.ftruncate(descriptor, size * _ROW)
        self._memory = mmap.mmap(descriptor, size * _ROW)
        self._at, self._beats, self._began = rank * _ROW, 0, 0.0
        self.at("")

    def at(self, where: str) -> None:
        """This rank begins with `where`."""
        self._began = time.monotonic()
        self._text(_SPOT, "")
        self._text(_WHERE, where)
        self._head()

    def last_words(self, text: str) -> None:
        """This rank is going to end, and this is why. The first call counts."""
        if not self.rows()[self.rank].words:
            self._text(_WORDS, text)

    def beat(self) -> None:
        """This rank lives: called by its pulse."""
        self._beats += 1
        self._head()
        if time.monotonic() - self._began > _SPOT_AFTER_S:
            self._text(_SPOT, spot_of(sys._current_frames().get(threading.main_thread().ident or 0)))

    def rows(self) -> list[Row]:
        """Return what all ranks have written."""
        return [self._row(rank) for rank in range(self.size)]

    def close(self) -> None:
        """Give up the memory."""
        self._memory.close()

    def _row(self, rank: int) -> Row:
        start = rank * _ROW
        pid, beat, began = _HEAD.unpack_from(self._memory, start)
        where, spot, words = (
            self._memory[start + at : start + at + _TEXT].split(b"\0")[0].decode(errors="replace")
            for at in (_WHERE, _SPOT, _WORDS)
        )
        return Row(rank, pid, beat, began, where, spot, words)

    def _head(self) -> None:
        _HEAD.pack_into(self._memory, self._at, os.getpid(), self._beats, self._began)

    def _text(self, at: int, text: str) -> None:
        start = self._at + at
        self._memory[start : start + _TEXT] = text.encode()[: _TEXT - 1].ljust(_TEXT, b"\0")


def start_pulse(board: Board) -> None:
    """Start the thread that beats, for the rest of this process's life."""

    def beat() -> None:
        while True:
            board.beat()
            time.sleep(PULSE_S)

    threading.Thread(target=beat, name=PULSE_THREAD, daemon=True).start()


def spot_of(frame: FrameType | None) -> str:
    """Return the innermost line of the script's own files in this stack, as ``train.py:68``; "" without one."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = os.path.dirname(os.path.abspath(script)) if script else None
    while frame is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        if folder is not None and os.path.dirname(path) == folder:
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
