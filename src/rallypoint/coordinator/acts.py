"""Acts: what a coordinator's shell asks the service to do, in order, each before the next."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rallypoint.coordinator.inbox import Connection
from rallypoint.core.cluster.effects import FindSnapshot
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.decisions import Decided
from rallypoint.core.job import JobRecord
from rallypoint.core.protocol import Aborted, Capture, Fingerprint, Finished, Message, Stored
from rallypoint.core.view import EarlyEnd


class Save(msgspec.Struct, frozen=True):
    """Write the state into the journal.

    `needed`: the journal does not know yet that the job has begun. If it cannot be written then, the job ends. Later
    the job goes on, and members keep what the next coordinator must know (`TakeOver`).
    """

    state: ClusterState
    needed: bool = True


class SendMessage(msgspec.Struct, frozen=True):
    """Send a message over this connection."""

    connection: Connection
    message: Message


class RefuseConnection(msgspec.Struct, frozen=True):
    """Tell the other end why it cannot take part, then close the connection; `final`: it would be refused again."""

    connection: Connection
    reason: str
    final: bool = False


class Close(msgspec.Struct, frozen=True):
    """Close a connection that another one has replaced."""

    connection: Connection


class AppendLog(msgspec.Struct, frozen=True):
    """Append a message to the event log."""

    message: msgspec.Struct


class Record(msgspec.Struct, frozen=True):
    """Keep digests that a member claims, with the run."""

    member: str
    claim: Fingerprint


class AddPart(msgspec.Struct, frozen=True):
    """Add a part that a member has stored to its snapshot; `writer` names the member, as ``server1 on node2``."""

    part: Stored
    writer: str


class CommitSnapshot(msgspec.Struct, frozen=True):
    """Write the manifest; `Snapshotted` or `NotStored` follows. The snapshot `origin` must not be deleted.

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
    decided: Decided = msgspec.field(default_factory=Decided)
    kept: tuple[int, int] | None = None


class AddFigures(msgspec.Struct, frozen=True):
    """An evaluation after `step` steps has ended: add its metrics to that step's snapshot, if one is complete.

    `version`: look for it in the store; -1: only if it is one of the last that were completed here.
    """

    step: int
    metrics: Mapping[str, float]
    version: int = -1


class Over(msgspec.Struct, frozen=True):
    """The job is over and all members were told; `failure` says why it failed, None if it did not."""

    failure: str | None


Act = (
    Save | SendMessage | RefuseConnection | Close | AppendLog | Record | Capture | AddPart | CommitSnapshot
    | AddFigures | FindSnapshot | Over
)  # fmt: skip


def failure_of(word: Finished | Aborted) -> str | None:
    """Why the job has failed; None if it has not."""
    return word.reason if isinstance(word, Aborted) else None
