"""How a script that calls `rallypoint.join` under torchrun or mpirun becomes a worker.

The process that the launcher has started waits for the coordinator's address, and then replaces itself (`exec`: the
same process for the launcher, without the memory of the script) by a supervisor, which starts the script again as its
child, with the address in its environment. A worker that dies is started again there, and the launcher never sees it.

Rank 0 writes on a board (a folder, or the TCPStore of torchrun) how the others get to the coordinator. The token is
never written there: at most the name of a file that only this user can read, on a file system that all see.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec

from rallypoint.errors import Explained, LinkError, UsageError
from rallypoint.launch import environment
from rallypoint.launch.access import access_of
from rallypoint.launch.plan import is_loopback
from rallypoint.net.tcp import TcpTransport
from rallypoint.observe.lenient import flush_output, say
from rallypoint.own_files import OpenFolder, not_private, opened

_RANKS = "ranks="
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process among those that a launcher has started, as the launcher counts them."""

    launcher: str  # "torchrun" or "mpirun"
    # `rank`, `world`: which of how many
    rank: int
    world: int
    local_rank: int  # which on its machine
    nodes: int  # on how many machines
    attempt: str  # differs between any two starts of everybody that could be taken for each other
    master: str = ""  # ``host:port`` of torch's store; "" where there is none
    agent_store: bool = False  # torchrun has the store; else rank 0 has to open it

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
    ranks = server_ranks(place, wanted)
    return place.nodes if ranks is None else len(ranks)


def servers_here(place: Place, wanted: str) -> tuple[str, ...]:
    """Return the names of the servers that this process starts."""
    ranks = server_ranks(place, wanted)
    if ranks is None:
        return (f"server-{place.rank}",) if place.local_rank == 0 else ()
    return tuple(f"server{n}" for n, rank in enumerate(ranks) if rank == place.rank)


def place_of_torchrun(env: Mapping[str, str]) -> Place | None:
    """Return the place of this process; None if torchrun has not started it. UsageError if something is missing."""
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


PATIENCE_S = 300.0  # seconds in which rank 0 must have published; it may import from a cold disk
_SAY_S = 10.0
_POLL_S = 0.1
_CONNECT_S = 3.0
_STORE = timedelta(seconds=30)
_OTHERWISE = "delete it, or set RALLYPOINT_FOLDER to a folder of your own"


class FoundJob(msgspec.Struct, frozen=True):
    """The way into a job: the coordinator's address, and the file that holds the token ("": it comes otherwise)."""

    coordinator: str
    token_file: str = ""


def board_of(place: Place) -> FolderBoard | StoreBoard:
    """Return the board of this start of everybody. Raises UsageError if there can be none."""
    return StoreBoard(place) if place.master else FolderBoard(place)


def look(place: Place, patience: float = PATIENCE_S) -> FoundJob:
    """Wait until rank 0 has published a coordinator that listens, and return it.

    Says what it waits for. Raises UsageError after `patience` seconds, and if another user's token file is named.
    """
    board, began = board_of(place), time.monotonic()
    said = began
    while time.monotonic() - began < patience:
        if (text := board.read()) is not None:
            found = msgspec.json.decode(text, type=FoundJob)
            if found.token_file:
                check_own(Path(found.token_file))
            if listens(found.coordinator):  # it may be that of an earlier start
                return found
        if time.monotonic() - said > _SAY_S:
            said = time.monotonic()
            waited = f"{said - began:.0f} s so far"
            say(f"rank {place.rank} waits for rank 0 to start the job's coordinator, {waited}")
        time.sleep(_POLL_S)
    raise UsageError(f"rank 0 has started no coordinator that rank {place.rank} can connect to, in {patience:.0f} s")


def check_own(path: Path) -> None:
    """Raise UsageError unless a file is this user's, and nobody else's to read."""
    with Explained(UsageError, f"{path} cannot be read"), opened(path.parent) as folder, folder.open(path.name) as file:
        why = not_private(os.fstat(file.fileno()))
    if why:
        raise UsageError(f"{path} {why}: it is not used")


