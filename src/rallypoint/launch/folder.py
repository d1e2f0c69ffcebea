"""The folder of a run: its lock, what it already holds, and the address of the running job."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rallypoint.coordinator.fingerprints import FINGERPRINTS
from rallypoint.coordinator.journal import JOURNAL, Journal
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.protocol import Aborted, Finished
from rallypoint.core.typed import printable
from rallypoint.errors import DataError, Explained, RallypointError, UsageError, to_resume
from rallypoint.launch.kept_code import CODE, remove
from rallypoint.launch.plan import RUN_FILE, SNAPSHOTS_FOLDER, TLS, read_plan
from rallypoint.own_files import COORDINATOR_LOCK, LOCK, held, is_held, opened, read_file
from rallypoint.store.snapshots import SnapshotStore

CLUSTER_FILE = "cluster.json"
CONSOLE, CONSOLE_BEFORE = "console.log", "console.log.1"  # what processes have printed: see `reporting.kept_lines`
STACKS, REPORTS = "stacks", "reports"  # see `launch.observing`
PREDECESSOR_S = 5.0  # so long a coordinator waits for the one before it to end
TOKEN_FILE = "token-{}"  # of a coordinator that was started by hand, with its process id
_EVENTS = "events.jsonl"
_ANOTHER = "; choose another --folder"


class Where(msgspec.Struct, frozen=True):
    """How to reach a running job: the coordinator's address, the job's token, the folder of the certificates ("": no
    TLS)."""

    coordinator: str
    token: str
    tls: str = ""

    def __repr__(self) -> str:
        return f"Where({self.coordinator!r})"  # the token belongs in no log line


def new_folder(parent: Path) -> Path:
    """Make a folder for a new run, named by the time: ``runs/20260131-235959``, with a number if it exists.

    No other run gets it, also if many start in the same second: whoever makes it has it. Raises UsageError if none can
    be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = parent / stamp
    with Explained(UsageError, f"{folder} cannot be a run's folder", _ANOTHER):
        parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        for n in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o755)  # others may not write it: see `refuse_others_words`
                break
            folder = parent / f"{stamp}-{n}"
    return folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process; create it if needed. Raises UsageError when another launcher holds it.

    The lock is the operating system's: it ends with this process, in any case.
    """
    why = f"a run is under way in {folder}: end it first (Ctrl-C where it was started), or choose another --folder"
    with contextlib.ExitStack() as stack:
        with Explained(UsageError, f"{folder} cannot be a run's folder", _ANOTHER):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # others may not write it: see `code.trusted`
            stack.enter_context(held(folder, LOCK, 0.0, lambda _: UnderWay(why)))
        yield


@contextlib.contextmanager
def coordinated(folder: Path) -> Iterator[None]:
    """While in the body, this process is the folder's only coordinator; create the folder if needed.

    Two would write one journal, and both could prove that they are the job's. A coordinator that is about to end is
    waited for, up to 5 s; then UsageError.
    """

    def refusal(fd: int) -> UsageError:
        who = printable(os.pread(fd, 200, 0).decode(errors="replace")) or "another process"
        return UsageError(
            f"{folder} has a coordinator already ({who}): end that one first. If its machine has died, and the network "
            f"file system still keeps its lock, delete {folder / COORDINATOR_LOCK}"
        )

    with contextlib.ExitStack() as stack:
        with Explained(UsageError, f"{folder} cannot hold the journal", _ANOTHER):
            folder.mkdir(parents=True, exist_ok=True)
            fd = stack.enter_context(held(folder, COORDINATOR_LOCK, PREDECESSOR_S, refusal))
        with contextlib.suppress(OSError):  # a full disk: the name is for a sentence
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield


class UnderWay(UsageError):
    """Another launcher holds the folder."""


def refuse_a_running_run(folder: Path) -> None:
    """Raise UsageError when the run in this folder has not ended: it cannot be resumed, and needs not be."""
    try:
        with locked(folder):
            return
    except UnderWay:
        raise UsageError(
            f"the run in {folder} is still under way, so there is nothing to resume: `rallypoint resize {folder}` "
            "changes its size; to stop it, press Ctrl-C where it was started"
        ) from None


def refuse_an_old_run(folder: Path, snapshots: str) -> None:
    """Raise UsageError when the folder holds a run, or a user's code: a new run would overwrite it."""
    if not _holds_a_run(folder):
        _refuse_others_code(folder)
        refuse_used_snapshots(snapshots)
        return
    state = _journaled(folder)
    match None if state is None else state.last_word:
        case Finished():
            what = f"a finished run{_of_steps(state)}"
            raise UsageError(f"{folder} holds {what}: choose another --folder, or --overwrite")
        case Aborted(reason=reason):
            what = f"a run that failed ({reason})"
        case None:
            what = "an interrupted run"
    if has_snapshot(snapshots):
        raise UsageError(f"{folder} holds {what}: go on with `{to_resume(folder)}`, or --overwrite")
    raise UsageError(f"{folder} holds {what}, without a snapshot: choose another --folder, or --overwrite")


def refuse_unwritable_snapshots(snapshots: str) -> None:
    """Raise UsageError if no folder can be made there, on this machine. Else only the first snapshot would show it.

    Leaves nothing there: the folder is made with the first snapshot.
    """
    if not snapshots or "://" in snapshots:
        return
    place = Path(snapshots).absolute()
    there = next(path for path in (place, *place.parents) if path.exists())
    with Explained(UsageError, f"snapshots cannot be written to {snapshots}", "; choose another --snapshots"):
        tempfile.TemporaryDirectory(prefix=".try-", dir=there).cleanup()


