"""The journal: the job's record and its cluster's state, kept in SQLite for the next coordinator (I7).

A thread of its own writes it: a disk that hangs stops no job.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from rallypoint.config.changes import kept_record
from rallypoint.core.cluster.state import ClusterState
from rallypoint.errors import DataError, Explained
from rallypoint.net.handshake import KEY_BYTES
from rallypoint.store.files import WAL, EndingThread, is_over, journal_mode

log = logging.getLogger("rallypoint")

JOURNAL = "journal.sqlite"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
PATIENCE_S = 5.0  # a disk that takes longer hangs: views are published without it, and steps go on meanwhile
_AGAIN_PATIENCE_S = 1.0  # of one that could not be written before
NEEDED_PATIENCE_S = 30.0  # before the job has begun
_SCHEMA = """
create table if not exists record (id integer primary key check (id = 1), body blob not null);
create table if not exists state (id integer primary key check (id = 1), body blob not null);
create table if not exists secret (id integer primary key check (id = 1), body blob not null);
drop table if exists views;
"""


def own(path: Path) -> None:
    """Create the file if there is none, and let only its owner read it: settings and addresses are in it.

    Raises OSError if it cannot be created.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    with contextlib.suppress(OSError):  # another user's, or a filesystem without modes
        path.chmod(0o600)


def opened_to_read(path: Path) -> sqlite3.Connection:
    """Open a database of a run that may be under way, or somebody else's: to read it, and follow no link.

    Nothing is written but SQLite's own index (``-shm``) of what a run that was killed, or goes on, has in its ``-wal``.
    Raises OSError or sqlite3.Error.
    """
    for name in (path.name, *(f"{path.name}-{beside}" for beside in ("wal", "shm", "journal"))):
        beside = path.with_name(name)
        if os.path.lexists(beside) and not stat.S_ISREG(beside.lstat().st_mode):
            raise OSError(errno.EINVAL, f"{name} is not a regular file")
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable={is_over(path):d}", uri=True)


def kept_state(folder: Path) -> ClusterState | None:
    """As `Journal.load`, of a run in whose folder nothing may be written. None also without a journal.

    Raises DataError when it cannot be read, and for a link; ConfigError as `Journal.load`.
    """
    path = folder / JOURNAL
    if not os.path.lexists(path):
        return None
    errors = (sqlite3.Error, OSError, msgspec.DecodeError)
    cannot = Explained(DataError, f"the journal {path} cannot be read", of=errors)
    with cannot, contextlib.closing(opened_to_read(path)) as kept:
        return _state_in(kept, str(path))


def _state_in(kept: sqlite3.Connection, path: str) -> ClusterState | None:
    row = kept.execute("select body from state where id = 1").fetchone()
    record = kept.execute("select body from record where id = 1").fetchone()
    if row is None:
        return None
    data = msgspec.msgpack.decode(row[0])
    if (view := data.get("view")) and "orders" not in view:  # an earlier version has written it
        view["orders"] = dict(view)
    if word := data.get("last_word"):  # so it has
        word["type"] = {"FinishJob": "Finished", "Abort": "Aborted"}.get(word["type"], word["type"])
    state = msgspec.convert(data, ClusterState)
    if record is None:
        return state
    return msgspec.structs.replace(state, record=kept_record(msgspec.msgpack.decode(record[0]), f"the journal {path}"))


class Journal:
    """The journal in `folder`; with "" it is in memory only. Raises DataError when it cannot be opened or read.

    Any thread may use it, but only one at a time.

    Attributes:
        path: the file.
        secret: the job's secret, from which the secrets of members follow. It is made with the journal, and never
            changes.
    """

    def __init__(self, folder: str) -> None:
        path = str(Path(folder) / JOURNAL) if folder else ":memory:"
        self.path = path
        try:
            if folder:
                own(Path(path))
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        except (sqlite3.DatabaseError, OSError) as error:
            raise DataError(f"the journal {path} cannot be opened ({error}): is its folder there, and yours?") from None
        try:
            self._db.execute(f"pragma journal_mode={journal_mode(Path(path)) if folder else WAL}")
            self._db.execute("pragma synchronous=full")  # views are rare; the number of a lost one would be used twice
            self._db.executescript(_SCHEMA)
            self.secret = self._secret()
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise self._unreadable(error) from None
        self._recorded = False

    def save(self, state: ClusterState) -> None:
        """Write the state; it is durable when this returns. The record, which never changes, is written only once.

        Raises DataError when it cannot be written (a full disk).
        """
        try:
            self._write(state)
        except sqlite3.DatabaseError as error:
            raise DataError(f"the journal {self.path} cannot be written ({error})") from None
        self._recorded = state.record is not None

    def _write(self, state: ClusterState) -> None:
        self._db.execute("begin immediate")
        try:
            if state.record is None:
                self._db.execute("delete from record")  # its worker left before the job began
            elif not self._recorded:
                self._db.execute("insert or replace into record values (1, ?)", (msgspec.msgpack.encode(state.record),))
            body = msgspec.msgpack.encode(msgspec.structs.replace(state, record=None))
            self._db.execute("insert or replace into state values (1, ?)", (body,))
            self._db.execute("commit")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled it back already
                self._db.execute("rollback")
            raise

    def _secret(self) -> bytes:
        known = self._db.execute("select body from secret where id = 1").fetchone()
        if known is not None:
            return bytes(known[0])
        made = secrets.token_bytes(KEY_BYTES)
        self._db.execute("insert into secret values (1, ?)", (made,))
        return made

    def load(self) -> ClusterState | None:
        """The state that an earlier coordinator wrote; None if there is none.

        Raises DataError when it cannot be read, ConfigError when an older Rallypoint wrote a job that cannot go on.
        """
        try:
            return _state_in(self._db, self.path)
        except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
            raise self._unreadable(error) from None

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"the journal {self.path} cannot be read ({error}): move it away to start the job anew")


