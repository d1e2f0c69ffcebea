"""The digests of a run, contributions and versions, in ``fingerprints.sqlite`` of its folder (`fingerprints=`)."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from rallypoint.coordinator.journal import opened_to_read, own
from rallypoint.core.protocol import Contributed, Fingerprint, Updated
from rallypoint.core.view import ViewNumber
from rallypoint.errors import DataError, Explained
from rallypoint.store import files
from rallypoint.store.files import EndingThread, journal_mode

log = logging.getLogger("rallypoint")

_Row = TypeVar("_Row", bound=tuple[object, ...])
FINGERPRINTS = "fingerprints.sqlite"
MOST_BYTES = 256 << 20
_MOST_WAITING = 10_000  # digests that wait for a disk that hangs
_LOOK_EVERY = 256  # digests between two looks at the size
_MOST_TOLD = 100  # differences
_FORGOTTEN = 8  # of so many parts of the steps, the oldest is forgotten when there is no more room
_SCHEMA = """
create table if not exists contributions (
    step integer, replica integer, generation text, worker text, loss real, digests blob, primary key (step, replica)
) without rowid;
create table if not exists versions (
    version integer, shard integer, generation text, server text, digests blob, primary key (version, shard)
) without rowid;
"""


class FingerprintLog:
    """Keeps digests, each of them once. With `folder=""` it keeps none. A thread of its own writes.

    A claim of a newer generation replaces an older one's. Two claims of one generation that differ are told through
    `say`: one of those two has computed something else, though both had the same to compute. The first one is kept. It
    is told once of each contribution and each shard's version, and of 100 in all.

    The file is for its owner only. When it has more than `most` bytes, the oldest eighth of the steps that it has goes.
    Whatever cannot be written is dropped, with one warning.
    """

    def __init__(self, folder: str, say: Callable[[str], None], *, most: int = MOST_BYTES) -> None:
        self._path, self._say, self._most = Path(folder) / FINGERPRINTS if folder else None, say, most
        self._claims: queue.Queue[tuple[str, Fingerprint] | None] = queue.Queue(_MOST_WAITING)
        self._warned = False
        self._told: set[str] = set()  # what differs, of what was told
        self._thread = threading.Thread(target=self._run, name="fingerprints", daemon=True)

    def add(self, member: str, claim: Fingerprint) -> None:
        """Keep what a member claims. Only one thread may call it."""
        if self._path is None:
            return
        if self._thread.ident is None:
            self._thread.start()
        with contextlib.suppress(queue.Full):
            self._claims.put_nowait((member, claim))

    def stop(self) -> list[EndingThread]:
        """Let the thread write what waits, and end. Return it, to be waited for, if there is one."""
        if self._thread.ident is None:
            return []
        with contextlib.suppress(queue.Full):
            self._claims.put(None, timeout=files.END_PATIENCE_S)
        return [(self._thread, f"the digests {self._path}")]

    def _run(self) -> None:
        assert self._path is not None
        kept: sqlite3.Connection | None = None
        count = 0
        while (item := self._claims.get()) is not None:
            try:
                kept = kept or opened(self._path)
                with kept:
                    self._keep(kept, *item)
                    while count < _LOOK_EVERY and (more := self._next()) is not None:
                        self._keep(kept, *more)
                        count += 1
                count += 1
                if count >= _LOOK_EVERY:
                    count = 0
                    while _size(kept) > self._most and _forget_the_oldest(kept):
                        pass
            except (sqlite3.Error, OSError) as error:
                if not self._warned:
                    log.warning("%s cannot be written, the job goes on without: %s", self._path, error)
                self._warned = True
        if kept is not None:
            kept.close()

    def _next(self) -> tuple[str, Fingerprint] | None:
        """What waits too; None if nothing does, or the end."""
        with contextlib.suppress(queue.Empty):
            item = self._claims.get_nowait()
            if item is None:
                self._claims.put(None)
            return item
        return None

    def _keep(self, kept: sqlite3.Connection, member: str, claim: Fingerprint) -> None:
        assert isinstance(claim, Contributed | Updated)
        generation = msgspec.json.encode(claim.generation).decode()
        if isinstance(claim, Contributed):
            table, names, key = "contributions", "step = ? and replica = ?", (claim.step, claim.replica)
            rest: tuple[object, ...] = (member, claim.loss, claim.digests)
            what, who = f"the contribution of replica {claim.replica} to step {claim.step}", "worker"
        else:
            table, names, key = "versions", "version = ? and shard = ?", (claim.version, claim.shard)
            rest = (member, claim.digests)
            what, who = f"shard {claim.shard} at version {claim.version}", "server"
        query = f"select generation, digests, {who} from {table} where {names}"
        known = kept.execute(query, key).fetchone()
        if known is not None and msgspec.json.decode(known[0], type=ViewNumber) >= claim.generation:
            if known[0] == generation and known[1] != claim.digests:
                self._differs(what, f"{member} has other bytes than {known[2]} had for the same")
            return
        row = (*key, generation, *rest)
        kept.execute(f"insert or replace into {table} values ({', '.join('?' * len(row))})", row)

    def _differs(self, what: str, how: str) -> None:
        """Say it, once of each, and not without end: a member can claim as much as it likes."""
        if len(self._told) > _MOST_TOLD or what in self._told:
            return
        self._told.add(what)
        if len(self._told) > _MOST_TOLD:
            self._say(f"more digests differ from those that were there before: only the first {_MOST_TOLD} are told")
        else:
            self._say(f"{what}: {how}: see `rallypoint replay`")


def _size(kept: sqlite3.Connection) -> int:
    pages, size, free = (kept.execute(f"pragma {of}").fetchone()[0] for of in _SIZES)
    return int((pages - free) * size)


def _forget_the_oldest(kept: sqlite3.Connection) -> bool:
    """Delete the oldest eighth of the recorded steps: of their number, not of their range. False if none is."""
    steps = "select step from contributions union select version from versions"
    (count,) = kept.execute(f"select count(*) from ({steps})").fetchone()
    if not count:
        return False
    (until,) = kept.execute(f"{steps} order by 1 limit 1 offset ?", (max(1, count // _FORGOTTEN) - 1,)).fetchone()
    with kept:
        kept.execute("delete from versions where version <= ?", (until,))
        kept.execute("delete from contributions where step <= ?", (until,))
    return True


_SIZES = ("page_count", "page_size", "freelist_count")


def opened(path: Path) -> sqlite3.Connection:
    """Open the file to write; create it if there is none. Raises OSError or sqlite3.Error."""
    own(path)
    kept = sqlite3.connect(path, isolation_level="IMMEDIATE")
    kept.execute(f"pragma journal_mode={journal_mode(path)}")
    kept.execute("pragma synchronous=normal")
    kept.executescript(_SCHEMA)
    return kept


class KeptContribution(NamedTuple):
    """What the run has recorded of a replica's contribution: who computed it, its loss, a digest for each shard."""

    worker: str
    loss: float
    digests: bytes


