"""The large payloads of one connection, written by NIXL into a ring of memory that the other side gives for them.

    sender                                                      receiver
      waits until there is room below the edge                    its memory:  [ ring ][ edge ]
      copies a piece into its own registered memory
      WRITE: piece  ------------------------------------------->  ring, at (bytes written before) mod its size
      when the write has arrived, in the TCP stream:
      record (inline, in the ring), inline bytes  ------------->  copies the piece out of the ring
      its edge  <------------------------- WRITE: edge  --------  bytes taken + size of the ring, now and then

All that goes through the stream is in records of 8 bytes and so many inline bytes; order, life and end of the
connection are the stream's. The edge goes by a write too, because a sender must hear of room while nobody receives on
its side. Both counts only rise.

What lies in the ring may change under the receiver's eyes: the other side can write there at any time. So bytes are
copied out first, and whoever called `recv_into` checks the copy (`seal.py`). The sender's place in the ring follows
from what it has sent, and the receiver's from what it has taken, so no record can name a place outside.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable

from rallypoint.errors import LinkError
from rallypoint.net.rdma.agent import Agent, Memory, Remote, Write
from rallypoint.net.tcp import TcpConnection

PIECE = 512 << 10  # bytes of one write; two are on their way: one is copied while the other one travels
LEAST_BYTES = 32 << 10  # shorter payloads go through the stream
_LONGEST = 1 << 30  # inline bytes of one record
_RECORD = struct.Struct("<II")  # inline bytes, bytes in the ring
_EDGE = struct.Struct("<Q")
PAGE = 4096
_LOOK = 32  # moments of a wait, after which we look whether the other side is there
_GONE_S = 2.0  # a write that has not arrived so long after the other side's end never will
Pause = Callable[[int], None]  # waits a moment, the n-th of this wait; LinkError when the wait is over


class Layout:
    """Where things are in the memory of one side, whose ring has `ring` bytes: a multiple of a page."""

    def __init__(self, ring: int) -> None:
        self.ring = ring
        self.edge = ring  # the other side writes here how far we may send
        self.told = ring + _EDGE.size  # what we write there
        self.pieces = ring + PAGE
        self.nbytes = self.pieces + 2 * PIECE


class Rings:
    """Sends and receives in records. One thread may send while another one receives. See the module.

    `there`: the other side's memory, laid out as `theirs`. `pause` is called again and again while a thread waits.
    """

    def __init__(
        self, stream: TcpConnection, agent: Agent, memory: Memory, mine: Layout, there: Remote, theirs: Layout,
        pause: Pause,
    ) -> None:  # fmt: skip
        self._stream, self._agent, self._memory, self._pause = stream, agent, memory, pause
        self._mine, self._there, self._theirs = mine, there, theirs
        self._view = memory.view
        self._window = mine.ring
        self.stuck = False  # a write of ours may still read our memory
        self._slot = 0
        self._sent = self._edge = 0  # of the other side's ring
        self._taken = self._granted = 0  # of ours
        self._inline = self._in_ring = 0  # what is left of the record that came last
        self._record = memoryview(bytearray(_RECORD.size))
        self._granting = threading.Lock()

    # ---- sending: one thread only ----

    def send(self, head: bytes, payload: memoryview | None, *, by_ring: bool = True) -> None:
        """Send both completely. LinkError when that cannot be; then the stream is of no use any more."""
        if payload is None or len(payload) < LEAST_BYTES or not by_ring:
            self._send_inline(head, payload)
            return
        going: tuple[Write, bytes, int] | None = None
        try:
            while len(payload):
                if going is not None and not self._room():
                    last, going = going, None
                    self._arrived(*last)  # only then can the other side make room
                count = min(len(payload), PIECE, self._wait_for_room())
                write = self._begin(payload[:count])
                if going is not None:
                    before, going = going, (write, b"", count)
                    self._arrived(*before)
                else:
                    going = write, head, count
                head, payload = b"", payload[count:]
            if going is not None:
                last, going = going, None
                self._arrived(*last)
        finally:
            if going is not None:
                self._let_go(going[0])

    def _send_inline(self, head: bytes, payload: memoryview | None) -> None:
        size = len(payload) if payload is not None else 0
        if len(head) + size <= _LONGEST:
            self._stream.send(_RECORD.pack(len(head) + size, 0) + head, payload)
            return
        for whole in (memoryview(head), payload or memoryview(b"")):
            for at in range(0, len(whole), _LONGEST):
                piece = whole[at : at + _LONGEST]
                self._stream.send(_RECORD.pack(len(piece), 0), piece)

    def _begin(self, piece: memoryview) -> Write:
        """Copy a piece into memory of our own, and begin to write it into the ring."""
        self._slot ^= 1
        at = self._mine.pieces + self._slot * PIECE
        self._view[at : at + len(piece)] = piece
        write = self._agent.write(self._memory, at, len(piece), self._there, self._sent % self._theirs.ring)
        self._sent += len(piece)
        return write

    def _arrived(self, write: Write, inline: bytes, count: int) -> None:
        """Wait until the write has arrived, and say so in the stream."""
        try:
            self._wait(write.done)
        finally:
            self._let_go(write)
        self._stream.send(_RECORD.pack(len(inline), count) + inline)
        self._stream.count(sent=count)

    def _room(self) -> int:
        """How many bytes may be written at the place that is next, in one piece."""
        (edge,) = _EDGE.unpack_from(self._view, self._mine.edge)
        self._edge = max(self._edge, min(edge, self._sent + self._theirs.ring))
        return min(self._edge - self._sent, self._theirs.ring - self._sent % self._theirs.ring)

    def _wait_for_room(self) -> int:
        tries = 0
        while not (room := self._room()):
            self._pause(tries)
            tries += 1
            if self._stream.hung_up():
                self._stream.send(_RECORD.pack(0, 0))  # it tells whether the other side has only finished, or is gone
        return room

    # ---- receiving: one thread only ----

    def recv_into(self, view: memoryview) -> None:
        """Fill the view. LinkError when the stream ends first."""
        while len(view):
            if self._inline:
                count = min(len(view), self._inline)
                self._stream.recv_into(view[:count])
                self._inline -= count
            elif self._in_ring:
                count = self._take(view)
            else:
                self._stream.recv_into(self._record)
                self._inline, self._in_ring = _RECORD.unpack(self._record)
                continue
            view = view[count:]

    def _take(self, view: memoryview) -> int:
        """Copy what has come next out of the ring. Returns how many bytes."""
        at = self._taken % self._mine.ring
        count = min(len(view), self._in_ring, self._mine.ring - at)
        view[:count] = self._view[at : at + count]
        self._in_ring -= count
        self._taken += count
        self._stream.count(received=count)
        if self._taken + self._window - self._granted >= max(1, self._window // 4):
            try:
                self.grant()
            except LinkError:
                if not self._stream.hung_up():
                    raise  # the other side would wait for ever
        return count

    def limit(self, nbytes: int) -> None:
        """From now on, let about `nbytes` lie in the ring. What was granted before may still come."""
        self._window = max(PAGE, min(nbytes, self._mine.ring))

    def grant(self) -> None:
        """Tell the other side how far it may send. LinkError if it cannot be told."""
        with self._granting:
            edge = max(self._granted, self._taken + self._window)
            _EDGE.pack_into(self._view, self._mine.told, edge)
            write = self._agent.write(self._memory, self._mine.told, _EDGE.size, self._there, self._theirs.edge)
            try:
                self._wait(write.done)
            finally:
                self._let_go(write)
            self._granted = edge

    # ---- both ----

    def _wait(self, happened: Callable[[], bool]) -> None:
        tries, gone = 0, 0.0
        while not happened():
            self._pause(tries)
            tries += 1
            if tries % _LOOK == 0 and self._stream.hung_up():
                gone = gone or time.monotonic()
                if time.monotonic() - gone > _GONE_S:
                    raise LinkError(f"{self._stream.peer} has ended before its memory was written")

    def _let_go(self, write: Write) -> None:
        if not write.end():
            self.stuck = True
