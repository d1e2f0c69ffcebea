"""The coordinator's share of a snapshot: collects what servers have stored, writes the manifest, deletes old ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.job import JobRecord
from rallypoint.errors import RallypointError
from rallypoint.net.messages import Stored
from rallypoint.store.manifest import Manifest, ShardEntry
from rallypoint.store.retention import Retention
from rallypoint.store.snapshots import SnapshotStore


@dataclass
class _Parts:
    files: dict[str, int] = field(default_factory=dict)
    shards: dict[int, ShardEntry] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)


class SnapshotKeeper:
    """Commits snapshots and finds them again, on a thread of its own: a slow store delays nothing else.

    `commit` and `find` answer through a callback, on that thread.
    """

    def __init__(self, url: str, compression: str, retention: Retention, say: Callable[[str], None]) -> None:
        self._store = SnapshotStore(url)
        self._compression, self._retention, self._say = compression, retention, say
        self._parts: dict[str, _Parts] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshots")

    def begin(self, snapshot: str) -> None:
        """A snapshot is being taken: what is left of those before it is forgotten."""
        with self._lock:
            self._parts = {snapshot: _Parts()}

    def stored(self, part: Stored) -> None:
        """A server's part is in the store."""
        with self._lock:
            if (parts := self._parts.get(part.snapshot)) is not None:
                parts.files.update(part.files)
                parts.shards.update({shard: ShardEntry(*entry) for shard, entry in part.shards.items()})

    def commit(
        self, snapshot: str, version: int, record: JobRecord, metrics: dict[str, float], origin: str,
        done: Callable[[int, float], None], failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Write the manifest, then `done(bytes, seconds since it began)`; or `failed(why)`.

        The snapshot `origin` is kept: a server may still have to begin from it.
        """
        with self._lock:
            parts = self._parts.pop(snapshot, None)
        if parts is None:
            failed("its parts have been forgotten")
            return
        manifest = Manifest(
            id=snapshot, version=version, record=msgspec.to_builtins(record), created=time.time(), metrics=metrics,
            compression=self._compression, shards=parts.shards, files=parts.files,
        )  # fmt: skip
        self._pool.submit(self._commit, manifest, origin, parts.began, done, failed)

    def find(self, found: Callable[[str, int], None], failed: Callable[[str], None]) -> None:
        """Look for the newest usable snapshot: ``found(id, version)``, ("", -1) if there is none."""
        self._pool.submit(self._find, found, failed)

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._pool.shutdown(wait=True)

    def _commit(
        self, manifest: Manifest, origin: str, began: float, done: Callable[[int, float], None],
        failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        try:
            self._store.commit(manifest)
        except Exception as error:  # a remote filesystem raises anything; unanswered, the job would wait for ever
            failed(_sentence(error))
            return
        done(sum(manifest.files.values()), time.monotonic() - began)
        try:
            self._store.retain(self._retention, keep=(manifest.id, origin), thorough=False)
        except Exception as error:
            self._say(f"old snapshots could not be deleted: {_sentence(error)}")

    def _find(self, found: Callable[[str, int], None], failed: Callable[[str], None]) -> None:
        try:
            manifest = self._store.latest_usable(self._say)
        except Exception as error:
            failed(f"the snapshots cannot be read: {_sentence(error)}")
            return
        found(*(("", -1) if manifest is None else (manifest.id, manifest.version)))


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, (RallypointError, OSError)) else f"{type(error).__name__}: {error}"
