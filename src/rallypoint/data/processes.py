"""Loads micro-batches ahead, in processes of torch's DataLoader: it forecasts which the worker needs next.

    places_after() -> requests -> DataLoader's processes -> ready -> take()
                                                                      | a place that was not forecast:
                                                                      + loaded here, and a new forecast

The forecast decides speed and nothing else: whatever is asked for comes, with the bytes that follow from its place.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import stat
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess, parent_process
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.pin_memory import pin_memory

from rallypoint.data.loader import MicroBatches
from rallypoint.data.order import Forecast, Place, places_after, places_from
from rallypoint.data.shards import ShardedDataset
from rallypoint.errors import DataError, sentence_of
from rallypoint.observe.waits import wait_until

Loaded = tuple[Place, Any, list[str], tuple[str, str]]  # the batch, what was skipped; or an error and its traceback

_OPEN = Path("/proc/self/fd")


class LoadRequests(Dataset[Loaded]):
    """Micro-batches by their place, as a data set for torch's DataLoader. An error is data too: see `Loaded`."""

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches

    def __getitem__(self, place: Place) -> Loaded:
        try:
            batch, skipped = self._batches.loaded(*place)
        except Exception as error:
            sentence = sentence_of(error)
            return place, None, [], (sentence, traceback.format_exc())
        return place, batch, skipped, ("", "")


@dataclass(frozen=True, slots=True)
class BeginLoading:
    """Called first in each loader process, with its number."""

    init: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the worker's own handlers were inherited
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which ends its loader processes
        leave_connections()
        if self.init is not None:
            self.init(number)


