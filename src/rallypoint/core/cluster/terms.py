"""The terms of a job: how its cluster is to behave."""

from __future__ import annotations

import msgspec

from rallypoint.core.modes import Feature


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How a job's cluster is to behave.

    Attributes:
        workers_start: workers to wait for before the job begins.
        workers_min: below so many the job waits.
        workers_max: so many compute; more stand by.
        servers: servers to wait for before the job begins.
        replication: 2 keeps every shard on a second server too (I4).
        heartbeat: seconds without a sign of life after which a member is given up.
        backup_tasks: give a straggler's replica to an idle worker too.
        snapshot_steps, snapshot_seconds: take a snapshot after so many steps of training, or so often; 0: never for
            that reason.
        snapshots: take one at the start, at the end and on demand, too.
    """

    workers_start: int = 1
    workers_min: int = 1
    workers_max: int = 1
    servers: int = 1
    replication: int = 1
    heartbeat: float = 3.0
    backup_tasks: bool = False
    snapshot_steps: int = 0
    snapshot_seconds: float = 0.0
    snapshots: bool = False

    @property
    def features(self) -> frozenset[Feature]:
        """What the terms ask for that not every mode supports."""
        asked = {
            Feature.REPLICATION: self.replication > 1,
            Feature.BACKUP_TASKS: self.backup_tasks,
            Feature.SNAPSHOTS: self.snapshots,
        }
        return frozenset(feature for feature, is_asked in asked.items() if is_asked)
