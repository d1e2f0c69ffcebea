"""Views: numbered, immutable statements of who is here and who does what. The higher number wins (I10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class ViewNumber(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The coordinator's epoch, then its count of views in that epoch."""

    epoch: int = 0
    count: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.count}"


class Member(msgspec.Struct, frozen=True):
    """A live process: its id in this job, the host it is on, and (servers) where it listens."""

    id: str
    host: str
    address: str = ""


class View(msgspec.Struct, frozen=True):
    """Who is here, which replicas each worker computes, and which shards each server holds.

    `deal` maps worker id to its replicas, ascending; `primary` maps shard index to server id.
    """

    number: ViewNumber
    workers: tuple[Member, ...]
    servers: tuple[Member, ...]
    deal: dict[str, tuple[int, ...]]
    primary: dict[int, str]

    @property
    def lead(self) -> str:
        """The worker that computes replica 0: it brings the first parameters, validates and saves."""
        return next(worker for worker, replicas in self.deal.items() if 0 in replicas)

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
