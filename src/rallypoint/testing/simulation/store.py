"""Snapshots of a simulated job: the product's store, in memory, with its writers and readers; it may be full."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from rallypoint.core.decisions import Decided
from rallypoint.core.protocol import NotStored, Stored
from rallypoint.core.view import EarlyEnd, ViewNumber
from rallypoint.errors import DamagedSnapshot
from rallypoint.server import inbox
from rallypoint.server.snapshots import Restores, _Cancelled
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import Retention, SnapshotStore
from rallypoint.store.writer import SnapshotWriter
from rallypoint.testing.simulation.network import PlayedCondition, PlayedThread

if TYPE_CHECKING:
    from rallypoint.testing.simulation.server import SimulatedServer

Committed = tuple[str, int, EarlyEnd | None, Decided]
_numbers = itertools.count()


class _Files(MemoryFileSystem):  # type: ignore[misc]
    """What was written survives every process. Nothing can be written into a store without `room`."""

    protocol = "played"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    stores: ClassVar[dict[str, SimulatedStore]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("played://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **about: Any) -> None:
        store = self.stores[path.split("/")[1]]
        store.trespassed = store.trespassed or store.closed
        if store.full:
            raise OSError(errno.ENOSPC, "no space left")
        super().pipe_file(path, value, mode, **about)


fsspec.register_implementation("played", _Files)


class SimulatedStore(SnapshotStore):
    """So many of the newest are kept. Nothing may be written into a store that is `closed`: then it is `trespassed`."""

    def __init__(self, keep: int = 3) -> None:
        self._name = str(next(_numbers))
        super().__init__(f"played://{self._name}")
        self.full = self.closed = self.trespassed = False
        self.retention = Retention(keep_last=keep)
        _Files.stores[self._name] = self

    def forget(self) -> None:
        """Nobody needs it any more."""
        del _Files.stores[self._name]
        self._files.remove_folder("")

    def tear(self) -> None:
        """A byte of the newest snapshot's manifest changes (only if there is one before it)."""
        if len(self.manifests()) > 1:
            data = _Files.store[f"/{self._name}/{self.newest()[0]}/manifest.json"].getbuffer()
            data[len(data) // 2] ^= 1

    def newest(self) -> Committed:
        """The newest usable snapshot, its version, and what its manifest knows."""
        found = self.latest_usable(lambda said: None)
        return ("", -1, None, Decided()) if found is None else (found.id, found.version, found.stop, found.decided)


class PlayedWriter(SnapshotWriter):
    """The product's writer, on a played thread. Each record is a file, of which the coordinator hears after a while."""

    def __init__(self, server: SimulatedServer) -> None:
        super().__init__(server.store.url, "none", server.node.name, self._told)
        self._thread.join()
        self._server = server
        self._store._pace.is_full = lambda size: True  # type: ignore[method-assign]
        self._about: dict[int, tuple[int, ViewNumber, float]] = {}  # shard -> version, view, and when it is heard
        thread = PlayedThread(server.node, self._serve)
        self._changed = cast(Any, PlayedCondition(thread))
        server.node.later(0.0, thread.play)

    def _run(self) -> None:
        """Its own thread has nothing to do."""

    def _serve(self) -> None:
        while (part := self._next()) is not None:
            self._write(part)

    def put(self, record: ShardRecord) -> None:
        world = self._server.world
        if self.takes_records:
            heard = world.now + world.latency() * 2
            self._about[record.shard] = record.version, self._server.shell.fence.number, heard
            self._server.job.check_stored(record)
        super().put(record)

    def _told(self, message: Stored | NotStored) -> None:
        server, at = self._server, 0.0
        for shard in message.shards if isinstance(message, Stored) else ():
            version, number, at = self._about[shard]
            server.world.note("stores", server.node.name, shard, version, number, message.snapshot)
        server.node.later(at - server.world.now, lambda: server.membership.send(message))


class _ReadAtOnce:
    """What is read without a thread: there is always room."""

    runs = cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def pause(self, seconds: float = 0.0) -> None:
        if self.cancelled:
            raise _Cancelled

    wait_for_room = pause

    def make_room(self) -> None:
        """There is always."""


class PlayedRestores(Restores):
    """Reads after a while."""

    def __init__(self, server: SimulatedServer) -> None:
        super().__init__(server.node.name, server.store.url, server.restored, lambda said: None)
        self._server = server

    def begin(self, shards: Sequence[int], origin: str, generation: ViewNumber) -> None:
        self.cancel()
        self._missing, reading = set(shards), cast(Any, _ReadAtOnce())
        self._readings.append(reading)

        def read() -> None:
            try:
                self._read(reading, "", shards, origin, generation)
            except _Cancelled:
                pass
            except DamagedSnapshot as error:
                self._put(inbox.RestoreFailed(error, generation))

        self._server.node.later(self._server.world.latency() * 4, read)
