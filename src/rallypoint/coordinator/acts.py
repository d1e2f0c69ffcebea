"""Acts: what a coordinator's shell asks the service to do, in order, each before the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from rallypoint.coordinator.inbox import Connection
from rallypoint.core.cluster.effects import Abort, FindSnapshot, FinishJob
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.decisions import Decided
from rallypoint.core.job import JobRecord
from rallypoint.core.protocol import Aborted, Capture, Fingerprint, Finished, Message, Stored
from rallypoint.core.view import EarlyEnd


@dataclass(frozen=True, slots=True)
class Save:
    """Write the state into the journal.

    `needed`: the journal does not know yet that the job has begun. If it cannot be written then, the job ends. Later
    the job goes on, and members keep what the next coordinator must know (`TakeOver`).
    """

    state: ClusterState
    needed: bool = True


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message over this connection."""

    connection: Connection
    message: Message


@dataclass(frozen=True, slots=True)
class RefuseConnection:
    """Tell the other end why it cannot take part, then close the connection; `final`: it would be refused again."""

    connection: Connection
    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection that another one has replaced."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class AppendLog:
    """Append a message to the event log."""

    message: msgspec.Struct


@dataclass(frozen=True, slots=True)
class Record:
    """Keep digests that a member claims, with the run."""

    member: str
    claim: Fingerprint


@dataclass(frozen=True, slots=True)
class AddPart:
    """Add a part that a member has stored to its snapshot; `writer` names the member, as ``server1 on node2``."""

    part: Stored
    writer: str


@dataclass(frozen=True, slots=True)
class CommitSnapshot:
    """Write the manifest; `Snapshotted` or `SnapshotLost` follows. The snapshot `origin` must not be deleted.

    `stop`: the job's early end, if it is known. `decided`: what was decided from evaluations up to this version.
    `kept`: see `Course.kept`.
    """

    snapshot: str
    version: int
    step: int  # steps of training: its evaluations carry this number
    record: JobRecord
    metrics: Mapping[str, float]
    origin: str
    stop: EarlyEnd | None = None
    decided: Decided = field(default_factory=Decided)
    kept: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class AddFigures:
    """An evaluation after `step` steps has ended: add its metrics to that step's snapshot, if one is complete.

    `version`: look for it in the store; -1: only if it is one of the last that were completed here.
    """

    step: int
    metrics: Mapping[str, float]
    version: int = -1


@dataclass(frozen=True, slots=True)
class Over:
    """The job is over and all members were told; `failure` says why it failed, None if it did not."""

    failure: str | None


Act = (
    Save | SendMessage | RefuseConnection | Close | AppendLog | Record | Capture | AddPart | CommitSnapshot
    | AddFigures | FindSnapshot | Over
)  # fmt: skip


def last_message(word: FinishJob | Abort) -> Finished | Aborted:
    """The message that tells everybody how the job ended."""
    return Finished(word.lead, word.stopped_at, word.why) if isinstance(word, FinishJob) else Aborted(word.reason)


def failure_of(word: Finished | Aborted) -> str | None:
    """Why the job has failed; None if it has not."""
    return word.reason if isinstance(word, Aborted) else None
