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
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data._utils.pin_memory import pin_memory

from rallypoint.data.ahead import ReadAhead
from rallypoint.data.child import Begin, Loaded, Requests, same
from rallypoint.data.loader import MicroBatches
from rallypoint.data.order import Forecast, Place, places_after, places_from
from rallypoint.errors import DataError
from rallypoint.observe.waits import wait_until

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
        self._pins = self._spec.pin_memory and _can_pin()
        self._room = min(2 * self._spec.workers, self._most)  # how many may be ready
        self._processes: list[BaseProcess] = []
        self._failure: DataError | None = None
        self._waits = self._over = False  # the main thread waits; it is over
        self._none = True  # there are no processes, or one has died
        self._waited = 0  # so often the main thread had to wait
        self._thread: threading.Thread | None = None
        self._start = self._spec.start or ("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
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
        """End the processes and the thread."""
        with self._changed:
            self._over = True
            self._end_survivors()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(END_S)
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
        """If a process has died, end the others. The caller holds the lock.

        What the dead one was sending is cut off, perhaps, and the loader's thread then waits for the rest. Nobody else
        can send meanwhile, and when nobody is left the thread sees the end.
        """
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
            Requests(self._batches), batch_size=None, sampler=_Places(self._next), num_workers=spec.workers,
            collate_fn=same,  # type: ignore[arg-type]
            worker_init_fn=Begin(spec.init), multiprocessing_context=self._start, persistent_workers=True,
            timeout=LOOK_S,
        )  # fmt: skip

    def _begin(self, loader: DataLoader[Loaded]) -> Iterator[Loaded]:
        self._ahead.begin()
        before = multiprocessing.active_children()
        arriving = iter(loader)
        _leave_writing(arriving)
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
        self._say(f"a loader process {'died' if died else 'failed'}, and new ones go on at its samples ({what})")
        return ""


class _Places(Sampler[Any]):
    """The requests, in order, for a DataLoader without batches of its own."""

    def __init__(self, following: Callable[[], Place | None]) -> None:
        self._following = following

    def __iter__(self) -> Iterator[Place]:
        while (place := self._following()) is not None:
            yield place


def _leave_writing(arriving: Any) -> None:
    """Close this process's own end of the queue into which its loader processes write.

    Else there is no end to see when all of them have died, one of them in the middle of a message.
    """
    with contextlib.suppress(AttributeError):  # torch's own affair: another version may do it otherwise
        arriving._worker_result_queue._writer.close()


def _can_pin() -> bool:
    """As torch's DataLoader decides it."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found is not None and found.type != "mps"


def _is_dead(process: BaseProcess) -> bool:
    """True if it has ended. Does not reap it: that is for its owner."""
    try:
        return os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except (AttributeError, ChildProcessError):  # macOS; reaped already, or a child of the fork server
        return bool(wait([process.sentinel], timeout=0))
