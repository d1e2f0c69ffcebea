"""The owner's clock: ticks come although events never stop, and after the signs of life that came before them."""

from __future__ import annotations

import threading
import time

from rallypoint.coordinator import inbox
from rallypoint.coordinator.inbox import Owner
from rallypoint.core.protocol import Say

PATIENCE_S = 60.0


def test_a_flood_of_events_does_not_stop_the_clock() -> None:
    ticks: list[inbox.Event] = []
    enough = threading.Event()

    def handle(event: inbox.Event) -> None:
        if isinstance(event, inbox.Ticked):
            ticks.append(event)
            if len(ticks) == 5:
                enough.set()
        elif not enough.is_set():
            owner.put(event)  # there is always another one

    owner = Owner(handle, 0.001)
    owner.start()
    owner.put(Say("again"))
    try:
        assert enough.wait(PATIENCE_S), f"{len(ticks)} ticks"
    finally:
        enough.set()
        owner.stop()


def test_what_has_come_before_a_tick_falls_due_is_handled_before_it() -> None:
    handled: list[str] = []
    busy, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def handle(event: inbox.Event) -> None:
        if isinstance(event, inbox.Ticked):
            handled.append("tick")
            if "a sign of life" in handled:
                over.set()
        elif isinstance(event, Say):
            handled.append(event.text)
            if event.text == "long work":
                busy.set()
                assert go_on.wait(PATIENCE_S)

    owner = Owner(handle, 0.01)
    owner.start()
    owner.put(Say("long work"))
    assert busy.wait(PATIENCE_S)
    began = time.monotonic()
    for _ in range(3):
        owner.put(Say("a sign of life"))
    while time.monotonic() < began + 0.02:  # until the next tick is due
        pass
    go_on.set()
    assert over.wait(PATIENCE_S)
    owner.stop()
    after = handled[handled.index("long work") + 1 :]
    assert after[:4] == [*["a sign of life"] * 3, "tick"]
