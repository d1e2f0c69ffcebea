"""The environment of a process that ``mpirun`` has started: Open MPI's, or that of MPICH and Intel MPI. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.launch.discovery.place import Place


def place_of(env: Mapping[str, str], parent: int) -> Place | None:
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
