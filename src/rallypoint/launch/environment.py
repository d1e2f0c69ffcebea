"""What a launcher tells the processes it starts: where the job is, who they are, how to prove it. Not what to do."""

from __future__ import annotations

COORDINATOR = "RALLYPOINT_COORDINATOR"
TOKEN = "RALLYPOINT_TOKEN"
ID = "RALLYPOINT_ID"
LIFELINE = "RALLYPOINT_LIFELINE"
ANNOUNCE = "RALLYPOINT_ANNOUNCE"
LISTENS_AT = "the coordinator listens at "  # how the line begins that a coordinator prints once it is ready


def for_process(name: str, address: str, token: str, threads: int) -> dict[str, str]:
    """What a process of the run gets: how it is called, where its coordinator is ("" : not known yet), its threads."""
    return {
        **({COORDINATOR: address} if address else {}),
        TOKEN: token,
        ID: name,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
