"""A connection over TCP whose large payloads go by NIXL, from the moment at which both sides have proved themselves.

Before that it is a TCP connection: nobody who has proved nothing makes this process parse what NIXL says of memory, or
gets a place to write to. `upgrade` is called by the greeting (`handshake.py`), on both sides at the same point of the
stream:

    both sides   description of my ring, and a MAC      ->     each loads the other's, and tries it: it writes its edge
    both sides   whether that has worked, and a MAC     ->     both yes: records from here on; else TCP as before

The MACs have keys of this connection. So the descriptions are the other member's own.
"""

from __future__ import annotations

import hmac
import logging
import struct
import threading
import time
from threading import local

from rallypoint.errors import LinkError
from rallypoint.net.keys import expand
from rallypoint.net.rdma.agent import Agent, Agents, Memory, Remote
from rallypoint.net.rdma.rings import PAGE, Layout, Rings
from rallypoint.net.tcp import TcpConnection
from rallypoint.net.transport import PLAIN, Secured, receive_bytes
from rallypoint.observe.lines import Sparingly

log = logging.getLogger("rallypoint")

OFFER = "nixl/1"  # both sides say the same, or use TCP
_MAC_BYTES = 32
_LONGEST = 64 << 10  # bytes of a description
_HEAD = struct.Struct("<QQ")  # where the memory is, the ring's size; then the description
_LONGEST_RING = 1 << 30
_LABEL = b"rallypoint/nixl"
_BUSY = 64  # so often a wait only lets other threads run; then it sleeps
_NAPS_S = (2e-5, 1e-3)  # from, to
_TRIES_S = 5.0  # for the first write


class _Waits(local):
    """When this thread's wait began."""

    began = 0.0


