"""Payloads between their arrival and their place in a sum, and the credit that their senders get back.

A machine speaks of a payload by its ticket. A sender has credit for a few payloads (DESIGN.md, incast); it gets one
back when its payload has been used, or held within the job's limit of bytes that wait here.
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
    """The owner's thread owns them. `fence` knows the view in force; `limit`: bytes held with credit given."""

    def __init__(self, fence: Fence, limit: int) -> None:
        self._fence, self._limit = fence, limit
        self._arrived: dict[int, _Arrived] = {}
        self._last = 0
        self._held_bytes = 0

    def issue(self, channel: Channel, header: Header, buffer: Buffer, *, credited: bool = False) -> int:
        """A ticket for a payload; `credited`: its sender needs no credit for it (servers give each other none)."""
        self._last += 1
        self._arrived[self._last] = _Arrived(header.shard, channel, buffer, header.length, credited)
        self._held_bytes += header.length if credited else 0
        return self._last

    def nbytes(self, ticket: int) -> int:
        """How long the payload is."""
        return self._arrived[ticket].nbytes

    def settle(self, ticket: int) -> Buffer:
        """The payload leaves for its use; whoever takes it releases the buffer."""
        arrived = self._arrived.pop(ticket)
        if arrived.credited:
            self._held_bytes -= arrived.nbytes
        else:
            self.credit(arrived.channel)
        return arrived.buffer

    def hold(self, ticket: int) -> None:
        """The payload has to wait: its sender may go on while that is within the limit."""
        arrived = self._arrived[ticket]
        if self._held_bytes + arrived.nbytes <= self._limit:
            arrived.credited = True
            self._held_bytes += arrived.nbytes
            self.credit(arrived.channel)

    def drop(self, ticket: int, fault: str) -> None:
        """The payload is not wanted; with a fault its sender is refused."""
        channel = self._arrived[ticket].channel
        self.settle(ticket).release()
        if fault:
            channel.refuse(fault)

    def drop_all(self, shard: int) -> None:
        """The shard is not ours any more."""
        for ticket in [ticket for ticket, arrived in self._arrived.items() if arrived.shard == shard]:
            self.settle(ticket).release()

    def credit(self, channel: Channel) -> None:
        """One more payload may come."""
        channel.send(Header(Kind.CREDIT, self._fence.number, replica=1), urgent=True)
