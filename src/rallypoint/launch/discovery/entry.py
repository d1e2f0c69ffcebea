"""How a script that calls `rallypoint.join` under torchrun or mpirun becomes a worker.

The process that the launcher has started waits for the coordinator's address, and then replaces itself (`exec`: the
same process for the launcher, without the memory of the script) by a supervisor, which starts the script again as its
child, with the address in its environment. A worker that dies is started again there, and the launcher never sees it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.launch.access import access_of
from rallypoint.launch.discovery.boards import Found, folder_of, look
from rallypoint.launch.discovery.place import Place, place_of_mpirun, place_of_torchrun, servers_here, servers_in_all
from rallypoint.observe.lenient import flush_output

SUPERVISION = "rallypoint.launch.discovery.supervision"


class Duties(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor has to do.

    Attributes:
        place: its place among the others.
        worker: the script's command line.
        servers: the names of the servers that it starts.
        servers_in_all: how many servers the job has.
        found: the way into the job; None for rank 0, which starts the coordinator.
    """

    place: Place
    worker: tuple[str, ...]
    servers: tuple[str, ...] = ()
    servers_in_all: int = 1
    found: Found | None = None


def place_of(env: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun or mpirun has given this process; None if neither has started it."""
    return place_of_torchrun(env) or place_of_mpirun(env, os.getppid())


def enter(place: Place) -> NoReturn:
    """Replace this process by the supervisor of its place. Raises UsageError if something that it needs is missing."""
    check_token(place)
    wanted = os.environ.get(environment.SERVERS, "")
    duties = Duties(
        place=place, worker=(sys.executable, *sys.orig_argv[1:]), servers=servers_here(place, wanted),
        servers_in_all=servers_in_all(place, wanted), found=None if place.rank == 0 else look(place),
    )  # fmt: skip
    flush_output()
    # -P: the script's folder may hold a module of any name
    argv = [sys.executable, "-P", "-m", SUPERVISION, msgspec.json.encode(duties).decode()]
    os.execve(sys.executable, argv, os.environ)


def check_token(place: Place) -> None:
    """Raise UsageError if the processes cannot have a common token.

    On one machine, and in a folder that all see, rank 0 makes one, in a file that only this user can read.
    """
    if access_of().token or place.one_machine:
        return
    if place.master:
        raise UsageError(
            "torchrun on several machines: give every process the job's token, in RALLYPOINT_TOKEN or "
            "RALLYPOINT_TOKEN_FILE (`rallypoint token > FILE` makes one); torchrun's store is open to everybody"
        )
    folder_of(place)
