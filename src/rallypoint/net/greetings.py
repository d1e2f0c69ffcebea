"""The messages of the greeting (`handshake.py`), and what all messages have in common."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from rallypoint.core.plan.topology import Mbit
from rallypoint.core.typed import LONGEST_TEXT
from rallypoint.core.view import ViewNumber
from rallypoint.observe.lines import printable

Secret = Annotated[bytes, msgspec.Meta(max_length=32)]
Hidden = Annotated[bytes, msgspec.Meta(max_length=60)]  # a secret, encrypted on its way (`seal.Secrets`)


class AnyMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A control message."""


class Shown(AnyMessage, frozen=True):
    """A message whose text people see: it is one line of limited length, without control characters."""

    def __post_init__(self) -> None:
        for field in ("text", "reason"):
            if (text := getattr(self, field, None)) is not None:
                msgspec.structs.force_setattr(self, field, printable(" ".join(text.splitlines()), LONGEST_TEXT))


class Challenge(AnyMessage, frozen=True):
    """The listener's nonce, and who listens: its role (coordinator or server), id ("" for the coordinator) and
    incarnation (0 for the coordinator)."""

    nonce: bytes
    role: str = ""
    id: str = ""
    incarnation: int = 0


class Hello(AnyMessage, frozen=True):
    """Who connects, and to whom.

    `role` is worker, server, aggregator or observer. `address` is where a server or an aggregator listens, `near` the
    place where a member is, and `link_mbit` what its link carries (see `core.view.Member`). `incarnation` is the number
    that the coordinator gave this member earlier (0: none). `view` is the newest view that it knows. `to` is the (role,
    id, incarnation) of the listener that it means. `nonce` makes the listener's proof good for this connection only.
    `process` is a random name of the process that joins: the coordinator knows it by that until it has heard of its
    admission. `payloads` names what it could use for large payloads in place of the stream (`transport.Upgradable`).
    """

    role: str
    id: str
    host: str
    address: str = ""
    incarnation: int = 0
    view: ViewNumber = ViewNumber()
    to: tuple[str, str, int] = ("", "", 0)
    nonce: bytes = b""
    process: Secret = b""
    near: str = ""
    link_mbit: Mbit = 0.0
    payloads: str = ""


class Welcome(AnyMessage, frozen=True):
    """The listener accepts the connection.

    `overrides` come from the launcher's command line. `folder` is the run's folder for results. `trace` is the range of
    steps to trace, the end excluded. `snapshots` is the URL of the snapshots. `heartbeat` is how many seconds a member
    may be silent. `workers` and `servers` are how many the job begins with, `link_mbit` what the slowest link that was
    told carries (0: none was), `shard_bytes` the size of the job's shards (-1: there are none yet). `threads` is how
    many intra-op threads a worker or a server computes with. `payloads` is the Hello's, if both sides use it from here
    on, else "". `living` is how many seconds a member goes on without a coordinator.
    """

    overrides: dict[str, Any] = {}
    folder: str = ""
    trace: tuple[int, int] = (0, 0)
    snapshots: str = ""
    compression: str = "none"
    heartbeat: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] = 3.0
    workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    servers: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    link_mbit: Mbit = 0.0
    shard_bytes: Annotated[int, msgspec.Meta(ge=-1, le=1 << 32)] = -1
    threads: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    payloads: str = ""
    living: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] = 60.0


class Refused(Shown, frozen=True):
    """The listener refuses the connection, or ends it. `reason` is a sentence.

    `final`: connecting again would not help.
    """

    reason: str
    final: bool = False
