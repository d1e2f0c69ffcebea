"""A waiting main thread heeds signals, also those that the system has given to another thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from rallypoint.observe.waits import Progress, wait_heeding_signals, wait_until

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

    (thread := threading.Thread(target=signal_me)).start()
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


# ---- how a main thread gets on ----


def _compute(progress: Progress, replica: int) -> None:
    progress.given(("compute", 7, replica))


def test_a_link_that_flaps_does_not_hide_that_its_worker_waits() -> None:
    """Each connection lasts 3 s and carries nothing large: the replica is computed again, and waited for again."""
    progress, now = Progress(), 0.0
    for count in range(4):
        _compute(progress, 0)
        assert progress.waited(now) == 0.0, "it computes"
        progress.waits(now)
        now += 3.0
        assert progress.waited(now) == 3.0 * (count + 1)
        progress.goes_on(now)
        now += 0.25


@pytest.mark.parametrize("new", [("install", 8), ("compute", 7, 1)])
def test_something_new_ends_the_waiting(new: tuple[object, ...]) -> None:
    progress = Progress()
    _compute(progress, 0)
    progress.waits(0.0)
    progress.goes_on(3.0)
    progress.given(new, ends_round=new[0] == "install")
    progress.waits(4.0)
    assert progress.waited(5.0) == 1.0


def test_a_wait_that_begins_while_its_length_is_asked_for_is_not_negative() -> None:
    """The coordinator would take a beat with such a number for one of somebody who breaks the protocol."""
    progress = Progress()
    progress.waits(5.0)
    assert progress.waited(4.999) == 0.0


def test_after_a_version_the_same_replica_is_something_new() -> None:
    """A roll-back: steps are computed a second time."""
    progress = Progress()
    for _ in range(2):
        progress.given(("install", 7), ends_round=True)
        _compute(progress, 0)
        assert progress.waits(0.0) == 0.0
        progress.goes_on(3.0)


def test_the_words_of_a_wait_that_is_begun_anew_go_on_where_they_were() -> None:
    """A wait of 3 s after one of 3 s speaks after 2 s more; none says the same seconds twice."""
    changed, said = threading.Condition(), []

    def say(sentence: str) -> None:
        said.append(sentence)

    with changed:
        wait_until(changed, lambda: len(said) == 1, lambda: "version 8", say, PATIENCE_S, waited=2 * PATIENCE_S - 0.001)
        wait_until(changed, lambda: True, lambda: "version 8", say, PATIENCE_S, waited=2 * PATIENCE_S)
    assert said == [f"waiting for version 8, {2 * PATIENCE_S:.0f} s so far"]
