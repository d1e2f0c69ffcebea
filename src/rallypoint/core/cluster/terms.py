"""The terms of a job: how its cluster is to behave."""

from __future__ import annotations

import msgspec

from rallypoint.core.modes import Feature
from rallypoint.core.plan.topology import Topology

LIVING_S = 60.0  # seconds for which members go on without a coordinator, if nobody says otherwise


def copies_of(said: int, servers: int, *, supported: bool = True) -> int:
    """On how many servers each shard is, where `said` is what the user asked for (0: nothing).

    Nothing said, it is 2 where a job begins with two servers or more, and its mode supports that: then any one server
    may die without a step lost. `supported`: see `JobRecord.supports`.
    """
    return said or (2 if servers > 1 and supported else 1)


class SnapshotPeriod(msgspec.Struct, frozen=True):
    """A snapshot is taken every so many steps of training, and every so many seconds; 0: not by that."""

    steps: int = 0
    seconds: float = 0.0


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How a job's cluster is to behave.

    Attributes:
        workers_start: the job begins when so many workers are here.
        workers_min: the job waits while fewer workers are here.
        workers_max: the most workers that compute; more stand by.
        servers: the job begins when so many servers are here.
        replication: 2 keeps every shard on a second server too (I4); 0: nobody has said it, see `copies_of`.
        heartbeat: seconds without a sign of life after which a member is given up.
        hang_after: seconds after which a worker whose main thread does nothing is given up, if all others wait for it;
            at least ten times the median step. 0: never.
        living: seconds for which members go on without a coordinator; then they end by themselves.
        aggregators: how many aggregators the job is started with. Nobody waits for them.
        backup_tasks: ask an idle worker for a straggler's replica too.
        snapshot_steps: take a snapshot every so many steps of training; 0: not by steps.
        snapshot_seconds: take a snapshot every so many seconds; 0: not by time.
        snapshot_tuned: nobody has said how often, so `tune="auto"` may choose it (`storing.tuned_period`).
        snapshots: take snapshots at all; then also at the start, at the end and on demand.
        topology: what is told of the hosts: shards are placed by it.
        measure_links: place shards by the links of servers as they are measured, too.
        begun_by: the command that has started this coordinator, if it says --resume and may be given again while the
            job goes on: by a person, or by what keeps a coordinator running. "": a launcher's, which begins a job with
            it each time.
        by_hand: no launcher has started this coordinator, so maybe nobody starts a server in place of a dead one.
        earlier: how many coordinators of this job were started before this one, as far as its launcher knows. So no two
            have the same epoch, even if the journal could not be written (I10). If there were any, `workers_max` is the
            size that was announced last.
    """

    workers_start: int = 1
    workers_min: int = 1
    workers_max: int = 1
    servers: int = 1
    replication: int = 1
    heartbeat: float = 3.0
    hang_after: float = 60.0
    living: float = LIVING_S
    backup_tasks: bool = False
    aggregators: int = 0
    snapshot_steps: int = 0
    snapshot_seconds: float = 0.0
    snapshot_tuned: bool = False
    snapshots: bool = False
    begun_by: str = ""
    by_hand: bool = False
    earlier: int = 0
    topology: Topology = Topology()
    measure_links: bool = False

    @property
    def features(self) -> frozenset[Feature]:
        """The features that the terms ask for and that not every mode supports."""
        asked = {
            Feature.REPLICATION: self.replication > 1,
            Feature.BACKUP_TASKS: self.backup_tasks,
            Feature.AGGREGATORS: self.aggregators > 0,
        }
        return frozenset(feature for feature, is_asked in asked.items() if is_asked)
