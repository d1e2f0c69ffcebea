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


class Tickets:
    """`fence` gives the current view. `limit`: bytes that may be held with their credit returned. Owner thread only."""

    def __init__(self, fence: Fence, limit: int) -> None:
        self._fence, self._limit = fence, limit
        self._arrived: dict[int, _Arrived] = {}
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

    def settle(self, ticket: int) -> Buffer:
        """Take the payload out for its use. The caller must release the buffer."""
        arrived = self._arrived.pop(ticket)
        if arrived.credited:
            self._held_bytes -= arrived.nbytes
        else:
            self.credit(arrived.channel)
        return arrived.buffer

    def hold(self, ticket: int) -> None:
        """The payload has to wait. Returns the sender's credit if the limit of held bytes allows it."""
        arrived = self._arrived[ticket]
        if self._held_bytes + arrived.nbytes <= self._limit:
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
        for ticket in [ticket for ticket, arrived in self._arrived.items() if arrived.shard == shard]:
            self.settle(ticket).release()

    def credit(self, channel: Channel) -> None:
        """Let the sender send one more payload."""
        channel.send(Header(Kind.CREDIT, self._fence.number, replica=1), urgent=True)
