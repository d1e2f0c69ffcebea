"""Views: numbered, immutable statements of who is here and who does what. The higher number wins (I10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class ViewNumber(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The coordinator's epoch (it rises with each start of a coordinator), then its count of views."""

    epoch: int = 0
    count: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.count}"


class Member(msgspec.Struct, frozen=True):
    """A live process: its id in this job, the host it is on, and (servers) where it listens.

    `incarnation` is a number that the coordinator gives at every joining: a process that was given up, or replaced by
    another of the same id, has a new one, and nothing that the old one held counts any more.
    """

    id: str
    host: str
    address: str = ""
    incarnation: int = 0


class Assignment(msgspec.Struct, frozen=True):
    """Which replicas each worker computes, from step `start` on."""

    start: int
    replicas: dict[str, tuple[int, ...]]


class View(msgspec.Struct, frozen=True):
    """Who is here, which replicas each worker computes, and which shards each server holds.

    Attributes:
        number: the higher wins.
        generation: the number of the first view after the last roll-back; whatever carries an older one is stale.
        paired: of each shard with a backup, the view in which these two became primary and backup. What either said
            of an earlier pairing is stale.
        origin: the snapshot that the servers start from in view `generation`; "" for the lead worker's first weights.
        workers, servers: all members, standby workers included.
        assignments: by ascending start; the last one whose start is not above a step counts for it.
        primary, backup: shard index to server id. A backup may still be on its way to hold what it needs.
        uploader: the worker that uploads the first weights, if `origin` is "".
        ending: a worker holds the last version: whoever does not is to fetch it.
    """

    number: ViewNumber
    generation: ViewNumber
    workers: tuple[Member, ...]
    servers: tuple[Member, ...]
    assignments: tuple[Assignment, ...]
    primary: dict[int, str]
    backup: dict[int, str] = {}
    paired: dict[int, ViewNumber] = {}
    origin: str = ""
    uploader: str = ""
    ending: bool = False

    def assigned(self, step: int) -> Mapping[str, tuple[int, ...]]:
        """Every worker's replicas at `step`; empty while the job waits for workers."""
        counting = self._counting(step)
        return counting[-1].replicas if counting else {}

    def assignments_from(self, step: int) -> tuple[Assignment, ...]:
        """The one that counts at `step`, and those that will later."""
        counting = self._counting(step)
        now = tuple(msgspec.structs.replace(assignment, start=0) for assignment in counting[-1:])
        return now + self.assignments[len(counting) :]

    def _counting(self, step: int) -> list[Assignment]:
        return [assignment for assignment in self.assignments if assignment.start <= max(0, step)]

    def replicas_of(self, worker: str, step: int) -> tuple[int, ...]:
        """The replicas that `worker` computes at `step`, ascending."""
        return self.assigned(step).get(worker, ())

    def takes_part(self, worker: str, step: int) -> bool:
        """Does `worker` compute anything at `step` or later?"""
        later = (assignment.replicas.get(worker) for assignment in self.assignments if assignment.start > step)
        return bool(self.replicas_of(worker, step)) or any(later)

    def lead(self, step: int) -> str:
        """The worker that computes replica 0 at `step`: it evaluates and saves. "" while there is none."""
        return next((worker for worker, replicas in self.assigned(step).items() if 0 in replicas), "")

    def shards_of(self, server: str) -> list[int]:
        """The shards whose primary is `server`, ascending."""
        return sorted(shard for shard, home in self.primary.items() if home == server)

    def server(self, server_id: str) -> Member:
        """The member with that id; KeyError when it is not in this view."""
        for member in self.servers:
            if member.id == server_id:
                return member
        raise KeyError(server_id)


def assign_replicas(
    replicas: int, workers: Sequence[str], speeds: Mapping[str, float] | None = None
) -> dict[str, tuple[int, ...]]:
    """Assign replicas 0..R-1 to `workers` in the order in which they will be needed.

    Each replica goes to the worker that would finish it first (greedy list scheduling; equal speeds give a plain
    round-robin). Interleaving matters: contributions are summed in replica order (I3), so replica 1 should be computed
    beside replica 0, not after it. `speeds` are replicas per second; a worker beyond R gets none.
    """
    if not workers:
        raise ValueError("there is no worker to assign replicas to")
    cost = {worker: 1.0 / (speeds or {}).get(worker, 1.0) for worker in workers}
    busy = dict.fromkeys(workers, 0.0)
    assigned: dict[str, list[int]] = {worker: [] for worker in workers}
    for replica in range(replicas):
        worker = min(workers, key=lambda w: busy[w] + cost[w])
        assigned[worker].append(replica)
        busy[worker] += cost[worker]
    return {worker: tuple(own) for worker, own in assigned.items()}


def reassign_orphans(
    assigned: Mapping[str, tuple[int, ...]], workers: Sequence[str], speeds: Mapping[str, float] | None = None
) -> dict[str, tuple[int, ...]]:
    """What `workers` compute when some of those in `assigned` are gone, with as few changes as possible.

    An idle worker takes all replicas of one that is gone. Where none is idle, each orphan goes to the worker that
    would finish it first. Survivors keep theirs: they may have computed them already. ValueError without a worker.
    """
    if not workers:
        raise ValueError("there is no worker to assign replicas to")
    patched = {worker: tuple(assigned.get(worker, ())) for worker in workers}
    orphaned = [own for worker, own in sorted(assigned.items()) if worker not in patched and own]
    idle = [worker for worker in workers if not patched[worker]]
    for worker, own in zip(idle, orphaned, strict=False):
        patched[worker] = own
    cost = {worker: 1.0 / (speeds or {}).get(worker, 1.0) for worker in workers}
    for replica in sorted(replica for own in orphaned[len(idle) :] for replica in own):
        worker = min(workers, key=lambda w: (len(patched[w]) + 1) * cost[w])
        patched[worker] = tuple(sorted((*patched[worker], replica)))
    return patched
