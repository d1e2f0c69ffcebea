"""Where rank 0 writes how the others get to the job's coordinator, and where they read it.

The token is never written there: at most the name of a file that only this user can read, on a file system that all
processes see.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import msgspec

from rallypoint.errors import LinkError, UsageError
from rallypoint.launch import environment
from rallypoint.launch.discovery.place import Place
from rallypoint.net.tcp import TcpTransport
from rallypoint.observe.lenient import say
from rallypoint.own_files import OpenFolder, not_private, opened

PATIENCE_S = 300.0  # seconds in which rank 0 must have published; it may import from a cold disk
_SAY_S = 10.0
_POLL_S = 0.1
_CONNECT_S = 3.0
_STORE = timedelta(seconds=30)
_OTHERWISE = "delete it, or set RALLYPOINT_FOLDER to a folder of your own"


class Found(msgspec.Struct, frozen=True):
    """The way into a job: the coordinator's address, and the file that holds the token ("": it comes otherwise)."""

    coordinator: str
    token_file: str = ""


class Board(Protocol):
    """One place to publish on, and to look at."""

    def read(self) -> bytes | None:
        """Return what is published; None while there is nothing. May wait for a second."""

    def published(self, text: bytes) -> contextlib.AbstractContextManager[None]:
        """While in the body, `text` is published. At its end it is withdrawn."""


def board_of(place: Place) -> Board:
    """Return the board of this start of everybody. Raises UsageError if there can be none."""
    if place.master:
        return StoreBoard(place)
    return FolderBoard(place)


def look(place: Place, patience: float = PATIENCE_S) -> Found:
    """Wait until rank 0 has published a coordinator that listens, and return it.

    Says what it waits for. Raises UsageError after `patience` seconds, and if another user's token file is named.
    """
    board, began = board_of(place), time.monotonic()
    said = began
    while time.monotonic() - began < patience:
        if (text := board.read()) is not None:
            found = msgspec.json.decode(text, type=Found)
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
    try:
        with opened(path.parent) as folder, folder.open(path.name) as file:
            why = not_private(os.fstat(file.fileno()))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if why:
        raise UsageError(f"{path} {why}: it is not used")


class FolderBoard:
    """A file in a folder that all processes see: RALLYPOINT_FOLDER, or on one machine one of our own in its /tmp."""

    def __init__(self, place: Place) -> None:
        self.folder = folder_of(place)
        self._name = f"coordinator-{_file_name(place.attempt)}.json"

    def read(self) -> bytes | None:
        """See `Board`. Raises UsageError if the folder or the file is another user's, or is something else."""
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
        """See `Board`."""
        with _entered(self.folder) as folder:
            folder.write(self._name, text)
            try:
                yield
            finally:
                folder.unlink(self._name)


class StoreBoard:
    """A key of the TCPStore that torchrun has. torch is imported only to read, and by `store` to write."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._host, _, port = place.master.rpartition(":")
        self._port, self._key = int(port), f"rallypoint/{place.attempt}/coordinator"
        self._store: object | None = None

    def read(self) -> bytes | None:
        """See `Board`."""
        from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]  # torch names it so itself

        with contextlib.suppress(DistStoreError, RuntimeError):  # not there yet, or not yet listening
            if not isinstance(self._store, TCPStore):
                self._store = TCPStore(self._host.strip("[]"), self._port, is_master=False, timeout=_STORE)
            if self._store.check([self._key]):
                return bytes(self._store.get(self._key))
        return None

    @contextlib.contextmanager
    def published(self, text: bytes) -> Iterator[None]:
        """See `Board`. A process of its own writes, so that this one needs no torch."""
        serve = [] if self._place.agent_store else ["serve"]
        module = "rallypoint.launch.discovery.store"
        writer = subprocess.Popen(
            [sys.executable, "-P", "-m", module, self._host.strip("[]"), str(self._port), self._key, *serve],
            stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert writer.stdin is not None
        try:
            writer.stdin.write(text + b"\n")
            writer.stdin.flush()
            yield
        finally:
            with contextlib.suppress(OSError):
                writer.stdin.close()  # it takes the key back, and ends
            try:
                writer.wait(_CONNECT_S)
            except subprocess.TimeoutExpired:  # the store is gone
                writer.kill()
                writer.wait()


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
    try:
        with _entered(folder, make=True):
            pass
    except FileNotFoundError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from None
    try:
        yield folder
    finally:
        if ours:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def _entered(path: Path, *, make: bool = False) -> Iterator[OpenFolder]:
    """In the body the folder that all processes see is open. The one of a name that others can guess must be ours.

    Raises UsageError if it is not, or is no folder; FileNotFoundError if there is none.
    """
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