class FolderBoard:
    """A file in a folder that all processes see: RALLYPOINT_FOLDER, or on one machine one of our own in its /tmp."""

    def __init__(self, place: Place) -> None:
        self.folder = folder_of(place)
        self._name = f"coordinator-{_file_name(place.attempt)}.json"

    def read(self) -> bytes | None:
        """Return what is published; None while there is nothing.

        Raises UsageError if the folder or the file is another user's, or is something else.
        """
        try:
            with _entered(self.folder) as folder, folder.open(self._name) as file:
                if why := not_private(os.fstat(file.fileno())):
                    raise UsageError(f"{self.folder / self._name} {why}: it is not used")
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{self.folder / self._name} cannot be read: {error.strerror}") from None

    @contextlib.contextmanager
    def published(self, text: bytes) -> Iterator[None]:
        """While in the body, `text` is published. At its end it is withdrawn."""
        with _entered(self.folder) as folder:
            folder.write(self._name, text)
            try:
                yield
            finally:
                folder.unlink(self._name)


class StoreBoard:
    """The same as a key of the TCPStore that torchrun has. torch is imported only when it is needed."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._host, _, port = place.master.rpartition(":")
        self._port, self._key = int(port), f"rallypoint/{place.attempt}/coordinator"
        self._store: object | None = None

    def read(self) -> bytes | None:
        from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]  # torch names it so itself

        with contextlib.suppress(DistStoreError, RuntimeError):  # not there yet, or not yet listening
            if not isinstance(self._store, TCPStore):
                self._store = TCPStore(self._host.strip("[]"), self._port, is_master=False, timeout=_STORE)
            if self._store.check([self._key]):
                return bytes(self._store.get(self._key))
        return None

    @contextlib.contextmanager
    def published(self, text: bytes) -> Iterator[None]:
        """This process opens the store where torchrun has not."""
        from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # torch names it so itself

        store = TCPStore(
            self._host.strip("[]"), self._port, is_master=not self._place.agent_store, timeout=_STORE,
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
        store.set(self._key, text.decode())
        try:
            yield
        finally:
            with contextlib.suppress(DistError, RuntimeError):  # the store went first
                store.set_timeout(timedelta(seconds=_CONNECT_S))
                store.delete_key(self._key)


def folder_of(place: Place) -> Path:
    """Return the folder that all processes see. Raises UsageError if there is none."""
    if given := os.environ.get(environment.FOLDER, ""):
        return Path(given)
    if not place.one_machine:
        raise UsageError(
            f"{place.launcher} on several machines: set RALLYPOINT_FOLDER to a folder that all of them see, and you own"
        )
    return Path(tempfile.gettempdir()) / f"rallypoint-{os.geteuid()}-{_file_name(place.attempt)}"


@contextlib.contextmanager
def private_folder(place: Place) -> Iterator[Path]:
    """While in the body, a folder for rank 0's token file, which all processes see. One of our own is removed then.

    Raises UsageError if the folder of that name is another user's.
    """
    if place.master:
        with tempfile.TemporaryDirectory(prefix="rallypoint-") as made:
            yield Path(made)
        return
    folder, ours = folder_of(place), not os.environ.get(environment.FOLDER)
    with Explained(UsageError, f"{folder} cannot be made"), _entered(folder, make=True):
        pass
    try:
        yield folder
    finally:
        if ours:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def _entered(path: Path, *, make: bool = False) -> Iterator[OpenFolder]:
    """In the body the folder that all processes see is open. The one of a name that others can guess must be ours.
    Raises UsageError if it is not, or is no folder; FileNotFoundError if there is none."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(opened(path, make=make))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UsageError(f"{path} cannot be opened: {error.strerror}; {_OTHERWISE}") from None
        if not os.environ.get(environment.FOLDER) and (why := folder.not_private()):
            raise UsageError(f"{path} {why}; {_OTHERWISE}")
        yield folder


def _file_name(attempt: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in attempt)


def listens(address: str) -> bool:
    """True if somebody accepts connections there."""
    try:
        TcpTransport().connect(address, _CONNECT_S).close()
    except LinkError:
        return False
    return True


SUPERVISION = "rallypoint.launch.engines.supervision"


class RankDuties(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor has to do."""

    place: Place  # its place among the others
    worker: tuple[str, ...]  # the script's command line
    servers: tuple[str, ...] = ()  # the names of the servers that it starts
    servers_in_all: int = 1  # how many servers the job has
    found: FoundJob | None = None  # the way into the job; None for rank 0, which starts the coordinator


def place_of(env: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun or mpirun has given this process; None if neither has started it."""
    return place_of_torchrun(env) or place_of_mpirun(env, os.getppid())


def enter(place: Place) -> NoReturn:
    """Replace this process by the supervisor of its place. Raises UsageError if something that it needs is missing."""
    check_token(place)
    wanted = os.environ.get(environment.SERVERS, "")
    duties = RankDuties(
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
