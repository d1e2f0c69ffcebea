"""Payloads between their arrival and their use in a sum, and the credits of their senders.

A machine names a payload by its ticket. A sender has credits for a few payloads (DESIGN.md, incast). It gets a credit
back when its payload has been used, or is held within the job's limit of held bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.shard.links import Fence
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.pool import Buffer


@dataclass(slots=True)
class _Arrived:
    shard: int
    channel: Channel
    buffer: Buffer
    nbytes: int
    credited: bool = False


@dataclass(frozen=True, slots=True)
class _Early:
    """A part of a sum that came before its turn: the bytes that count as held, and whose credit is kept back."""

    nbytes: int
    owed: Channel | None


class Tickets:
    """`fence` gives the current view. `limit`: bytes that may be held with their credit returned. Owner thread only."""

    def __init__(self, fence: Fence, limit: int) -> None:
        self._fence, self._limit = fence, limit
        self._arrived: dict[int, _Arrived] = {}
        self._early: dict[tuple[int, int], _Early] = {}  # (shard, first replica)
        self._last = 0
        self._held_bytes = 0

    def issue(self, channel: Channel, header: Header, buffer: Buffer, *, credited: bool = False) -> int:
        """A ticket for a payload. `credited`: its sender needs no credit back (servers do not use credits)."""
        self._last += 1
        self._arrived[self._last] = _Arrived(header.shard, channel, buffer, header.length, credited)
        self._held_bytes += header.length if credited else 0
        return self._last

    def nbytes(self, ticket: int) -> int:
        """The payload's length in bytes."""
        return self._arrived[ticket].nbytes

    def settle(self, ticket: int, *, early: int | None = None) -> Buffer:
        """Take the payload out for its use. The caller must release the buffer.

        `early`: it is a part of a sum that begins at that replica, and lower replicas are missing. Its bytes count as
        held until `on_time`; its sender gets the credit then, or now if the limit allows it.
        """
        arrived = self._arrived.pop(ticket)
        if arrived.credited:
            self._held_bytes -= arrived.nbytes
        if early is not None:
            self._keep_early(arrived, early)
        elif not arrived.credited:
            self.credit(arrived.channel)
        return arrived.buffer

    def _keep_early(self, arrived: _Arrived, at: int) -> None:
        may = arrived.credited or self._held_bytes + arrived.nbytes <= self._limit
        if may and not arrived.credited:
            self.credit(arrived.channel)
        self._early[arrived.shard, at] = _Early(arrived.nbytes if may else 0, None if may else arrived.channel)
        self._held_bytes += arrived.nbytes if may else 0

    def on_time(self, shard: int, at: int) -> None:
        """The part of a sum that begins at replica `at` is not early any more."""
        early = self._early.pop((shard, at))
        self._held_bytes -= early.nbytes
        if early.owed is not None:
            self.credit(early.owed)

    def all_on_time(self, shard: int) -> None:
        """A shard's sum is given up: nothing of it is early."""
        for key in [key for key in self._early if key[0] == shard]:
            self.on_time(*key)

    def hold(self, ticket: int, *, always: bool = False) -> None:
        """The payload has to wait. Returns the sender's credit if the limit of held bytes allows it, or `always`."""
        arrived = self._arrived[ticket]
        if always or self._held_bytes + arrived.nbytes <= self._limit:
            arrived.credited = True
            self._held_bytes += arrived.nbytes
            self.credit(arrived.channel)

    def drop(self, ticket: int, fault: str) -> None:
        """Release a payload that is not needed. With a `fault`, refuse its sender, which ends the connection."""
        channel = self._arrived[ticket].channel
        self.settle(ticket).release()
        if fault:
            channel.refuse(fault)

    def drop_all(self, shard: int) -> None:
        """This server no longer holds the shard: release its payloads."""
        self.all_on_time(shard)
        for ticket in [ticket for ticket, arrived in self._arrived.items() if arrived.shard == shard]:
            self.settle(ticket).release()

    def credit(self, channel: Channel) -> None:
        """Let the sender send one more payload."""
        channel.send(Header(Kind.CREDIT, self._fence.number, replica=1), urgent=True)
