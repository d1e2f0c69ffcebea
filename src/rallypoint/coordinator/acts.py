"""What a coordinator's shell asks of its surroundings; to be done in order, each before the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from rallypoint.coordinator.inbox import Connection
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.job import JobRecord
from rallypoint.net.messages import Message, Stored


@dataclass(frozen=True, slots=True)
class Save:
    """Write the state into the journal. With `needed` the job cannot go on if that fails; else it goes on."""

    state: ClusterState
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message over this connection."""

    connection: Connection
    message: Message


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the other end why it cannot take part, then close."""

    connection: Connection
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection that another one has replaced."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class Log:
    """Append to the event log."""

    message: msgspec.Struct


@dataclass(frozen=True, slots=True)
class BeginSnapshot:
    """Parts of this snapshot will come; those of any other are forgotten."""

    snapshot: str


@dataclass(frozen=True, slots=True)
class AddPart:
    """A part of a snapshot is in the store."""

    part: Stored


@dataclass(frozen=True, slots=True)
class CommitSnapshot:
    """Write the manifest. SnapshotCommitted or SnapshotFailed follows. `origin` must not be deleted meanwhile."""

    snapshot: str
    version: int
    step: int  # of training: what its evaluations are called by
    record: JobRecord
    metrics: Mapping[str, float]
    origin: str


@dataclass(frozen=True, slots=True)
class Judge:
    """An evaluation after `step` steps has ended: if a snapshot of it is complete, its figures go into the manifest."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FindSnapshot:
    """Look for the newest usable snapshot. SnapshotFound or Ended follows."""


@dataclass(frozen=True, slots=True)
class Over:
    """Everybody has been told how the job ended; `failure` says why it failed, if it did."""

    failure: str | None


Act = (
    Save | Send | Refuse | Close | Log | BeginSnapshot | AddPart | CommitSnapshot | Judge | FindSnapshot | Over
)  # fmt: skip