class KeptFingerprints:
    """The recorded digests of a run, to read. It is empty without a file, and raises DataError for one that is no such.
    """

    def __init__(self, folder: Path) -> None:
        path, errors = folder / FINGERPRINTS, (sqlite3.Error, OSError, msgspec.ValidationError)
        self._reading = Explained(DataError, f"the digests {path} cannot be read", of=errors)
        self._kept: sqlite3.Connection | None = None
        if os.path.lexists(path):
            with self._reading:
                self._kept = opened_to_read(path)

    def __enter__(self) -> KeptFingerprints:
        return self

    def __exit__(self, *_: object) -> None:
        if self._kept is not None:
            self._kept.close()

    def contributions(self, step: int) -> dict[int, KeptContribution]:
        """By replica: what was contributed to a step."""
        query = "select replica, worker, loss, digests from contributions where step = ?"
        rows = self._rows(query, tuple[int, str, float | None, bytes], step)
        return {row[0]: KeptContribution(row[1], float("nan") if row[2] is None else row[2], row[3]) for row in rows}

    def version(self, version: int) -> dict[int, bytes]:
        """By shard: the digests of its pieces at that version."""
        return dict(self._rows("select shard, digests from versions where version = ?", tuple[int, bytes], version))

    def versions(self) -> list[int]:
        """The versions of which digests are kept, in order."""
        query = "select distinct version from versions order by version"
        return [version for (version,) in self._rows(query, tuple[int])]

    def _rows(self, query: str, kind: type[_Row], *values: int) -> list[_Row]:
        """The rows, of this type: SQLite keeps any value in any column, and the file may be somebody else's."""
        if self._kept is None:
            return []
        with self._reading:
            rows = self._kept.execute(query, values).fetchall()
            return [msgspec.convert(row, kind) for row in rows]
