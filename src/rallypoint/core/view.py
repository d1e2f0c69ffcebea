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

    `birth` is a number that the coordinator gives at every joining: a process that was given up, or replaced by
    another of the same id, has a new one, and nothing that the old one held counts any more.
    """

    id: str
    host: str
    address: str = ""
    birth: int = 0


class Deal(msgspec.Struct, frozen=True):
    """Which replicas each worker computes, from step `start` on."""

    start: int
    hands: dict[str, tuple[int, ...]]


class View(msgspec.Struct, frozen=True):
    """Who is here, which replicas each worker computes, and which shards each server holds.

    Attributes:
        number: the higher wins.
        since: the first view after the last roll-back; whatever carries an older number is from a past that is void.
        met: of each shard with a backup, the view in which these two became primary and backup: what either has said of
            an earlier meeting does not count.
        origin: the snapshot that the servers start from in view `since`; "" for the lead worker's first weights.
        workers, servers: all members, standby workers included.
        deals: by ascending start; the last one whose start is not above a step counts for it.
        primary, backup: shard index to server id. A backup may still be on its way to hold what it needs.
        first: the worker that brings the first weights, if `origin` is "".
        ending: a worker holds the last version: whoever does not is to fetch it.
    """

    number: ViewNumber
    since: ViewNumber
    workers: tuple[Member, ...]
    servers: tuple[Member, ...]
    deals: tuple[Deal, ...]
    primary: dict[int, str]
    backup: dict[int, str] = {}
    met: dict[int, ViewNumber] = {}
    origin: str = ""
    first: str = ""
    ending: bool = False

    def hands(self, step: int) -> Mapping[str, tuple[int, ...]]:
        """Every worker's replicas at `step`; empty while the job waits for workers."""
        counting = self._counting(step)
        return counting[-1].hands if counting else {}

    def deals_from(self, step: int) -> tuple[Deal, ...]:
        """The one that counts at `step`, and those that will later."""
        counting = self._counting(step)
        now = tuple(msgspec.structs.replace(deal, start=0) for deal in counting[-1:])
        return now + self.deals[len(counting) :]

    def _counting(self, step: int) -> list[Deal]:
        return [deal for deal in self.deals if deal.start <= max(0, step)]

    def hand(self, worker: str, step: int) -> tuple[int, ...]:
        """The replicas that `worker` computes at `step`, ascending."""
        return self.hands(step).get(worker, ())

    def takes_part(self, worker: str, step: int) -> bool:
        """Does `worker` compute anything at `step` or later?"""
        later = (deal.hands.get(worker) for deal in self.deals if deal.start > step)
        return bool(self.hand(worker, step)) or any(later)

    def lead(self, step: int) -> str:
        """The worker that computes replica 0 at `step`: it evaluates and saves. "" while there is none."""
        return next((worker for worker, replicas in self.hands(step).items() if 0 in replicas), "")

    def shards_of(self, server: str) -> list[int]:
        """The shards whose primary is `server`, ascending."""
        return sorted(shard for shard, home in self.primary.items() if home == server)

    def server(self, server_id: str) -> Member:
        """The member with that id; KeyError when it is not in this view."""
        for member in self.servers:
            if member.id == server_id:
                return member
        raise KeyError(server_id)


def deal_replicas(
    replicas: int, workers: Sequence[str], speeds: Mapping[str, float] | None = None
) -> dict[str, tuple[int, ...]]:
    """Deal replicas 0..R-1 to `workers` in the order in which they will be needed.

    Each replica goes to the worker that would finish it first (greedy list scheduling; equal speeds give a plain
    round-robin). Interleaving matters: contributions are summed in replica order (I3), so replica 1 should be computed
    beside replica 0, not after it. `speeds` are replicas per second; a worker beyond R gets none.
    """
    if not workers:
        raise ValueError("there is no worker to deal replicas to")
    cost = {worker: 1.0 / (speeds or {}).get(worker, 1.0) for worker in workers}
    busy = dict.fromkeys(workers, 0.0)
    hands: dict[str, list[int]] = {worker: [] for worker in workers}
    for replica in range(replicas):
        worker = min(workers, key=lambda w: busy[w] + cost[w])
        hands[worker].append(replica)
        busy[worker] += cost[worker]
    return {worker: tuple(hand) for worker, hand in hands.items()}


def patch_hands(
    hands: Mapping[str, tuple[int, ...]], workers: Sequence[str], speeds: Mapping[str, float] | None = None
) -> dict[str, tuple[int, ...]]:
    """What `workers` compute when some of those in `hands` are gone, with as few changes as possible.

    A worker without replicas takes a gone one's whole hand; without one, each orphan goes to whoever would finish it
    first. Survivors keep theirs: they may have computed them already. Raises ValueError when there is no worker.
    """
    if not workers:
        raise ValueError("there is no worker to deal replicas to")
    patched = {worker: tuple(hands.get(worker, ())) for worker in workers}
    orphaned = [hand for worker, hand in sorted(hands.items()) if worker not in patched and hand]
    idle = [worker for worker in workers if not patched[worker]]
    for worker, hand in zip(idle, orphaned, strict=False):
        patched[worker] = hand
    cost = {worker: 1.0 / (speeds or {}).get(worker, 1.0) for worker in workers}
    for replica in sorted(replica for hand in orphaned[len(idle) :] for replica in hand):
        worker = min(workers, key=lambda w: (len(patched[w]) + 1) * cost[w])
        patched[worker] = tuple(sorted((*patched[worker], replica)))
    return patched
