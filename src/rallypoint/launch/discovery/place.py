"""What a process of somebody else's launcher is told about its place among the others. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.errors import UsageError
from rallypoint.launch.plan import is_loopback

_RANKS = "ranks="


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process among those that a launcher has started, as the launcher counts them.

    Attributes:
        launcher: "torchrun" or "mpirun".
        rank, world: which of how many.
        local_rank: which on its machine.
        nodes: on how many machines.
        attempt: differs between any two starts of everybody that could be taken for each other.
        master: ``host:port`` of torch's store; "" where there is none.
        agent_store: torchrun has the store; else rank 0 has to open it.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    nodes: int
    attempt: str
    master: str = ""
    agent_store: bool = False

    @property
    def one_machine(self) -> bool:
        """True if all processes are on this machine: links may stay on its loopback interface."""
        return self.nodes == 1 or (bool(self.master) and is_loopback(self.master.rpartition(":")[0]))


def server_ranks(place: Place, wanted: str) -> tuple[int, ...] | None:
    """Return the ranks beside which servers run, for RALLYPOINT_SERVERS. None: one on each machine, at local rank 0.

    ``3``: three, spread over the ranks. ``ranks=0,4,4``: one beside rank 0, two beside rank 4. Raises UsageError for
    anything else.
    """
    if not wanted:
        return None
    if wanted.startswith(_RANKS):
        ranks = wanted.removeprefix(_RANKS).split(",")
        if all(rank.isdigit() and int(rank) < place.world for rank in ranks):
            return tuple(int(rank) for rank in ranks)
    elif wanted.isdigit() and int(wanted) > 0:
        return tuple(n * place.world // int(wanted) for n in range(int(wanted)))
    raise UsageError(
        f"RALLYPOINT_SERVERS={wanted}: write a number of servers, or the ranks beside which they run (below "
        f"{place.world}), as ranks=0,4"
    )


def servers_in_all(place: Place, wanted: str) -> int:
    """Return the number of servers of the job."""
    ranks = server_ranks(place, wanted)
    return place.nodes if ranks is None else len(ranks)


def servers_here(place: Place, wanted: str) -> tuple[str, ...]:
    """Return the names of the servers that this process starts."""
    ranks = server_ranks(place, wanted)
    if ranks is None:
        return (f"server-{place.rank}",) if place.local_rank == 0 else ()
    return tuple(f"server{n}" for n, rank in enumerate(ranks) if rank == place.rank)
