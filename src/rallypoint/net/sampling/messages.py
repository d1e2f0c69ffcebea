"""The messages of a member about its machine, itself, its links and its script."""

from __future__ import annotations

from typing import Annotated

import msgspec

from rallypoint.core.typed import LONGEST_NAME, Count, Index, Name, Seconds
from rallypoint.net.greetings import AnyMessage
from rallypoint.observe.usage import MOST_GPUS

MOST_LINKS = 64  # of a member: those with the most bytes
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]  # bytes a second, or seconds a second
MOST_PACED = 1000  # servers of which a beat says how fast their links are
Paced = Annotated[dict[Name, tuple[Rate, Share]], msgspec.Meta(max_length=MOST_PACED)]
Address = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]


class GpuSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU: how busy it is, and bytes of its memory."""

    busy: Share
    used: Count
    total: Count


class LinkSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link: TCP's smoothed round trip (s; 0: unknown), bytes a second to the other side and from it."""

    round_trip: Seconds
    sent: Rate
    received: Rate


class Sampled(AnyMessage, frozen=True):
    """What a member's machine, the member itself and its links did in the last `seconds`.

    The machine: `cpu` is the share of all cores; `memory` the bytes in use, of `memory_total`; the rates are those of
    its disks and of its network without loopback. The member: processors that it uses, bytes of resident memory, the
    share of the time in which the script waited for data. `links`: by the address that the member has dialed; in the
    event log by the member that has it, and `member` and `host` are set there.
    """

    seconds: Seconds
    cpu: Share
    memory: Count
    memory_total: Count
    disk_read: Rate = 0.0
    disk_written: Rate = 0.0
    network_sent: Rate = 0.0
    network_received: Rate = 0.0
    own_cpu: Rate = 0.0
    own_memory: Count = 0
    waited_for_data: Share = 0.0
    gpus: Annotated[tuple[GpuSample, ...], msgspec.Meta(max_length=MOST_GPUS)] = ()
    links: Annotated[dict[Address, LinkSample], msgspec.Meta(max_length=MOST_LINKS)] = msgspec.field(
        default_factory=dict
    )
    member: Name = ""
    host: Name = ""


class ScriptAt(AnyMessage, frozen=True):
    """In a job of sums: the script of this rank has got so many `sums`, of `nbytes` that it has sent for them.

    `ended`: it asks for no more. The coordinator passes that on to all workers, with the name of the `worker`, and
    repeats the last one to observers about once a second.
    """

    rank: Index
    sums: Count = 0
    nbytes: Count = 0
    ended: bool = False
    worker: Name = ""


OfMembers = Sampled | ScriptAt
