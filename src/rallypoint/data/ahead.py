"""Reads ahead of the loader processes: one process for each worker fetches what comes next into the cache on disk.

    LoaderProcesses: "these load (7, 2, 0) now" -> pipe -> Upcoming: which shards come after that -> threads -> cache

It is a process, and no thread beside the transforms: a store's client may draw from the global random generators. What
it does not manage costs time and nothing else: whoever needs the bytes reads them as if it were not there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess, parent_process

import msgspec

from rallypoint.data.child import Begin
from rallypoint.data.loader import MicroBatches
from rallypoint.data.order import Place, places_after
from rallypoint.data.sources.shards import ShardedDataset

LEAST, MOST = 64 << 20, 256 << 20  # bytes ahead at first, and at most
SHARE = 8  # of the cache's limit: one part of so many
PLACES = 512  # micro-batches that it looks ahead, at most
AT_ONCE = 4  # shards that are fetched at a time
LOOK_S = 1.0  # how often it looks whether the worker is still there
END_S = 10.0  # seconds in which a killed process ends

# What is loaded now, the worker's replicas, how often the loop waited; True: nothing is loaded yet, so fetch this too
Position = tuple[Place, tuple[int, ...], int, bool]

_HEADER = struct.Struct("<HH")  # the number of a part, and how many there are
_LENGTH = 4  # bytes that Connection writes in front of each part, in the same write
_PART_BYTES = select.PIPE_BUF - _LENGTH - _HEADER.size


class Upcoming:
    """Decides which shard is to be fetched next. Pure; for one thread at a time.

    Example: 4 MB a shard, and at most 16 MB ahead: four shards, and one more when the place that needs the first of
    them is loaded.
    """

    def __init__(self, batches: MicroBatches, dataset: ShardedDataset, most: int) -> None:
        """`most`: bytes that may be ahead, however often the loop has waited."""
        self._batches, self._dataset, self._most = batches, dataset, most
        self._replicas: tuple[int, ...] = ()
        self._depth = self._ahead = self._walked = 0
        self._places: Iterator[Place] = iter(())
        self._window: OrderedDict[Place, int] = OrderedDict()  # places gone through; bytes that were returned for each
        self._shards: deque[tuple[Place, int, int]] = deque()  # where it is needed first, shard, bytes
        self._needed: OrderedDict[int, int] = OrderedDict()  # shard -> number of the last place that needs it

    def at(self, place: Place, replicas: tuple[int, ...], waits: int, first: bool = False) -> None:
        """This place is loaded now, by a worker with these replicas, whose loop has waited so many times.

        `first`: it will be the first one, and nobody loads it yet: its shards are fetched too.
        """
        self._depth = min(self._most, LEAST << min(waits, 8))
        if replicas != self._replicas or place not in self._window:
            following = places_after(place, replicas, self._batches.config)
            self._replicas, self._places = replicas, chain([place], following) if first else following
            self._ahead = 0
            for kept in (self._window, self._shards, self._needed):
                kept.clear()
            return
        while True:
            passed, taken = self._window.popitem(last=False)
            self._ahead -= taken
            while self._shards and self._shards[0][0] == passed:
                self._shards.popleft()
            if passed == place:
                return

    def pop(self) -> int | None:
        """Return the shard to be fetched now; None: nothing until the next `at`."""
        while not self._shards:
            place = next(self._places, None) if len(self._window) < PLACES and self._ahead < self._depth else None
            if place is None:
                return None
            self._walk(place)
        place, shard, size = self._shards[0]
        if self._ahead and self._ahead + size > self._depth:
            return None
        self._shards.popleft()
        self._window[place] += size
        self._ahead += size
        return shard

    def _walk(self, place: Place) -> None:
        self._window[place] = 0
        self._walked += 1
        while self._needed and next(iter(self._needed.values())) < self._walked - PLACES:
            self._needed.popitem(last=False)
        for shard in self._dataset.shards_of(self._batches.indices(*place)):
            if shard not in self._needed:
                size = sum(stop - start for _, start, stop in self._dataset.ranges(shard))
                if 0 < size <= self._most:
                    self._shards.append((place, shard, size))
            self._needed[shard] = self._walked
            self._needed.move_to_end(shard)


class ReadAhead:
    """The process that reads ahead, as its worker has it. Nothing happens if the data set has no cache to read into."""

    def __init__(self, batches: MicroBatches, start: str | None) -> None:
        """`start`: how the process is started."""
        self._batches, self._start = batches, start
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def begin(self) -> None:
        """Start it, unless it was. A process that ends, or cannot be started, is not missed."""
        dataset = self._batches.dataset
        if self._pipe is not None or not isinstance(dataset, ShardedDataset) or not dataset.fills:
            return
        context = multiprocessing.get_context(self._start)
        theirs, self._pipe = context.Pipe(duplex=False)
        os.set_blocking(self._pipe.fileno(), False)  # what does not go in is lost: the next position tells it too
        process = context.Process(  # type: ignore[attr-defined]
            target=_read_ahead, args=(theirs, self._pipe, self._batches), name="reading ahead", daemon=True
        )
        with contextlib.suppress(OSError):
            process.start()
            self._process = process
        theirs.close()

    def at(self, position: Position) -> None:
        """Tell it where the loader processes are. Does not wait."""
        if self._process is not None and self._pipe is not None:
            with contextlib.suppress(OSError):
                send_whole(self._pipe, position)

    def close(self) -> None:
        """End it, whatever it does: the cache takes no harm of that."""
        if self._process is not None:
            self._process.kill()
            self._process.join(END_S)
            if self._process.exitcode is not None:  # else it is stuck in the system: a dead disk, say
                self._process.close()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()


class _Fetching:
    """The threads of that process, and what they fetch."""

    def __init__(self, batches: MicroBatches, dataset: ShardedDataset) -> None:
        self._dataset, self._changed = dataset, threading.Condition()
        self._upcoming = Upcoming(batches, dataset, min(MOST, dataset.fills // SHARE))
        for _ in range(AT_ONCE):
            threading.Thread(target=self._fetch, name="reading ahead", daemon=True).start()

    def at(self, position: Position) -> None:
        with self._changed:
            self._upcoming.at(*position)
            self._changed.notify_all()

    def _fetch(self) -> None:
        kept = True
        while kept:
            with self._changed:
                while (shard := self._upcoming.pop()) is None:
                    self._changed.wait()
            with contextlib.suppress(Exception):  # who needs it will read it, and say what is wrong
                kept = self._dataset.fill(shard)


def _read_ahead(positions: Connection, workers_end: Connection, batches: MicroBatches) -> None:
    """Run in the process of its own until the worker is gone."""
    Begin(None)(0)
    workers_end.close()
    assert isinstance(batches.dataset, ShardedDataset)
    fetching, received = _Fetching(batches, batches.dataset), Received()
    with contextlib.suppress(EOFError, OSError):
        while (parent := parent_process()) is not None and parent.is_alive():
            if positions.poll(LOOK_S) and (position := received.after(positions.recv_bytes())) is not None:
                fetching.at(position)


def send_whole(pipe: Connection, position: Position) -> None:
    """Send it through a pipe that does not block. BlockingIOError if not all of it went in.

    A write of at most PIPE_BUF bytes goes into a pipe wholly or not at all; a longer one may be cut off where the pipe
    is full. So it goes in parts. A position that lacks a part is not believed: the next one tells it too.
    """
    data = msgspec.msgpack.encode(position)
    parts = [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]
    for number, part in enumerate(parts):
        pipe.send_bytes(_HEADER.pack(number, len(parts)) + part)


class Received:
    """Puts positions together again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def after(self, message: bytes) -> Position | None:
        """The position that is whole with this message; None if it is not whole yet, or lacks a part."""
        number, count = _HEADER.unpack_from(message)
        if number == 0:
            self._parts = []
        if number != len(self._parts):  # it lacks one: the rest of it is not used
            return None
        self._parts.append(message[_HEADER.size :])
        whole = number == count - 1
        return msgspec.msgpack.decode(b"".join(self._parts), type=Position) if whole else None
