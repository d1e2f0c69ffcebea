"""The journal: the job's record and its cluster's state, kept in SQLite for the next coordinator (I7)."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import msgspec

from rallypoint.config.kept import kept_record
from rallypoint.core.cluster.state import ClusterState
from rallypoint.errors import DataError

JOURNAL = "journal.sqlite"
_SCHEMA = """
create table if not exists record (id integer primary key check (id = 1), body blob not null);
create table if not exists state (id integer primary key check (id = 1), body blob not null);
drop table if exists views;
"""


class Journal:
    """The journal in `folder`; with "" it is in memory only. Raises DataError when it cannot be opened or read.

    Any thread may use it, but only one at a time.
    """

    def __init__(self, folder: str) -> None:
        path = str(Path(folder) / JOURNAL) if folder else ":memory:"
        self._path = path
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        except sqlite3.DatabaseError as error:
            raise DataError(f"the journal {path} cannot be opened ({error}): is its folder there, and yours?") from None
        try:
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=full")  # views are rare; the number of a lost one would be used twice
            self._db.executescript(_SCHEMA)
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
            raise DataError(f"the journal {self._path} cannot be written ({error})") from None
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

    def load(self) -> ClusterState | None:
        """The state that an earlier coordinator wrote; None if there is none.

        Raises DataError when it cannot be read, ConfigError when an older Rallypoint wrote a job that cannot go on.
        """
        try:
            row = self._db.execute("select body from state where id = 1").fetchone()
            record = self._db.execute("select body from record where id = 1").fetchone()
            if row is None:
                return None
            state = msgspec.msgpack.decode(row[0], type=ClusterState)
            if record is None:
                return state
            about = f"the journal {self._path}"
            return msgspec.structs.replace(state, record=kept_record(msgspec.msgpack.decode(record[0]), about))
        except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
            raise self._unreadable(error) from None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"the journal {self._path} cannot be read ({error}): move it away to start the job anew")