def refuse_used_snapshots(snapshots: str) -> None:
    """Raise UsageError when another run's snapshots are there: a new run's retention would delete them."""
    if has_snapshot(snapshots):
        raise UsageError(f"{snapshots} holds snapshots of another run: choose another --snapshots, or delete them")


def refuse_a_finished_run(folder: Path) -> None:
    """Raise UsageError when the run in this folder is over: nothing is left to continue."""
    state = _journaled(folder)
    if state is None or not isinstance(word := state.last_word, Finished):
        return
    export = f"`rallypoint export {shlex.quote(str(folder))} --to model.safetensors` writes its model"
    more = f"`{to_resume(folder)} --set steps=N`"
    if word.stopped_at >= 0:
        raise UsageError(
            f"{folder} holds a run that was stopped at step {word.stopped_at} ({word.why}): {export}; {more} goes on "
            "from that step, and a rule or script that stopped it may do so again"
        )
    steps, than = _of_steps(state), _of_steps(state, "than")
    raise UsageError(f"{folder} holds a finished run{steps}: nothing is left to do. {export}; {more} makes more{than}")


def _journaled(folder: Path) -> ClusterState | None:
    """Return what the run's last coordinator has written to its journal; None without a journal."""
    if not (folder / JOURNAL).exists():
        return None
    journal = Journal(str(folder))
    try:
        return journal.load()
    finally:
        journal.close()


def _of_steps(state: ClusterState | None, before: str = "of") -> str:
    steps = 0 if state is None or state.record is None else state.record.steps
    return f" {before} {steps} steps" if steps else ""


def has_snapshot(snapshots: str) -> bool:
    """True if there is a snapshot, usable or not: one that cannot be read now is no reason to begin anew."""
    return bool(snapshots) and SnapshotStore(snapshots).holds_any()


def _holds_a_run(folder: Path) -> bool:
    return (folder / RUN_FILE).exists() or (folder / JOURNAL).exists()


def _refuse_others_code(folder: Path) -> None:
    """Raise UsageError if ``code/`` exists before the first run: it belongs to the user, and a run would replace it."""
    if os.path.lexists(folder / CODE):
        raise UsageError(
            f"{folder / CODE} is not of a run, and a run would keep copies of its script there: choose another --folder"
        )


def clear(folder: Path) -> str:
    """Delete what an earlier run left here: plan, journal, log, snapshots and kept code. Other files stay.

    Returns a sentence about the run's snapshots if they stay because they are elsewhere, else "". Raises UsageError
    when there was no run and the folder holds a user's code.
    """
    if not _holds_a_run(folder):
        _refuse_others_code(folder)
        return ""
    elsewhere = _snapshots_elsewhere(folder)
    databases = [f"{name}{end}" for name in (JOURNAL, FINGERPRINTS) for end in ("", "-wal", "-shm", "-journal")]
    for name in (RUN_FILE, CLUSTER_FILE, _EVENTS, *databases, CONSOLE, CONSOLE_BEFORE):
        (folder / name).unlink(missing_ok=True)
    for file in (*folder.glob("trace-*.json"), *folder.glob("tracked-*.json")):
        file.unlink()
    for name in (SNAPSHOTS_FOLDER, CODE, TLS, STACKS, REPORTS):
        remove(folder / name)
    if not elsewhere:
        return ""
    return f"the snapshots of the run that was overwritten stay in {elsewhere}: delete them by hand"


@contextlib.contextmanager
def not_begun(folder: Path) -> Iterator[None]:
    """If the body cannot begin its run (a host, a certificate is missing), delete this folder, which it has made."""
    try:
        yield
    except RallypointError:
        if not (folder / JOURNAL).exists():
            with contextlib.suppress(OSError, RallypointError):
                clear(folder)
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()  # only if nothing of anybody else's is in it
        raise


def _snapshots_elsewhere(folder: Path) -> str:
    """Return where the run's snapshots are, if there are any and not in the run's folder; else ""."""
    try:
        url = read_plan(folder).snapshots
    except DataError:
        return ""
    if "://" not in url:
        place = Path(url).resolve()
        url = "" if not url or place.is_relative_to(folder.resolve()) else str(place)
    return url if url and SnapshotStore(url).holds_any() else ""


def write_where(folder: Path, where: Where) -> None:
    """Write the job's address, for `rallypoint resize` and `snapshot`. Only this user may read the file."""
    with opened(folder) as own:
        own.write(CLUSTER_FILE, msgspec.json.encode(where))


@contextlib.contextmanager
def token_file(folder: Path, token: str) -> Iterator[Path]:
    """While in the body, the token is in a file that only this user may read. Yields its path."""
    name = TOKEN_FILE.format(os.getpid())  # in a container all have the same process id: a killed one may have left it
    with opened(folder) as own:
        own.write(name, token.encode())
        try:
            yield folder / name
        finally:
            own.unlink(name)


def read_where(folder: Path) -> Where:
    """Return the address of the job that runs in this folder. Raises DataError when none runs, UsageError when its
    coordinator was started by hand: it takes no orders from a folder."""
    try:
        return msgspec.json.decode(read_file(folder / CLUSTER_FILE), type=Where)
    except (OSError, msgspec.DecodeError):
        if is_held(folder / COORDINATOR_LOCK, unknown=True) and not (folder / RUN_FILE).exists():
            raise UsageError(
                f"orders are for runs that Rallypoint started, and the coordinator in {folder} was started by hand: "
                "Ctrl-C (SIGINT) at it ends the job for all, SIGTERM ends it alone, for the next one. To change the "
                "number of members, start servers and workers, or send them SIGTERM"
            ) from None
        raise DataError(f"no run is under way in {folder}") from None