class NixlConnection:
    """A Connection over `stream`, and by NIXL once `upgrade` has succeeded. `ring`: bytes of this side's ring."""

    secured: Secured = PLAIN

    def __init__(self, stream: TcpConnection, agents: Agents, ring: int, lines: Sparingly) -> None:
        self._stream, self._agents, self._ring, self._lines = stream, agents, ring, lines
        self._lock = threading.Lock()
        self._users, self._closed = 0, False  # threads inside `send` and `recv_into`
        self._agent: Agent | None = None
        self._memory: Memory | None = None
        self._remote = ""
        self._made: Rings | None = None  # to be tried
        self._rings: Rings | None = None  # the same, set last
        self._timeout: float | None = None
        self._deadline: float | None = None
        self._paced, self._window = False, ring
        self._waits = _Waits()

    @property
    def peer(self) -> str:
        return self._stream.peer

    @property
    def offers(self) -> str:
        """What both sides have to name in their greeting so that `upgrade` is called."""
        return OFFER

    @property
    def upgraded(self) -> bool:
        """Do large payloads go by NIXL?"""
        return self._rings is not None

    # ---- from TCP to NIXL ----

    def upgrade(self, sending: bytes, receiving: bytes) -> None:
        """Agree with the other side, which does the same, and use NIXL for what is sent next; else stay with TCP.

        The keys are this side's of this connection. No other thread may use it meanwhile. LinkError when the stream
        ends or the other side has not sent what it should: NIXL's own troubles are only said.
        """
        self._enter()
        try:
            keys = expand(sending, _LABEL), expand(receiving, _LABEL)
            layout = Layout(self._ring)
            description = self._described(layout)
            self._say(keys[0], description)
            rings = self._try(self._heard(keys[1]), layout) if description else None
            if not description:
                self._heard(keys[1])
            self._say(keys[0], b"yes" if rings is not None else b"no")
            if self._heard(keys[1]) == b"yes" and rings is not None:
                self._rings = rings
                log.info("large payloads to and from %s go by NIXL", self.peer)
            if self._rings is None:
                self._give_back()
        finally:
            self._leave()

    def _described(self, layout: Layout) -> bytes:
        """What the other side needs to write into this side's ring; b"" if there can be none."""
        try:
            self._agent = self._agents.taken()
            self._memory = self._agent.memory(layout.nbytes)
            # Before the other side knows where it is, for it may write its edge as soon as it does.
            self._memory.view[layout.edge : layout.pieces] = bytes(layout.pieces - layout.edge)
            description = self._agent.described(self._memory)
        except Exception as error:
            self._say_once(error)
            return b""
        return _HEAD.pack(self._memory.address, layout.ring) + description

    def _try(self, said: bytes, layout: Layout) -> Rings | None:
        """Write into the other side's ring for the first time. None if there is none, or that does not work."""
        if len(said) <= _HEAD.size:
            return None
        address, ring = _HEAD.unpack_from(said)
        if not 0 < ring <= _LONGEST_RING or ring % PAGE:
            raise LinkError(f"{self.peer} says that its ring has {ring} bytes: that is none")
        assert self._agent is not None
        assert self._memory is not None
        deadline, self._deadline = self._deadline, min(self._deadline or 1e18, time.monotonic() + _TRIES_S)
        try:
            self._remote = self._agent.load(said[_HEAD.size :])
            self._made = rings = Rings(
                self._stream, self._agent, self._memory, layout, Remote(self._remote, address), Layout(ring),
                self._pause,
            )  # fmt: skip
            rings.limit(self._window)
            rings.grant()
        except LinkError as error:
            self._say_once(error)
            return None
        finally:
            self._deadline = deadline
        return rings

    def _say_once(self, error: Exception) -> None:
        self._lines.warn(f"no RDMA with {self.peer}: {error}; TCP carries all of it", key="no RDMA")

    def _say(self, key: bytes, data: bytes) -> None:
        self._stream.send(len(data).to_bytes(4, "little") + data + hmac.digest(key, data, "sha256"))

    def _heard(self, key: bytes) -> bytes:
        size = int.from_bytes(receive_bytes(self._stream, 4), "little")
        if size > _LONGEST:
            raise LinkError(f"{self.peer} describes its memory with {size} bytes: at most {_LONGEST} are allowed")
        data, mac = bytes(receive_bytes(self._stream, size)), bytes(receive_bytes(self._stream, _MAC_BYTES))
        if not hmac.compare_digest(hmac.digest(key, data, "sha256"), mac):
            raise LinkError(f"what {self.peer} says of its memory was changed on the way")
        return data

    # ---- bytes ----

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self._enter()
        try:
            if self._rings is None:
                self._stream.send(head, payload)
            else:
                self._rings.send(head, payload, by_ring=not self._paced)
        finally:
            self._leave()

    def recv_into(self, view: memoryview) -> None:
        self._enter()
        try:
            (self._stream if self._rings is None else self._rings).recv_into(view)
        finally:
            self._leave()

    def _pause(self, tries: int) -> None:
        """Wait a moment, the `tries`-th time in a row. LinkError when the wait is over."""
        now = time.monotonic()
        if tries == 0:
            self._waits.began = now
        if self._closed:
            raise LinkError(f"the link to {self.peer} is closed")
        late = self._timeout is not None and now - self._waits.began > self._timeout
        if late or (self._deadline is not None and now > self._deadline):
            raise LinkError(f"the link to {self.peer} broke: its memory could not be written in time")
        time.sleep(0 if tries < _BUSY else min(_NAPS_S[1], _NAPS_S[0] * (tries - _BUSY + 1)))

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise LinkError(f"the link to {self.peer} is closed")
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._give_back()

    def _give_back(self) -> None:
        """No thread uses the agent any more, and none will."""
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._remote:
            agent.forget(self._remote)
        if self._memory is not None:
            agent.release(self._memory, in_use=self._made is not None and self._made.stuck)
        self._agents.given_back()

    # ---- as of TCP ----

    def set_timeout(self, seconds: float | None) -> None:
        self._timeout = seconds
        self._stream.set_timeout(seconds)

    def set_deadline(self, seconds: float | None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._timeout = seconds
        self._stream.set_deadline(seconds)

    def limit_in_flight(self, nbytes: int) -> None:
        self._window = min(nbytes or self._ring, self._ring)
        if self._rings is not None:
            self._rings.limit(self._window)
        self._stream.limit_in_flight(nbytes)

    def pace(self, rate: int) -> None:
        self._paced = bool(rate)  # the kernel paces TCP; nothing paces writes
        self._stream.pace(rate)

    def share_port(self, part: float) -> None:
        """Does nothing: nothing measures or paces writes."""

    def finish(self) -> None:
        self._stream.finish()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            unused = not self._users
        self._stream.close()
        if unused:
            self._give_back()
