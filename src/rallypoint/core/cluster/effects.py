"""Effects of the coordinator's machine: what members are to be told, what is to become of snapshots, the last word."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rallypoint.core.job import JobRecord
from rallypoint.core.view import View


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell this member why it cannot take part, or no longer, and let it go."""

    member: str
    reason: str
    final: bool = False  # it need not come back


@dataclass(frozen=True, slots=True)
class Dismiss:
    """A server that was told to go holds nothing any more: let it go."""

    server: str


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell this member its incarnation."""

    member: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Send this server the job's record; views follow."""

    server: str
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the view to these members."""

    view: View
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assist:
    """Ask an idle worker for a straggler's replica."""

    worker: str
    step: int
    replica: int


@dataclass(frozen=True, slots=True)
class Capture:
    """Ask these members for a snapshot: servers, each for what it holds, or stateful workers, each for a share."""

    snapshot: str
    version: int
    writers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """All parts are stored: write the manifest."""

    snapshot: str
    version: int


@dataclass(frozen=True, slots=True)
class FindSnapshot:
    """Look for the newest usable snapshot; the answer is Found."""


@dataclass(frozen=True, slots=True)
class Say:
    """A sentence for the people who watch."""

    text: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Every worker is done, and everybody may go home. `lead` saves the model."""

    lead: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The job cannot go on."""

    reason: str


Effect = (
    Refuse | Dismiss | Admit | Prepare | Publish | Assist | Capture | Commit | FindSnapshot | Say | Finish | Abort
)  # fmt: skip
