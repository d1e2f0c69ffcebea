"""Control messages about audits: what a member has found, and what observers are told."""

from __future__ import annotations

from typing import Annotated

import msgspec

from rallypoint.core.typed import Index, Name
from rallypoint.core.view import ViewNumber
from rallypoint.net.greetings import AnyMessage, Shown


class StateChanged(AnyMessage, frozen=True):
    """From a server: a shard at `version`, in that generation, has changed in its memory since that was made."""

    shard: Index
    version: Index
    generation: ViewNumber = ViewNumber()


class ServerMismatch(Shown, frozen=True):
    """To observers: an audit of servers found other bytes than there should be. `text` is the sentence.

    `servers` are the one that has found it in its own memory, or the primary and the backup that differ.
    """

    text: str
    shard: Index
    version: Index
    servers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=2)]


OfAudits = StateChanged | ServerMismatch