class Persistence:
    """Writes states to a journal; while that fails or hangs, keeps the newest and tries again, ever more rarely.

    `save` returns when the state is durable, or when the disk has taken too long. Then nothing waits for the disk any
    more until it has answered.

    `say` gets a sentence when saving begins to fail, and one when it works again.

    Only one thread may call it.
    """

    def __init__(self, journal: Journal, say: Callable[[str], None]) -> None:
        self._writer, self._say = _Writer(journal), say
        self._unsaved: ClusterState | None = None
        self._pause = 0.0
        self._again_at = 0.0

    def save(self, state: ClusterState, now: float, *, needed: bool) -> None:
        """Save the state at time `now` (s). Raises DataError if it is `needed` and cannot be written."""
        before, self._unsaved = self._unsaved, state
        if before is None or needed:  # otherwise it is tried at its time
            self._try(now, needed=needed)

    def tick(self, now: float) -> None:
        """Try again if it is time, unless a slow disk has written the newest state by now."""
        if self._unsaved is None or self._writer.is_busy:
            return
        if self._writer.written is self._unsaved:
            self._is_saved()
        elif now >= self._again_at:
            self._try(now, needed=False)

    def stop(self) -> EndingThread:
        """Let the thread try once more, close the journal and end. Return it, to be waited for."""
        return self._writer.stop(self._unsaved)

    def _try(self, now: float, *, needed: bool) -> None:
        assert self._unsaved is not None
        patience = PATIENCE_S if self._pause == 0.0 else min(PATIENCE_S, _AGAIN_PATIENCE_S)
        try:
            self._writer.write(self._unsaved, NEEDED_PATIENCE_S if needed else patience)
        except DataError as error:
            if needed:
                raise
            if self._pause == 0.0:
                self._say(
                    f"{error}: the job goes on, and its members keep what the next coordinator must know; make room. "
                    "It is tried again until it succeeds"
                )
            self._pause = min(max(2 * self._pause, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._again_at = now if self._writer.is_busy else now + self._pause  # one that hangs needs no pause
            return
        self._is_saved()

    def _is_saved(self) -> None:
        if self._pause > 0.0:
            self._say("the journal is written again")
        self._unsaved, self._pause = None, 0.0


class _Writer:
    """The thread that writes to the journal, one state at a time, and closes it at the end."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._changed = threading.Condition()
        self._state: ClusterState | None = None  # being written
        self._error: Exception | None = None  # of the last one
        self.written: ClusterState | None = None  # the last one that is durable
        self._stopping = False
        self._last: ClusterState | None = None  # to be written before the end
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return self._state is not None

    def write(self, state: ClusterState, patience: float) -> None:
        """Write the state. Raises DataError if it cannot be written, or has not been in `patience` seconds."""
        with self._changed:
            if self._thread.ident is None:
                self._thread.start()
            if self._changed.wait_for(lambda: self._state is None, patience):
                self._state = state
                self._changed.notify_all()
                if self._changed.wait_for(lambda: self._state is None, patience):
                    if self._error is not None:
                        raise self._error
                    return
        why = f"its disk has not answered for {patience:g} s"
        raise DataError(f"the journal {self._journal.path} cannot be written ({why})")

    def stop(self, unsaved: ClusterState | None) -> EndingThread:
        """Let the thread write `unsaved`, close the journal and end."""
        with self._changed:
            if self._thread.ident is None:
                self._thread.start()
            self._stopping, self._last = True, unsaved
            self._changed.notify_all()
        return self._thread, f"the journal {self._journal.path}"

    def _run(self) -> None:
        while (state := self._next()) is not None:
            error: Exception | None = None
            try:
                self._journal.save(state)
            except Exception as failure:  # `write` raises it to whoever waits
                error = failure
            with self._changed:
                self.written = state if error is None else self.written
                self._state, self._error = None, error
                self._changed.notify_all()
        if self._last is not None:
            try:
                self._journal.save(self._last)
            except DataError as failure:
                log.warning("%s; the job is over", failure)
        self._journal.close()

    def _next(self) -> ClusterState | None:
        """Wait for a state to write; None when there comes no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not None or self._stopping)
            return self._state
