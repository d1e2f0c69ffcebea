"""What the console of a run counts, whatever happens to the coordinator meanwhile."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rallypoint.launch.console import RunConsole
from rallypoint.net.messages import Finished, Message, Planned, StepDone


def _planned(done: int) -> Planned:
    return Planned(
        steps=10, replicas=2, item="samples", words=100, shards=1, workers=("w0",), servers=("s0",),
        steps_per_round=1, items=8, done=done,
    )  # fmt: skip


def _steps(first: int, last: int) -> list[Message]:
    return [StepDone(step, 1.0, 8, 0) for step in range(first, last)]


@pytest.mark.parametrize(("messages", "items"), [
    ([_planned(0), *_steps(0, 10)], 80),
    ([_planned(0), *_steps(0, 6), *_steps(3, 10)], 80),  # a roll-back: steps 3 to 5 are computed twice, counted once
    ([_planned(0), *_steps(0, 6), _planned(6), *_steps(6, 10)], 80),  # the coordinator was replaced after step 5
    ([_planned(4), *_steps(4, 10)], 48),  # the run goes on from a snapshot: what an earlier run did is not its own
    ([_planned(4), *_steps(4, 7), _planned(7), *_steps(7, 10)], 48),
], ids=["undisturbed", "rolled-back", "taken-over", "resumed", "resumed-and-taken-over"])  # fmt: skip
def test_the_total_counts_each_sample_of_this_run_once(messages: list[Message], items: int) -> None:
    said = io.StringIO()
    console = RunConsole(Console(file=said, width=200, highlight=False))
    for message in [*messages, Finished("w0")]:
        console.show(message)
    console.close()
    here = ", of them 6 now" if items == 48 else ""
    assert f"done: 10 steps{here}, {items} samples in" in said.getvalue()
