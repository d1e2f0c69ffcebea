"""Effects of the coordinator's machine: messages to members, steps of a snapshot, the end of the job."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rallypoint.core.job import JobRecord
from rallypoint.core.view import View


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell this member why it cannot take part (any more), then close its connection."""

    member: str
    reason: str
    final: bool = False  # it would be refused again


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell a server that was asked to leave that it may end: no shard needs it any more."""

    server: str


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell this member its incarnation."""

    member: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SendRecord:
    """Send this server or aggregator the job's record; views follow."""

    member: str
    record: JobRecord


@dataclass(frozen=True, slots=True)
class PublishView:
    """Send the view to these members."""

    view: View
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskBackupTask:
    """Ask an idle worker to compute a straggler's replica too."""

    worker: str
    step: int
    replica: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask `writers` for a snapshot: servers for the shards that each holds, workers (AllReduce) for a share each."""

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
    """Look for the newest usable snapshot; the event `Found` is the answer."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the observers a sentence."""

    text: str


@dataclass(frozen=True, slots=True)
class PeriodTuned:
    """Tell the observers that a snapshot is due every so many `seconds` from now on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Note:
    """Write a sentence into the event log only."""

    text: str


@dataclass(frozen=True, slots=True)
class TellHeld:
    """Tell the observers that members hold the newest version, which is not stored yet, and why."""

    text: str


class FinishJob(msgspec.Struct, frozen=True, tag=True):
    """Tell all members that the job has finished. The worker `lead` saves the model.

    `stopped_at`: the script has stopped it after so many steps of training, for the reason `why`; -1: it has not.
    """

    lead: str
    stopped_at: int = -1
    why: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Tell all members that the job cannot go on, and why."""

    reason: str


Effect = (
    Refuse | Dismiss | Admit | SendRecord | PublishView | AskBackupTask | TakeSnapshot | Commit | FindSnapshot
    | Announce | PeriodTuned | Note | TellHeld | FinishJob | Abort
)  # fmt: skip
