"""The command line of the coordinator that rank 0 starts. Pure, but for this machine's own address."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable
from pathlib import Path

from rallypoint.errors import LinkError
from rallypoint.launch.discovery.place import Place
from rallypoint.launch.plan import SNAPSHOTS_FOLDER, is_loopback
from rallypoint.net.places import advertised
from rallypoint.net.tcp import EVERYWHERE

_SOMEWHERE = "192.0.2.1:9"  # an address of no machine (RFC 5737): the way to it is the way out of this one


def coordinator_arguments(
    place: Place, servers: int, given: str, fresh_folder: Callable[[], str], threads: int = 0
) -> tuple[str, ...]:
    """Return the arguments of ``rallypoint coordinator``: our defaults, then the user's own options, which win.

    `given`: RALLYPOINT_OPTIONS. `threads`: what OMP_NUM_THREADS asks for; 0: it does not. `fresh_folder` makes the
    run's folder, unless the user names one. There are snapshots if a folder is named, or if all is on one machine:
    others may not see the folder. It goes on from the newest.
    """
    own = _words(given)
    named = _value(own, "--folder")
    folder = named or fresh_folder()
    snapshots = _value(own, "--snapshots")
    if not snapshots:
        snapshots = str(Path(folder) / SNAPSHOTS_FOLDER) if named or place.one_machine else "none"
    bind, host = ("127.0.0.1:0", "") if place.one_machine else (f"{EVERYWHERE}:0", own_address(place))
    return (
        "--workers", str(place.world), "--servers", str(servers), "--folder", folder,
        *(["--threads", str(threads)] if threads else []),
        "--snapshots", snapshots, *(["--resume", "latest"] if snapshots != "none" else []),
        "--bind", bind, *(["--advertise", host] if host and not _value(own, "--bind") else []), *own,
    )  # fmt: skip


def again(arguments: tuple[str, ...], address: str) -> tuple[str, ...]:
    """Return the arguments of a coordinator that takes over from one that members reached at `address`.

    It listens at the same port, and goes on with the journal instead of a snapshot.
    """
    words, port = list(arguments), address.rpartition(":")[2]
    while "--resume" in words:
        at = words.index("--resume")
        del words[at : at + 2]
    last = max(n for n, word in enumerate(words) if word == "--bind")
    words[last + 1] = f"{words[last + 1].rpartition(':')[0]}:{port}"
    return tuple(words)


def own_address(place: Place) -> str:
    """Return the address of this machine that the others can connect to: that of its way to torchrun's store, or out.
    """
    try:
        host = advertised(f"{EVERYWHERE}:0", towards=place.master or _SOMEWHERE).rpartition(":")[0]
    except LinkError:
        return ""
    if is_loopback(host) and place.master:  # the store is here: the others know its name
        return place.master.rpartition(":")[0]
    return host


def _words(given: str) -> list[str]:
    """Split as a shell does, and ``--folder=x`` into two words."""
    found: list[str] = []
    for word in shlex.split(given):
        found += word.split("=", 1) if word.startswith("--") else [word]
    return found


def _value(words: list[str], option: str) -> str:
    """Return the value of an option; "" without it."""
    return next((after for word, after in itertools.pairwise(words) if word == option), "")
