"""Effects of the coordinator's machine: messages to members, steps of a snapshot, the end of the job."""

from __future__ import annotations

import msgspec

from rallypoint.core.protocol import Aborted, Capture, Finished, Held, Message, Say, SnapshotEvery
from rallypoint.core.view import View


class Refuse(msgspec.Struct, frozen=True):
    """Tell this member why it cannot take part (any more), then close its connection."""

    member: str
    reason: str
    final: bool = False  # it would be refused again


class SendTo(msgspec.Struct, frozen=True):
    """Send a message to this member: the job's record, a straggler's replica, or that a server may go as it was told.
    """

    member: str
    message: Message


class Admit(msgspec.Struct, frozen=True):
    """Tell this member its incarnation."""

    member: str
    incarnation: int


class PublishView(msgspec.Struct, frozen=True):
    """Send the view to these members."""

    view: View
    members: tuple[str, ...]


class Commit(msgspec.Struct, frozen=True):
    """All parts are stored: write the manifest."""

    snapshot: str
    version: int


class FindSnapshot(msgspec.Struct, frozen=True):
    """Look for the newest usable snapshot; the event `Origin` is the answer."""


class Note(msgspec.Struct, frozen=True):
    """Write a sentence into the event log only."""

    text: str


Effect = (
    Refuse | SendTo | Admit | PublishView | Capture | Commit | FindSnapshot | Note | Finished | Aborted
    | Say | Held | SnapshotEvery
)  # fmt: skip
# (`Capture` goes to its writers, the other messages to all observers)
