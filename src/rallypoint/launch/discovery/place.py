"""The place of a process of torchrun or mpirun among the others, as its environment says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rallypoint.errors import UsageError
from rallypoint.launch.plan import is_loopback

_RANKS = "ranks="
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


def place_of_torchrun(env: Mapping[str, str]) -> Place | None:
    """Return the place of this process; None if torchrun has not started it. Raises UsageError if something is missing.
    """
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    if missing := [name for name in _NEEDED if not env.get(name)]:
        raise UsageError(f"this is started by torchrun (TORCHELASTIC_RUN_ID is set), but {missing[0]} is missing")
    host, world = env["MASTER_ADDR"], int(env["WORLD_SIZE"])
    # A node that joins has everybody started again with the same count of restarts, but another number of processes
    attempt = f"{env['TORCHELASTIC_RUN_ID']}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world}"
    return Place(
        launcher="torchrun", rank=int(env["RANK"]), world=world, local_rank=int(env["LOCAL_RANK"]),
        nodes=int(env["GROUP_WORLD_SIZE"]), attempt=attempt,
        master=f"[{host}]:{env['MASTER_PORT']}" if ":" in host else f"{host}:{env['MASTER_PORT']}",
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )  # fmt: skip


def place_of_mpirun(env: Mapping[str, str], parent: int) -> Place | None:
    """Return the place of this process; None if no mpirun has started it.

    `parent`: the id of the process that started it, which names the start where the launcher does not.
    """
    if "OMPI_COMM_WORLD_RANK" in env:
        rank, world = int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"])
        local_rank, on_node = int(env["OMPI_COMM_WORLD_LOCAL_RANK"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
        attempt = env.get("PMIX_NAMESPACE", "") or env.get("OMPI_MCA_ess_base_jobid", "")
    elif "PMI_RANK" in env and "PMI_SIZE" in env and "MPI_LOCALRANKID" in env:
        rank, world = int(env["PMI_RANK"]), int(env["PMI_SIZE"])
        local_rank, on_node = int(env["MPI_LOCALRANKID"]), int(env.get("MPI_LOCALNRANKS", world))
        attempt = ""
    else:
        return None
    nodes = -(-world // on_node)
    if not attempt:
        attempt = f"parent-{parent}" if nodes == 1 else "job"
    return Place(launcher="mpirun", rank=rank, world=world, local_rank=local_rank, nodes=nodes, attempt=attempt)
