"""A waiting main thread heeds signals, also those that the system has given to another thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from rallypoint.observe.waits import wait_heeding_signals, wait_until

PATIENCE_S = 20.0


@pytest.fixture
def notice() -> Iterator[threading.Event]:
    """Set by SIGUSR1, which a thread that is not the main one receives while the main thread waits."""
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.set())
    yield heard
    signal.signal(signal.SIGUSR1, before)


def _signalled(wait: Callable[[], None], heard: threading.Event, end: Callable[[], None]) -> bool:
    """True if `wait` ends because of the signal; otherwise `end` ends it."""
    waiting, in_time = threading.Event(), []

    def signal_me() -> None:
        waiting.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        in_time.append(heard.wait(PATIENCE_S))
        end()

    thread = threading.Thread(target=signal_me)
    thread.start()
    waiting.set()
    wait()
    thread.join()
    return in_time == [True]


def test_whoever_waits_for_the_end_of_a_service_heeds_a_signal_of_another_thread(notice: threading.Event) -> None:
    assert _signalled(lambda: wait_heeding_signals(notice), notice, notice.set)


def test_a_worker_that_waits_heeds_a_signal_of_another_thread(notice: threading.Event) -> None:
    changed, over = threading.Condition(), threading.Event()

    def wait() -> None:
        with changed:
            wait_until(changed, lambda: over.is_set() or notice.is_set(), lambda: "", lambda text: None, PATIENCE_S)

    assert _signalled(wait, notice, over.set)


def test_a_long_wait_is_said_and_said_again() -> None:
    changed, said = threading.Condition(), list[str]()
    with changed:
        wait_until(changed, lambda: len(said) == 2, lambda: "the other one", said.append, 0.01)
    assert [text.partition(",")[0] for text in said] == ["waiting for the other one"] * 2
