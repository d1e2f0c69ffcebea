"""When a worker's links may send without credits: two threads say it, and neither undoes the other's word."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.config import resolve
from rallypoint.core.view import ViewNumber
from rallypoint.net.handshake import Credentials, Identity
from rallypoint.net.transport import InprocTransport
from rallypoint.observe.trace import Tracer
from rallypoint.worker.exchange.links import ExchangeContext, Links


class Link:
    """Remembers the last word. `meanwhile` is called in the middle of the first one."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.overdraws, self._meanwhile = False, meanwhile

    def overdraw(self, on: bool) -> None:
        meanwhile, self._meanwhile = self._meanwhile, lambda: None
        meanwhile()
        self.overdraws = on


def links_with(link: Any) -> Links:
    context = ExchangeContext(Credentials(Identity("worker", "w")), InprocTransport(), Tracer("w"), say=print)
    config = resolve({"replicas": 1, "batch": 1, "steps": 9, "optimizer": {"type": "sgd", "lr": 1.0}})
    links = Links(context, config, view=ViewNumber)
    links._links["s"] = link
    return links


def test_links_overdraw_until_a_later_version_is_installed() -> None:
    links = links_with(link := Link())
    links.overdraw(5)
    assert link.overdraws
    links.installed(5)
    assert link.overdraws, "step 5 itself begins with this version: its view came while it was being installed"
    links.overdraw(4)  # a word that was late
    links.installed(5)
    assert link.overdraws
    links.installed(6)
    assert not link.overdraws


def test_after_a_roll_back_steps_are_counted_from_there() -> None:
    links = links_with(link := Link())
    links.overdraw(50)
    links.overdraw(5, rolled_back=True)
    links.installed(6)
    assert not link.overdraws


@pytest.mark.parametrize("first", [True, False], ids=["installed comes in between", "a view comes in between"])
def test_two_threads_leave_what_one_after_the_other_would(first: bool) -> None:
    """The window bounds the server's memory; without the overdraft this worker could wait for ever."""
    words: list[Callable[[], None]] = [lambda: links.overdraw(5), lambda: links.installed(6)]
    other = threading.Thread(target=words[first], name="the other")

    def meanwhile() -> None:
        other.start()
        other.join(0.2)  # it waits for the lock, or is through

    links = links_with(link := Link())
    if not first:
        links.overdraw(4)
    link._meanwhile = meanwhile
    words[not first]()
    other.join()
    assert link.overdraws == links._overdraws == (not first)
