"""What a person sees of a run, in terminals of several widths and in a file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rallypoint.launch.console import RunConsole
from rallypoint.net.messages import Planned, StepDone, Waiting

PLAN = Planned(
    replicas=2, steps=1500, words=9610, shards=2, workers=("worker0",), servers=("server0",), item="samples", items=64
)


def seen(width: int, *, terminal: bool) -> str:
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=width, force_terminal=terminal, color_system=None, highlight=False))
    shown.show(Waiting("waiting for 1 more server and 1 more worker, 5 s so far"))
    shown.show(PLAN)
    shown.show(StepDone(step=825, loss=0.0123, items=64, again=0))
    if shown._progress is not None:
        shown._progress.refresh()
    shown.close()
    return said.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_live_line_is_cut_in_no_terminal(width: int) -> None:
    text = seen(width, terminal=True)
    assert "step 826/1500" in text
    assert "loss 0.0123" in text
    assert "…" not in text


def test_a_sentence_is_wrapped_between_words_in_a_terminal_and_is_one_line_in_a_file() -> None:
    assert "waiting for 1 more server and 1 more \nworker, 5 s so far\n" in seen(40, terminal=True)
    assert "waiting for 1 more server and 1 more worker, 5 s so far\n" in seen(40, terminal=False)
