"""Nothing waits without a name (I8): a long wait reports what it waits for, again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

FIRST_WORD_S = 5.0
# Python runs signal handlers (Ctrl-C, SIGTERM) in the main thread only, and between its instructions. If the system has
# given the signal to another thread, a blocked main thread does not notice: so it looks up this often, in seconds.
LOOK_S = 0.25


def wait_heeding_signals(event: threading.Event) -> None:
    """Wait until `event` is set, and let signal handlers run meanwhile."""
    while not event.wait(LOOK_S):
        pass


def wait_until(
    changed: threading.Condition,
    ready: Callable[[], bool],
    describe: Callable[[], str],
    say: Callable[[str], None],
    first_word: float = FIRST_WORD_S,
    waited: float = 0.0,
) -> None:
    """Wait on `changed`, which the caller holds, until `ready()` is True.

    After `first_word` seconds, and then at doubling intervals, calls `say` with a sentence that contains `describe()`,
    unless that is "". The `waited` seconds of earlier waits for the same count too.
    """
    start, patience = time.monotonic() - waited, first_word
    while patience <= waited:
        patience *= 2
    while not changed.wait_for(ready, timeout=min(LOOK_S, max(0.0, start + patience - time.monotonic()))):
        if time.monotonic() < start + patience:
            continue
        if what := describe():
            say(f"waiting for {what}, {time.monotonic() - start:.0f} s so far")
        patience *= 2


class SharedCores:
    """Who computes in a process whose cores a worker and a server share (`python train.py` alone): the script, or the
    server while the script waits for a version. Both at once take longer than one after the other.
    """

    LONGEST_S = 5.0  # a script that computes for so long has to share

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()

    def take(self) -> None:
        """The script computes."""
        self._free.clear()

    def give(self) -> bool:
        """The script waits, or has computed. Returns True if it had the cores."""
        had = not self._free.is_set()
        self._free.set()
        return had

    def wait(self) -> None:
        """Wait while the script computes. For the server's thread."""
        self._free.wait(self.LONGEST_S)


class Progress:
    """How a worker's main thread gets on: for how long it has waited for others since it last did something new.

    Work that is given once more, because a link broke and took what it carried, is nothing new: the next wait counts
    on.

        wait 3 s, the link breaks, compute replica 0 again, wait 3 s     it has waited for 6 s
        wait 3 s, install version 8, compute replica 0, wait 3 s         it has waited for 3 s

    Times are in seconds of one clock. One thread changes it; any thread may call `waited`.
    """

    def __init__(self) -> None:
        self._times: tuple[float, float | None] = 0.0, None  # of earlier waits; when the wait in progress began
        self._given: set[Hashable] = set()

    def waits(self, now: float) -> float:
        """A wait begins. Returns the seconds of the earlier waits that count."""
        before, _ = self._times
        self._times = before, now
        return before

    def goes_on(self, now: float) -> None:
        """The wait is over."""
        before, began = self._times
        self._times = (before if began is None else before + now - began), None

    def given(self, task: Hashable, *, ends_round: bool = False) -> None:
        """The main thread is given a task. `ends_round`: it is new in any case, and so are the tasks after it."""
        if ends_round:
            self._given.clear()
        if task not in self._given:
            self._given.add(task)
            self.got_on()

    def got_on(self) -> None:
        """Something new was reached: earlier waits count no more."""
        self._times = 0.0, self._times[1]

    def waited(self, now: float) -> float:
        """Seconds for which the thread has waited since it last got on; 0.0 while it does not wait.

        A wait may have begun after `now` was read, on the other thread: it has lasted for 0 seconds.
        """
        before, began = self._times
        return 0.0 if began is None else before + max(0.0, now - began)
