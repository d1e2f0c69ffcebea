"""The events that other threads put into the relay's inbox: those of a server's workers, and what servers send."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.view import Member
from rallypoint.net.frames import Header
from rallypoint.net.pool import Buffer
from rallypoint.server.reducer import inbox as of_servers


@dataclass(frozen=True, slots=True)
class ServerUp:
    """The link to a server is up."""

    server: Member


@dataclass(frozen=True, slots=True)
class ServerLost:
    """The link to a server is lost."""

    server: Member


@dataclass(frozen=True, slots=True)
class Arrived:
    """A server sent a version; the payload is as the header says, encoded perhaps."""

    header: Header
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Ticked:
    """The time is `now`, in seconds."""

    now: float


Event = ServerUp | ServerLost | Arrived | Ticked | of_servers.Event
