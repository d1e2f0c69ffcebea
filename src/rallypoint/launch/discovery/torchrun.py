"""The environment of a process that ``torchrun`` has started. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.errors import UsageError
from rallypoint.launch.discovery.place import Place

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def place_of(env: Mapping[str, str]) -> Place | None:
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
