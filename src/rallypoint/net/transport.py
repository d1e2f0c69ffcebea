"""What a transport is: reliable ordered byte streams between addresses. TCP and an in-process twin implement it."""

from __future__ import annotations

from typing import Protocol


class Connection(Protocol):
    """One byte stream, both ways. One thread may send while another receives."""

    @property
    def peer(self) -> str:
        """Whom we talk to, for messages."""

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        """Send both, whole and in this order. LinkError when the stream has ended."""

    def recv_into(self, view: memoryview) -> None:
        """Fill `view` exactly. LinkError when the stream ends first."""

    def set_timeout(self, seconds: float | None) -> None:
        """From now on a send or a receive that makes no progress for `seconds` is a LinkError (None: wait)."""

    def set_deadline(self, seconds: float | None) -> None:
        """All that is sent and received within the next `seconds` together: a LinkError after that (None: wait).

        Unlike `set_timeout` a peer that sends a byte now and then cannot put it off.
        """

    def limit_in_flight(self, nbytes: int) -> None:
        """From now on let about `nbytes` wait to be received here; beyond that the other side has to wait."""

    def close(self) -> None:
        """End the stream both ways; whoever is blocked in it gets a LinkError. May be called again."""


class Listener(Protocol):
    """Where connections come in."""

    @property
    def address(self) -> str:
        """What to pass to `connect`."""

    def accept(self) -> Connection:
        """The next connection. LinkError once the listener is closed."""

    def close(self) -> None:
        """Stop listening; a blocked `accept` gets a LinkError. May be called again."""


class Transport(Protocol):
    """A way to carry byte streams."""

    def listen(self, address: str) -> Listener:
        """Listen at `address`. AddressInUse when somebody does already."""

    def connect(self, address: str, timeout: float) -> Connection:
        """Connect to `address`. LinkError when nobody answers within `timeout` seconds."""

    def private(self, address: str) -> bool:
        """Can nobody but this machine (or this process) reach `address`?"""


LEAST_IN_FLIGHT = 16 << 10  # bytes; with less a link would wait for every packet


def share_of(nbytes: int, links: int) -> int:
    """Each link's share of the bytes that may be on their way to one machine; 0 when there is no limit."""
    return max(LEAST_IN_FLIGHT, nbytes // max(1, links)) if nbytes else 0