def leave_connections() -> None:
    """Give up the TCP connections that were inherited by fork.

    While a loader process has a copy of them, nobody would see that the worker is dead: they would not close.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(name) for name in os.listdir(_OPEN)]:
        if _is_tcp(number):
            os.dup2(nothing, number, inheritable=False)  # not closed: an object here still has the number
    os.close(nothing)


def _is_tcp(number: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        found = socket.socket(fileno=number)
    except OSError:
        return False
    family = found.family
    found.detach()
    return family in (socket.AF_INET, socket.AF_INET6)


def same(batch: Loaded) -> Loaded:
    """The batch is collated already."""
    return batch


LEAST, MOST = 64 << 20, 256 << 20  # bytes ahead at first, and at most
SHARE = 8  # of the cache's limit: one part of so many
PLACES = 512  # micro-batches that it looks ahead, at most
AT_ONCE = 4  # shards that are fetched at a time
AHEAD_LOOK_S = 1.0  # how often it looks whether the worker is still there
AHEAD_END_S = 10.0  # seconds in which a killed process ends

# What is loaded now, the worker's replicas, how often the loop waited; True: nothing is loaded yet, so fetch this too
Position = tuple[Place, tuple[int, ...], int, bool]

_LONGEST = 1 << 18  # bytes of a position


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
    """The process that reads ahead, as its worker has it. Nothing happens if the data set has no cache to read into.

        LoaderProcesses: "these load (7, 2, 0) now" -> socket -> Upcoming: which shards come next -> threads -> cache

    It is a process, and no thread beside the transforms: a store's client may draw from the global random generators.
    What it does not manage costs time and nothing else: whoever needs the bytes reads them as if it were not there.
    """

    def __init__(self, batches: MicroBatches, start: str) -> None:
        """`start`: how the process is started."""
        self._batches, self._start = batches, start
        self._process: BaseProcess | None = None
        self._positions: socket.socket | None = None

    def begin(self) -> None:
        """Start it, unless it was. A process that ends, or cannot be started, is not missed."""
        dataset = self._batches.dataset
        if self._positions is not None or not isinstance(dataset, ShardedDataset) or not dataset.fills:
            return
        context = multiprocessing.get_context(self._start)
        theirs, self._positions = socket.socketpair(type=socket.SOCK_SEQPACKET)  # a position goes wholly or not at all
        self._positions.setblocking(False)  # what does not go in is lost: the next position tells it too
        process = context.Process(  # type: ignore[attr-defined]
            target=_read_ahead, args=(theirs, self._positions, self._batches), name="reading ahead", daemon=True
        )
        with contextlib.suppress(OSError):
            process.start()
            self._process = process
        theirs.close()

    def at(self, position: Position) -> None:
        """Tell it where the loader processes are. Does not wait."""
        if self._process is not None and self._positions is not None:
            with contextlib.suppress(OSError):
                self._positions.send(msgspec.msgpack.encode(position))

    def close(self) -> None:
        """End it, whatever it does: the cache takes no harm of that."""
        if self._process is not None:
            self._process.kill()
            self._process.join(AHEAD_END_S)
            if self._process.exitcode is not None:  # else it is stuck in the system: a dead disk, say
                self._process.close()
            self._process = None
        if self._positions is not None:
            self._positions.close()


def _read_ahead(positions: socket.socket, workers_end: socket.socket, batches: MicroBatches) -> None:
    """Run in the process of its own until the worker is gone."""
    BeginLoading(None)(0)
    workers_end.close()
    dataset, changed = batches.dataset, threading.Condition()
    assert isinstance(dataset, ShardedDataset)
    upcoming = Upcoming(batches, dataset, min(MOST, dataset.fills // SHARE))

    def fetch() -> None:
        kept = True
        while kept:
            with changed:
                while (shard := upcoming.pop()) is None:
                    changed.wait()
            with contextlib.suppress(Exception):  # who needs it will read it, and say what is wrong
                kept = dataset.fill(shard)

    for _ in range(AT_ONCE):
        threading.Thread(target=fetch, name="reading ahead", daemon=True).start()
    positions.settimeout(AHEAD_LOOK_S)
    while (parent := parent_process()) is not None and parent.is_alive():
        with contextlib.suppress(TimeoutError):
            if not (told := positions.recv(_LONGEST)):
                return
            with changed:
                upcoming.at(*msgspec.msgpack.decode(told, type=Position))
                changed.notify_all()


LOST_IN_A_ROW = 3  # so often loader processes may die, or fail to start, before one of them has loaded anything
END_S = 10.0
LOOK_S = 1.0  # how often the DataLoader looks for dead processes while nothing comes
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
_TIMED_OUT = "DataLoader timed out"  # torch's word for that


class LoaderTraceback(Exception):
    """The traceback of an error in a loader process, as text: the cause of the error that the loop gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class LoaderProcesses:
    """Loads what one worker needs next. `take` and `expect` are for the main thread; a thread of its own loads.

    The DataLoader is used from that thread alone: made on the main thread, it would raise its processes' deaths there,
    in the middle of whatever is running.
    """

    def __init__(self, batches: MicroBatches, say: Callable[[str], None]) -> None:
        """`say` shows a line to the user."""
        self._batches, self._say, self._spec = batches, say, batches.loader
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._places = Forecast()
        self._requested: deque[Place] = deque()  # not taken yet, in the order of the forecast
        self._ready: dict[Place, Loaded] = {}
        self._replicas: tuple[int, ...] = ()
        self._most = max(self._spec.ahead, self._spec.workers)
        self._pins = self._spec.pin_memory and torch.accelerator.is_available()
        self._room = min(2 * self._spec.workers, self._most)  # how many may be ready
        self._processes: list[BaseProcess] = []
        self._failure: DataError | None = None
        self._waits = self._over = False  # the main thread waits; it is over
        self._none = True  # there are no processes, or one has died
        self._waited = 0  # so often the main thread had to wait
        self._thread: threading.Thread | None = None
        self._start = self._spec.start or "fork"
        self._ahead = ReadAhead(batches, self._start)  # for the loader's thread, once there is one

    def expect(self, round: int, replica: int, replicas: tuple[int, ...]) -> None:
        """This worker computes `replica` now, and has these `replicas` (ascending)."""
        with self._changed:
            if replicas != self._replicas:
                self._replicas = replicas
                self._forecast(lambda: places_from(round, replica, replicas, self._batches.config))

    def coming(self, round: int, replica: int, replicas: tuple[int, ...]) -> None:
        """The first micro-batches will probably be these: what they are made of is fetched meanwhile, if there is a
        cache. Before the first `take`; a guess that is wrong costs what is fetched, and nothing else."""
        if self._thread is None and (place := next(places_from(round, replica, replicas, self._batches.config), None)):
            self._ahead.begin()
            self._ahead.at((place, replicas, 0, True))

    def take(self, place: Place) -> Any:
        """Return this micro-batch, collated, not on the device yet.

        Raises DataError for a sample that raises, and when processes die again and again.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._load, name="loader", daemon=True)
            self._thread.start()
        loaded = self._from_processes(place)
        if loaded is None:
            batch, skipped = self._batches.loaded(*place)
        else:
            _, batch, skipped, (error, trace) = loaded
            if error:
                raise DataError(f"a loader process failed at step {place[0]}, replica {place[1]}: {error}") from (
                    LoaderTraceback(trace)
                )
        for sentence in skipped:
            self._say(sentence)
        return batch

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._end_survivors()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(END_S)
            for process in self._processes:  # one that is paused heeds no SIGTERM, and Python's exit would wait for it
                process.kill()
        self._ahead.close()

    # ---- on the main thread ----

    def _from_processes(self, place: Place) -> Loaded | None:
        """What the processes have loaded; None if that is to be loaded here."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if place not in self._requested:
                following = partial(places_after, place, self._replicas, self._batches.config)
                self._forecast(lambda: chain([place], following()) if self._none else following())
                if not self._none:
                    return None  # sooner than by processes that load something else now
            else:
                while (passed := self._requested.popleft()) != place:
                    self._ready.pop(passed, None)
            if place not in self._ready:
                self._room = min(self._room + self._spec.workers, self._most)
                self._waited += 1
                self._await(place)
            if self._failure is not None:
                raise self._failure
            self._changed.notify_all()
            return self._ready.pop(place, None)

    def _await(self, place: Place) -> None:
        """Wait until this micro-batch is ready, or is not to be waited for. The caller holds the lock."""
        self._requested.appendleft(place)  # else what arrives is taken for stale
        self._waits = True
        self._changed.notify_all()
        step, replica, _ = place
        wait_until(
            self._changed, lambda: place in self._ready or self._failure is not None or self._process_died(),
            lambda: f"{self._spec.workers} loader processes to load step {step} of replica {replica}", self._say,
        )  # fmt: skip
        self._waits = False
        self._end_survivors()
        if place in self._requested:  # else processes have died for the last time, and nothing is requested any more
            self._requested.remove(place)

    def _process_died(self) -> bool:
        return any(map(_is_dead, self._processes))

    def _end_survivors(self) -> None:
        """If a process has died, end the others. The caller holds the lock. What the dead one was sending is cut off,
        perhaps, and the loader's thread then waits for the rest. Nobody else can send meanwhile, and when nobody is
        left the thread sees the end."""
        if self._process_died():
            for process in self._processes:
                process.kill()

    def _forecast(self, places: Callable[[], Iterator[Place]]) -> None:
        """Replace the forecast; what is requested already and still needed is kept. The caller holds the lock."""
        known = set(self._requested)
        kept = [place for place in islice(places(), 2 * len(known)) if place in known]
        self._requested = deque(kept)
        self._ready = {place: loaded for place, loaded in self._ready.items() if place in kept}
        self._places = Forecast(place for place in places() if place not in kept)
        self._changed.notify_all()

    # ---- on the loader's thread ----

    def _load(self) -> None:
        try:
            sentence = self._load_until_over()
        except Exception as error:
            sentence = f"samples cannot be loaded: {type(error).__name__}: {error}"
        if sentence:  # not as the error's cause: its traceback would keep the processes
            with self._changed:
                self._failure = DataError(sentence)
                self._changed.notify_all()

    def _load_until_over(self) -> str:
        """Load until `close`. Returns why it cannot go on; "" if it is over."""
        arriving: Iterator[Loaded] | None = None
        loader, deaths, sentence = self._new_loader(), 0, ""
        while not sentence and self._may_load(arriving is None):
            try:
                if arriving is None:
                    arriving = self._begin(loader)
                self._arrived(next(arriving))
                deaths = 0
            except StopIteration:
                arriving = None  # all that was forecast is here
            except (RuntimeError, OSError, EOFError) as error:  # a process has died, or what it had sent is gone
                only_slow = arriving is not None and _TIMED_OUT in str(error)
                died = self._process_died() or (not only_slow and self._dies(error))
                if not died and only_slow:
                    continue  # it only had nothing yet. Told to begin again, a process would answer twice
                deaths += 1
                sentence = self._lost((str(error) or repr(error)).splitlines()[0], deaths, died=died)
                arriving, loader = None, self._new_loader()
        return sentence

    def _dies(self, error: Exception) -> bool:
        """True if a process is about to end: the kernel closes what a killed one sends through first, and only then can
        be seen that it has ended. Only this process being short of files, or of memory, tells of no death."""
        if isinstance(error, OSError) and error.errno in _SHORT:
            return False
        return bool(wait([process.sentinel for process in self._processes], timeout=LOOK_S))

    def _new_loader(self) -> DataLoader[Loaded]:
        spec = self._spec
        return DataLoader(
            LoadRequests(self._batches), batch_size=None, sampler=_Places(self._next), num_workers=spec.workers,
            collate_fn=same,  # type: ignore[arg-type]
            worker_init_fn=BeginLoading(spec.init), multiprocessing_context=self._start, persistent_workers=True,
            timeout=LOOK_S,
        )  # fmt: skip

    def _begin(self, loader: DataLoader[Loaded]) -> Iterator[Loaded]:
        self._ahead.begin()
        before = multiprocessing.active_children()
        arriving = iter(loader)
        with contextlib.suppress(AttributeError):  # torch's own affair: another version may do it otherwise
            # This process's own end of the queue into which they write: else there is no end to see when all of them
            # have died, one of them in the middle of a message.
            arriving._worker_result_queue._writer.close()  # type: ignore[attr-defined]
            # Once the script has used a DataLoader with processes, torch raises the death of each that it knows in the
            # main thread, in the middle of anything. Those of this one are replaced.
            if arriving._worker_pids_set:  # type: ignore[attr-defined]
                signal_handling._remove_worker_pids(id(arriving))  # type: ignore[attr-defined]
                arriving._worker_pids_set = False  # type: ignore[attr-defined]
        begun = [process for process in multiprocessing.active_children() if process not in before]
        with self._changed:
            self._processes, self._none = begun or self._processes, False  # the second time they are the same
        return arriving

    def _may_load(self, begins: bool) -> bool:
        """Wait until there is room and something to load; False when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._ready_to_load(begins))
            return not self._over

    def _ready_to_load(self, begins: bool) -> bool:
        # Processes are forked while the main thread waits: it holds no lock then that they would inherit
        if self._none and not self._waits:
            return False
        # What the main thread waits for may come after more that is ready than there is room for now
        return (self._waits or len(self._ready) < self._room) and not (begins and self._places.ended)

    def _next(self) -> Place | None:
        with self._changed:
            place = None if self._over else self._places.pop()
            if place is not None and place not in self._requested:  # it is there if the main thread waits
                self._requested.append(place)
            if place is not None:
                self._ahead.at((place, self._replicas, self._waited, False))
            return place

    def _arrived(self, loaded: Loaded) -> None:
        if self._pins:  # here and not by the DataLoader: it would write into its processes' queue
            place, batch, skipped, failure = loaded
            loaded = place, pin_memory(batch), skipped, failure  # type: ignore[no-untyped-call]
        with self._changed:
            if loaded[0] in self._requested:
                self._ready[loaded[0]] = loaded
            self._changed.notify_all()

    def _lost(self, what: str, times: int, *, died: bool) -> str:
        """A process has died, or what was sent cannot be received (too many open files), or none can be started: what
        was requested is requested again, unless that has been tried enough."""
        if times >= LOST_IN_A_ROW:
            imports = (
                'They import the script first, so what it does must stand below if __name__ == "__main__":. '
                if self._start in ("spawn", "forkserver") else ""
            )  # fmt: skip
            return (
                f"loader processes {'died' if died else 'failed'} {times} times in a row before one had loaded "
                f"anything: {what}. {imports}A sample that needs too much memory, or a crash in the data set's own "
                "code, does that: loader=rp.Loader(workers=0) shows which"
            )
        with self._changed:
            self._none, self._processes = True, []
            self._room = max(self._spec.workers, self._room // 2)  # memory, or open files, may have been short
            if not died:
                self._most = self._room
            again = [place for place in self._requested if place not in self._ready]
            self._requested = deque(place for place in self._requested if place in self._ready)
            self._places.again(again)
            self._changed.notify_all()
        if not self._over:
            self._say(f"a loader process {'died' if died else 'failed'}, and new ones go on at its samples ({what})")
        return ""


class _Places(Sampler[Any]):
    """The requests, in order, for a DataLoader without batches of its own."""

    def __init__(self, following: Callable[[], Place | None]) -> None:
        self._following = following

    def __iter__(self) -> Iterator[Place]:
        while (place := self._following()) is not None:
            yield place


def _is_dead(process: BaseProcess) -> bool:
    """True if it has ended. Does not reap it: that is for its owner."""
    try:
        return os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # reaped already, or a child of the fork server
        return bool(wait([process.sentinel], timeout=0))
