"""The folder of a run: who may use it, what it holds already, where a running job is to be found."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rallypoint.coordinator.journal import JOURNAL, Journal
from rallypoint.core.cluster.effects import Abort, Finish
from rallypoint.errors import DataError, UsageError
from rallypoint.launch.code.kept import CODE, remove
from rallypoint.launch.plan import RUN_FILE, SNAPSHOTS
from rallypoint.store.snapshots import SnapshotStore

CLUSTER_FILE = "cluster.json"
LOCK = "lock"
_EVENTS = "events.jsonl"


class Where(msgspec.Struct, frozen=True):
    """Where a running job is: the coordinator's address and the job's token."""

    coordinator: str
    token: str


def new_folder(parent: Path) -> Path:
    """A folder for a run, named by the time: ``runs/20260131-235959``, with a number if there is one already."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = (parent / (stamp if n == 0 else f"{stamp}-{n}") for n in range(10_000))
    return next(folder for folder in candidates if not folder.exists())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process (made, if there is none). UsageError when another launcher holds it.

    The lock is the operating system's: it ends with this process, however that ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UsageError(f"{folder} cannot be a run's folder: {error.strerror}; choose another --folder") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"a run is under way in {folder}: end it first, or choose another --folder") from None
        yield
    finally:
        os.close(fd)


def refuse_an_old_run(folder: Path, snapshots: str) -> None:
    """UsageError when the folder holds a run already, or code of somebody's: a new run would overwrite it."""
    if not _holds_a_run(folder):
        _refuse_others_code(folder)
        return
    state = None
    if (folder / JOURNAL).exists():
        journal = Journal(str(folder))
        try:
            state = journal.load()
        finally:
            journal.close()
    match None if state is None else state.last_word:
        case Finish():
            record = state.record if state is not None else None
            steps = f" of {record.config['steps']} steps" if record is not None else ""
            raise UsageError(f"{folder} holds a finished run{steps}: choose another --folder, or --overwrite")
        case Abort(reason=reason):
            what = f"a run that failed ({reason})"
        case None:
            what = "an interrupted run"
    if has_snapshot(snapshots):
        raise UsageError(f"{folder} holds {what}: go on with `rallypoint resume {folder}`, or --overwrite")
    raise UsageError(f"{folder} holds {what}, without a snapshot: choose another --folder, or --overwrite")


def has_snapshot(snapshots: str) -> bool:
    """Is there a usable snapshot to go on from?"""
    return bool(snapshots) and SnapshotStore(snapshots).latest_usable(lambda text: None) is not None


def _holds_a_run(folder: Path) -> bool:
    return (folder / RUN_FILE).exists() or (folder / JOURNAL).exists()


def _refuse_others_code(folder: Path) -> None:
    """A run replaces ``code/`` in its folder: before the first one that folder belongs to somebody else."""
    if os.path.lexists(folder / CODE):
        raise UsageError(
            f"{folder / CODE} is not of a run, and a run would keep copies of its script there: choose another --folder"
        )


def clear(folder: Path) -> None:
    """Delete what an earlier run left here: its plan, journal, log, snapshots and kept code. Other files stay.

    UsageError when there was no run and the folder holds code of somebody's.
    """
    if not _holds_a_run(folder):
        _refuse_others_code(folder)
        return
    for name in (RUN_FILE, CLUSTER_FILE, _EVENTS, JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm"):
        (folder / name).unlink(missing_ok=True)
    for trace in folder.glob("trace-*.json"):
        trace.unlink()
    for name in (SNAPSHOTS, CODE):
        remove(folder / name)


def write_where(folder: Path, where: Where) -> None:
    """Keep where the job is, for `rallypoint resize` and `snapshot`; only this user may read it."""
    path = folder / CLUSTER_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(msgspec.json.encode(where))


def read_where(folder: Path) -> Where:
    """Where the job that runs in this folder is. DataError when none does."""
    try:
        return msgspec.json.decode((folder / CLUSTER_FILE).read_bytes(), type=Where)
    except (OSError, msgspec.DecodeError):
        raise DataError(f"no run is under way in {folder}") from None
