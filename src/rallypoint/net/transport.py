"""The interface of a transport: reliable, ordered byte streams between addresses.

`tcp.py` implements it with TCP, `tls/` with TLS over TCP, `rdma/` with TCP and NIXL for large payloads, `inproc.py`
within one process, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Secured:
    """What TLS has proved about a connection. Without TLS: nothing.

    Attributes:
        role: the role that the other side's certificate names; "" without TLS.
        binding: a digest of this very connection: both sides have the same, and nobody else has it, not even one with
            the same certificates; b"" without TLS.
    """

    role: str = ""
    binding: bytes = b""


PLAIN = Secured()


class Connection(Protocol):
    """One byte stream in both directions. One thread may send while another one receives.

    With TLS the two sides shake hands when it is first used. So the first send, too, waits for the other side's first
    send or receive.
    """

    @property
    def peer(self) -> str:
        """The name of the other side, for messages."""

    @property
    def secured(self) -> Secured:
        """What TLS has proved. Blocks until it has. UnprovenPeer (dialer), AccessDenied (listener) if it cannot."""

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        """Send `head`, then `payload`, completely; blocks until they are sent. LinkError when the stream has ended."""

    def recv_into(self, view: memoryview) -> None:
        """Block until `view` is filled completely. LinkError when the stream ends first."""

    def set_timeout(self, seconds: float | None) -> None:
        """From now on, a send or receive without progress for `seconds` raises LinkError. None: no limit."""

    def set_deadline(self, seconds: float | None) -> None:
        """Limit the total time: sends and receives raise LinkError from `seconds` after now. None: no limit.

        Unlike with `set_timeout`, a peer cannot extend it by sending a byte now and then.
        """

    def limit_in_flight(self, nbytes: int) -> None:
        """From now on, buffer only about `nbytes` received bytes here; the other side waits when the buffer is full. 0:
        as many as the system likes, as before the first call."""

    def pace(self, rate: int) -> None:
        """From now on, send at most `rate` bytes a second; 0: as fast as the other side takes them. A system that
        cannot do that does nothing."""

    def share_port(self, part: float) -> None:
        """From now on this connection gets `part` (0 to 1) of what this process's port is measured to carry: it is
        paced. With 0 it shares the port no more, and is not paced. A system that cannot do that does nothing."""

    def finish(self) -> None:
        """Send no more. What was sent still arrives, and then the other side sees the end; receiving goes on."""

    def close(self) -> None:
        """End the stream in both directions. Any thread may call it, more than once. What was sent last may be lost.

        A thread that is blocked in `send` or `recv_into` gets a LinkError.
        """


@runtime_checkable
class Upgradable(Protocol):
    """A connection that has a better way for large payloads, for two sides that have proved themselves.

    Both sides name it in the greeting. If they name the same, both call `upgrade` at the same point of the stream.
    """

    @property
    def offers(self) -> str:
        """The name of that way, with its version."""

    def upgrade(self, sending: bytes, receiving: bytes) -> None:
        """Use it from here on, if it works; blocks until both sides know. The keys are this side's, of 32 bytes.

        LinkError when the stream ends, or what comes was changed on its way.
        """


class Listener(Protocol):
    """Accepts connections at one address."""

    @property
    def address(self) -> str:
        """The address to pass to `connect`."""

    def accept(self) -> Connection:
        """Block until the next connection arrives, and return it. LinkError once the listener is closed."""

    def close(self) -> None:
        """Stop listening. May be called more than once. A blocked `accept` gets a LinkError."""


class Transport(Protocol):
    """Makes byte streams between addresses."""

    @property
    def secure(self) -> bool:
        """Do its connections encrypt, and prove the role of the other side?"""

    def listen(self, address: str) -> Listener:
        """Listen at `address`. AddressInUse if another listener has it."""

    def connect(self, address: str, timeout: float) -> Connection:
        """Connect to `address`. LinkError if nobody answers within `timeout` seconds."""

    def private(self, address: str) -> bool:
        """Is `address` reachable only from this machine (or this process)?"""


FIRST_PIECE = 1 << 20  # bytes; most payloads are not longer


def receive_bytes(connection: Connection, count: int, first_piece: int = FIRST_PIECE) -> bytearray:
    """Receive `count` bytes into new memory. LinkError when the stream ends first.

    The memory grows as the bytes come, at most to twice what has come: a length that nothing follows costs no more than
    `first_piece` bytes.
    """
    data, filled = bytearray(min(count, first_piece)), 0
    while filled < count:
        with memoryview(data) as whole, whole[filled:] as rest:
            connection.recv_into(rest)
        filled = len(data)
        data += bytes(min(count - filled, filled))
    return data


LEAST_IN_FLIGHT = 16 << 10  # bytes; with less, a link would wait after every packet
LEAST_PACE = 16 << 10  # bytes a second


class Limits(NamedTuple):
    """How much a machine's links may carry, or one of them (`shared`): `in_flight` bytes to the machine at once, and
    `pace` bytes a second from it; or `part` of what its port is measured to carry. 0: no limit."""

    in_flight: int = 0
    pace: int = 0
    part: float = 0.0

    @classmethod
    def of(cls, in_flight: int, pace_mbit: float, *, measured: bool = False) -> Limits:
        """Those of a whole machine, with the pace in Mbit/s; with 0 the port is `measured`, or nothing is paced."""
        return cls(in_flight, round(pace_mbit * 1e6 / 8), float(measured and not pace_mbit))

    def shared(self, links: int, part: float | None = None) -> Limits:
        """The share of each of `links` links; one that carries another `part` of all bytes gets that of the port."""
        links = max(1, links)
        in_flight = max(LEAST_IN_FLIGHT, self.in_flight // links) if self.in_flight else 0
        pace = max(LEAST_PACE, self.pace // links) if self.pace else 0
        return Limits(in_flight, pace, self.part * (1 / links if part is None else part))

    def set_on(self, connection: Connection, before: Limits | None = None) -> None:
        """Set them on a connection on which `before` are set (None: it is new)."""
        if self.in_flight != (0 if before is None else before.in_flight):
            connection.limit_in_flight(self.in_flight)
        changed = self.part != (0.0 if before is None else before.part)
        if changed and not self.part:
            connection.share_port(0.0)
        if self.pace != (0 if before is None else before.pace):
            connection.pace(self.pace)
        if changed and self.part:  # last: a port that is known paces at once
            connection.share_port(self.part)
