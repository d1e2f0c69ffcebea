"""Carries out what the buttons of a run's page order, as the commands of the same names do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint.errors import UsageError
from rallypoint.launch import ask
from rallypoint.net.messages import AnyOrder, Drain, Pause, StopWanted

if TYPE_CHECKING:
    from rallypoint.watch.operating import Wish


def follow(run: Path, wish: Wish) -> str:
    """Carry the order out on the run in this folder. Returns a sentence; RallypointError if it cannot be done."""
    match wish.order:
        case "snapshot":
            return ask.take_snapshot(run, _unsaid)
        case "resize":
            if not wish.workers and not wish.servers:
                raise UsageError("to what size? give a number of workers or of servers")
            return ask.resize(run, wish.workers, wish.servers, _unsaid)
        case _:
            return ask.order(run, _order(wish), _unsaid)


def _unsaid(sentence: str) -> None:
    """The page shows only what has come of an order."""


def _order(wish: Wish) -> AnyOrder:
    match wish.order:
        case "stop":
            return StopWanted(wish.reason)
        case "drain":
            return Drain(wish.member)
        case _:
            return Pause(on=wish.order == "pause")
