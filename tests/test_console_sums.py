"""What a person sees of a job of sums: a script's own loop has no steps and no loss that servers know."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from rallypoint.core.protocol import Finished, Members, Planned, ScriptAt
from rallypoint.launch import console as shown_by
from rallypoint.launch.console import RunConsole
from rallypoint.launch.observing.beside import Observers

PLAN = Planned(0, 2, "scripts", 4_380_000, 61, ("worker0", "worker1"), ("server0", "server1"))
HERE = Members("1.1", ("worker0", "worker1"), (), ("server0", "server1"))


def shown(said: io.StringIO, *, terminal: bool = False) -> RunConsole:
    return RunConsole(Console(file=said, width=100, force_terminal=terminal, color_system=None, highlight=False))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(shown_by.time, "monotonic", lambda: made.now)  # (the module `time`: the console's too)
    return made


def test_neither_steps_nor_parameters_are_shown_and_the_last_line_says_how_many_sums_were_made(clock: Any) -> None:
    said = io.StringIO()
    console = shown(said)
    console.show(PLAN)
    clock.now = 106.0
    console.show(ScriptAt(0, 120, 6_000_000))
    clock.now = 110.0
    console.show(ScriptAt(1, 200, 10_000_000, ended=True))
    console.show(Finished(stopped_at=1, why="the scripts have ended"))
    console.close()
    assert said.getvalue().splitlines() == [
        "sums of 2 workers on 2 servers; the scripts decide when they end",
        "120 sums  1.0 MB/s from each worker",
        "done: the scripts have ended after 200 sums, 10.0 MB from each worker, in 10.0 s",
    ]


def test_a_terminal_shows_the_sums_so_far() -> None:
    said = io.StringIO()
    console = shown(said, terminal=True)
    console.show(PLAN)
    console.show(ScriptAt(0, 1234, 6_000_000))
    assert console._progress is not None
    console._progress.refresh()
    console.close()
    assert "1,234 sums" in said.getvalue()
    assert "2147483647" not in said.getvalue()


def test_the_coordinator_is_not_called_silent_while_it_repeats_how_far_the_scripts_are(clock: Any) -> None:
    said = io.StringIO()
    console = shown(said)
    console.show(PLAN)
    for _ in range(60):
        clock.now += 1.0
        console.show(ScriptAt(0))
        console.warn_of_silence(10.0)
    assert "nothing has been heard" not in said.getvalue()
    clock.now += 11.0
    console.warn_of_silence(10.0)
    assert "nothing has been heard from the coordinator for 11 s" in said.getvalue()
    assert "Sums go on without it" in said.getvalue()


def test_a_job_without_steps_is_not_called_stalled() -> None:
    told: list[int] = []
    beside = cast(Any, Observers.__new__(Observers))
    beside._reports = SimpleNamespace(steps=told.append, said=list[str])
    beside._page, beside._trackers = SimpleNamespace(said=list[str]), []
    console = shown(io.StringIO())
    for message in (PLAN, HERE):
        console.show(message)
    beside.look(console)
    assert told == [-1], "no step is waited for"
