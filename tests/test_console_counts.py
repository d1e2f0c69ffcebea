"""What the console of a run counts, whatever happens to the coordinator meanwhile."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rallypoint.core.protocol import Finished, Message, Planned, Skipped, StepDone
from rallypoint.launch.console import RunConsole


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
    here = ", of them 6 now" if items == 48 else ""
    assert f"done: 10 steps{here}, {items} samples in" in _shown(messages)


def _shown(messages: list[Message]) -> str:
    said = io.StringIO()
    console = RunConsole(Console(file=said, width=200, highlight=False))
    for message in [*messages, Finished("w0")]:
        console.show(message)
    console.close()
    return said.getvalue()


@pytest.mark.parametrize(("alone", "first", "rest"), [
    (False, "step 0 skipped", "{} steps skipped"),
    (True, "a contribution to step 0 dropped", "{} contributions dropped"),
])  # fmt: skip
def test_of_many_skipped_steps_few_lines_tell_and_the_summary_says_how_many(alone: bool, first: str, rest: str) -> None:
    skipped = [Skipped(step, (0, 1), alone=alone) for step in range(123)]
    lines = [line for line in _shown([_planned(0), *skipped, *_steps(0, 10)]).splitlines() if "not finite" in line]
    assert len(lines) == 4
    assert lines[0] == f"{first}: the loss of replicas 0 and 1 is not finite"
    assert [line.split("; ")[-1] for line in lines[1:3]] == [f"{rest.format(count)} so far" for count in (10, 100)]
    assert lines[3] == f"{rest.format(123)}: a loss or a gradient was not finite"


def test_one_skipped_step_is_one() -> None:
    said = _shown([_planned(0), Skipped(3, ()), *_steps(0, 10)])
    assert "1 step skipped: a loss or a gradient was not finite" in said


def test_without_skipped_steps_the_summary_has_no_word_of_them() -> None:
    assert "finite" not in _shown([_planned(0), *_steps(0, 10)])
