"""When a worker's wish to end the job counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rallypoint.core.protocol import Stop
from rallypoint.core.view import EarlyEnd, StandingOrders, ViewNumber
from rallypoint.worker.membership import Stopping


def exchange(step: int) -> Any:
    end = SimpleNamespace(is_early=False, last=10_000, generation=ViewNumber(1, 1), wait_until_known=lambda: None)
    return SimpleNamespace(step=step, end=end)


def test_the_end_of_a_stream_counts_at_its_step_and_not_where_a_roll_back_has_led() -> None:
    said: list[Any] = []
    stopping = Stopping(said.append)
    stopping.wish("the stream has no full batch after step 500", step=500)
    stopping.heed(exchange(300))  # a roll-back came before the wish was told
    assert said == []
    stopping.heed(exchange(500))
    assert said == [Stop(501, "the stream has no full batch after step 500", -1, ViewNumber(1, 1))]


def view(stop: int | None) -> Any:
    return SimpleNamespace(generation=ViewNumber(1, 1), orders=StandingOrders(None if stop is None else EarlyEnd(stop)))


def test_an_earlier_end_than_the_view_says_is_said_again_to_another_coordinator() -> None:
    said: list[Any] = []
    stopping = Stopping(said.append)
    stopping.wish("the stream is over", step=6)
    stopping.heed(exchange(6))
    for known in (8, 7, None):
        stopping.repeat(view(known))
    assert [stop.version for stop in said] == [7, 7, 7]


def test_what_the_script_wants_counts_at_once_also_when_the_stream_has_an_end() -> None:
    said: list[Any] = []
    stopping = Stopping(said.append)
    stopping.wish("the stream ends", step=500)
    stopping.wish("good enough")
    stopping.wish("too late")
    stopping.heed(exchange(300))
    assert [(stop.version, stop.reason) for stop in said] == [(301, "good enough")]
