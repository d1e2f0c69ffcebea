"""What a person sees of a run, in terminals of several widths and in a file."""

from __future__ import annotations

import io
import itertools
import re
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from rallypoint.core import protocol
from rallypoint.core.protocol import Finished, Members, Message, Metrics, Planned, Say, ScriptAt, Snapshotted, StepDone
from rallypoint.core.view import ViewNumber
from rallypoint.launch import console
from rallypoint.launch import console as shown_by
from rallypoint.launch.console import RunConsole
from rallypoint.launch.observing.beside import Observers
from rallypoint.launch.plan import Launch

PLAN = Planned(
    replicas=2, steps=1500, words=9610, shards=2, workers=("worker0",), servers=("server0",), item="samples", items=64
)


def seen(width: int, *, terminal: bool) -> str:
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=width, force_terminal=terminal, color_system=None, highlight=False))
    shown.show(protocol.Waiting("waiting for 1 more server and 1 more worker, 5 s so far"))
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


@pytest.mark.parametrize("name", ["accuracy", "validation_accuracy_of_the_last_evaluation"])
def test_figures_of_evaluations_leave_the_live_line_one_line(name: str) -> None:
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=80, force_terminal=True, color_system=None, highlight=False))
    shown.show(msgspec.structs.replace(PLAN, steps=15_000, items=4096))
    shown.show(Metrics(100, {"val_loss": 0.3817, name: 0.8457}))
    for step in range(2):
        shown.show(StepDone(step=12_345 + step, loss=0.0123, items=4096))
    shown._progress.refresh()
    live = said.getvalue().splitlines()[-1]
    for whole in ("step 12347/15000", "loss 0.0123", "samples/s", "left"):
        assert whole in live
    shown.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_figures_and_items_are_named_as_the_script_names_them(terminal: bool) -> None:
    said = io.StringIO()
    console = RunConsole(Console(file=said, width=200, force_terminal=terminal, color_system=None, highlight=False))
    console.show(msgspec.structs.replace(PLAN, item="tiles [/16]"))
    for step in (1498, 1499):
        console.show(StepDone(step=step, loss=0.0123, items=64, figures={"acc[top5]": 0.9}))
    if console._progress is not None:
        console._progress.refresh()
    console.close()
    assert "acc[top5] 0.9000" in said.getvalue()
    assert " tiles [/16]/s" in said.getvalue()


def test_a_loop_that_tells_no_loss_is_shown_none() -> None:
    own = msgspec.structs.replace(PLAN, loss="said")
    assert not any("nan" in line or "loss" in line for line in said_of(own, StepDone(1499, float("nan"), 64)))
    assert any("loss 0.5000" in line for line in said_of(own, StepDone(1499, 0.5, 64)))
    assert any("loss nan" in line for line in said_of(PLAN, StepDone(1499, float("nan"), 64)))


def test_a_store_is_shown_with_contributors_and_pushes_and_without_a_loss() -> None:
    store = msgspec.structs.replace(PLAN, loss="never", item="pushes", items=2)
    lines = said_of(store, StepDone(1499, 0.0, 2), Finished())
    assert "2 contributors on 1 worker" in " ".join(lines)
    assert not any("loss" in line for line in lines)
    assert "1500 steps, 3,000 pushes in" in " ".join(lines)


def test_a_store_without_steps_is_shown_no_number_that_nobody_has_given() -> None:
    store = msgspec.structs.replace(PLAN, steps=0, loss="never", item="pushes", items=2)
    done = [StepDone(step, 0.0, 2) for step in (0, 49)]
    lines = said_of(store, *done, Snapshotted("step-1073741824-1", 1 << 30, 4108, 0.1), Finished())
    assert "scripts decide when they end" in " ".join(lines)
    assert "snapshot of step 50: 4.1 kB in 0.1 s" in lines
    assert not any("1073741824" in line or "/0" in line for line in lines), lines
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=200, force_terminal=True, color_system=None, highlight=False))
    for message in (store, *done):
        shown.show(message)
    shown._progress.refresh()
    shown.close()
    assert "step 50" in said.getvalue()
    assert "/" not in said.getvalue()


def test_a_sentence_is_wrapped_between_words_in_a_terminal_and_is_one_line_in_a_file() -> None:
    assert "waiting for 1 more server and 1 more \nworker, 5 s so far\n" in seen(40, terminal=True)
    assert "waiting for 1 more server and 1 more worker, 5 s so far\n" in seen(40, terminal=False)


def said_of(*messages: Message) -> list[str]:
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=80, force_terminal=False, color_system=None, highlight=False))
    for message in messages:
        shown.show(message)
    shown.close()
    return said.getvalue().splitlines()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "9,610 parameters in 2 shards on 1 server; 2 replicas on 1 worker; 1500 steps"),
        (
            {"words": 19_200_000, "shards": 1, "replicas": 1, "steps": 1, "workers": ("w0", "w1")},
            "19.20 M parameters in 1 shard on 1 server; 1 replica on 1 worker; 1 step",
        ),
    ],
)
def test_numbers_are_readable_and_words_are_in_the_right_number(changes: dict[str, Any], sentence: str) -> None:
    assert said_of(msgspec.structs.replace(PLAN, **changes)) == [sentence]


@pytest.mark.parametrize("line", ["epoch:100: loss 3", "w[:x:2]", "C:\\", "step\tloss", "[x] [/x] \\[y]", "é" * 50])
def test_a_line_of_a_script_is_shown_as_it_was_printed(line: str) -> None:
    said = io.StringIO()
    shown = RunConsole(console.Screen(file=said, width=40))
    for process in ("worker0", "worker1"):
        shown.relay(process, line)
    shown.say("epoch:100:")
    assert said.getvalue().splitlines() == [line, f"worker1 | {line}", "epoch:100:"]


def test_a_snapshot_is_named_by_its_step_and_its_size_is_never_nothing() -> None:
    rounds = msgspec.structs.replace(PLAN, steps_per_round=8)
    said = said_of(rounds, Snapshotted("x", 4, 900, 0.25), Snapshotted("y", 400, 12_345_678, 1.0))
    assert said[1:] == ["snapshot of step 32: 0.9 kB in 0.2 s", "snapshot of step 1500: 12.3 MB in 1.0 s"]


def test_what_is_waited_for_after_the_jobs_end_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0.0, 100.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: now_is[0])
    now_is = [next(now)]
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=80, highlight=False))
    for message in (PLAN, Finished(), Finished()):
        shown.show(message)
        now_is[0] = next(now)
    shown.close()
    assert "96,000 samples in 100.0 s (960 samples/s)" in said.getvalue()


def test_the_rate_does_not_count_the_time_in_which_nobody_told_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator was away: the steps that were made meanwhile are not in the rate, nor is the time."""
    said, now = io.StringIO(), [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    shown = RunConsole(Console(file=said, width=200, highlight=False))
    shown.show(PLAN)
    for at, step in ((1.0, 0), (2.0, 1), (12.0, 101), (13.0, 102), (18.0, 103)):
        now[0] = at
        shown.show(StepDone(step=step, loss=0.5, items=64))
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) samples/s", said.getvalue())]
    assert rates == [21.0], said.getvalue()


def test_a_console_of_a_later_coordinator_counts_from_the_first_step_that_it_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The journal's step is of the last change of members: here step 3, long ago."""
    said, now = io.StringIO(), [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    shown = RunConsole(Console(file=said, width=20, highlight=False))  # a file: no line is wrapped
    shown.later = True
    shown.show(msgspec.structs.replace(PLAN, done=3))
    for step in range(1479, 1500):
        now[0] += 0.5
        shown.show(StepDone(step=step, loss=0.5, items=64))
    shown.show(Finished())
    shown.close()
    assert "done: 1500 steps, of them 20 now, 1,280 samples in 10.0 s (128 samples/s)" in said.getvalue()


def test_figures_that_the_next_coordinator_announces_again_are_shown_once() -> None:
    """Workers repeat the last ones when they come back to it."""
    figures = [Metrics(step, {"loss": float("nan")}, ViewNumber(1, 1)) for step in (20, 40)]
    again = [msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Metrics) for one in figures]
    anew = Metrics(20, {"loss": float("nan")}, ViewNumber(2, 1))  # computed again after a roll-back
    said = [line for line in said_of(PLAN, *figures, *again, anew) if "loss" in line]
    assert [line.split()[1] for line in said] == ["20", "40", "20"]


def test_figures_have_as_many_digits_each_time() -> None:
    said = said_of(PLAN, Metrics(20, {"loss": 2.52, "accuracy": 0.9, "perplexity": 1234.4}, ViewNumber()))
    assert said[1:] == ["step     20  loss 2.520  accuracy 0.9000  perplexity 1234"]


def test_the_way_to_go_on_names_the_step_the_run_would_begin_with() -> None:
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=400, highlight=False))
    plan = Launch(worker=("true",), folder="runs/my x", snapshots="somewhere")
    shown.say_how_to_go_on(plan, failed=False)
    assert said.getvalue() == "", "nothing was computed, and nothing is lost"
    shown.show(msgspec.structs.replace(PLAN, steps_per_round=8))
    shown.show(StepDone(step=50, loss=0.1, items=1))
    shown.say_how_to_go_on(plan, failed=False)
    shown.show(Snapshotted("x", 6, 900, 0.25))
    shown.say_how_to_go_on(plan, failed=False)
    shown.say_how_to_go_on(plan, failed=True)
    shown.close()
    way = "to go on from step 48, the last snapshot: rallypoint resume 'runs/my x'"
    assert [line for line in said.getvalue().splitlines() if "go on" in line] == [
        "there is no snapshot of this run to go on from", way, f"{way} (--set KEY=VALUE changes settings)"
    ]  # fmt: skip


def test_one_does_not_go_on_from_the_first_weights() -> None:
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=400, highlight=False))
    shown.show(PLAN)
    shown.show(Snapshotted("x", 0, 900, 0.25))
    shown.say_how_to_go_on(Launch(worker=("true",), folder="runs/x", snapshots="somewhere"), failed=True)
    shown.close()
    assert "go on" not in said.getvalue()


def test_the_end_of_a_process_is_said_once() -> None:
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=400, highlight=False))
    shown.started.add("worker1")  # the launcher says how it ended
    lost = [Say(f"worker{number} is gone: its connection ended") for number in (0, 1)]
    for message in (*lost, Say("worker1 is gone: no sign of life for 5 s")):
        shown.show(message)
    shown.ended("worker1", said=True)
    assert said.getvalue().splitlines() == [lost[0].text, "worker1 is gone: no sign of life for 5 s"]


@pytest.mark.parametrize("first", ["the exit", "the coordinator"])
def test_a_process_that_leaves_with_status_0_is_told_of_by_the_coordinator(first: str) -> None:
    said, lost = io.StringIO(), Say("worker1 is gone: its connection ended")
    shown = RunConsole(Console(file=said, width=400, highlight=False))
    shown.started.add("worker1")
    if first == "the coordinator":
        shown.show(lost)
    shown.ended("worker1", said=False)
    if first == "the exit":
        shown.show(lost)
    assert said.getvalue().splitlines() == [lost.text]


def test_no_more_workers_are_said_to_compute_than_there_are_replicas() -> None:
    """While replicas move between workers by speed, a view names those that had one and those that get one."""
    two, three = (Members("1.1", ("w1", "w2"), ("w3",), ("s",)), Members("1.2", ("w1", "w2", "w3"), (), ("s",)))
    assert said_of(PLAN, two, three)[1:] == ["2 of w1, w2, w3 compute: replicas are assigned by speed"]


def test_before_the_plan_no_steps_are_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    said = io.StringIO()
    shown = RunConsole(Console(file=said, width=400, force_terminal=False, highlight=False))
    now[0] = 59.0  # processes start, and the machine may be loaded
    shown.warn_of_silence(10.0)
    assert not said.getvalue()
    now[0] = 61.0
    shown.warn_of_silence(10.0)
    assert "nothing has been heard from the coordinator for 61 s" in said.getvalue()
    assert "Steps go on" not in said.getvalue()
    shown.show(PLAN)
    now[0] = 72.0
    shown.warn_of_silence(10.0)
    assert "Steps go on without it" in said.getvalue()


# ---- what is counted, whatever happens to the coordinator meanwhile ----


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
    skipped = [protocol.Skipped(step, (0, 1), alone=alone) for step in range(123)]
    lines = [line for line in _shown([_planned(0), *skipped, *_steps(0, 10)]).splitlines() if "not finite" in line]
    assert len(lines) == 4
    assert lines[0] == f"{first}: the loss of replicas 0 and 1 is not finite"
    assert [line.split("; ")[-1] for line in lines[1:3]] == [f"{rest.format(count)} so far" for count in (10, 100)]
    assert lines[3] == f"{rest.format(123)}: a loss or a gradient was not finite"


def test_one_skipped_step_is_one() -> None:
    said = _shown([_planned(0), protocol.Skipped(3, ()), *_steps(0, 10)])
    assert "1 step skipped: a loss or a gradient was not finite" in said


def test_without_skipped_steps_the_summary_has_no_word_of_them() -> None:
    assert "finite" not in _shown([_planned(0), *_steps(0, 10)])


# ---- a job of sums: a script's own loop has no steps and no loss that servers know ----


SUMS = Planned(0, 2, "scripts", 4_380_000, 61, ("worker0", "worker1"), ("server0", "server1"))
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
    console.show(SUMS)
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
    console.show(SUMS)
    console.show(ScriptAt(0, 1234, 6_000_000))
    console._progress.refresh()
    console.close()
    assert "1,234 sums" in said.getvalue()
    assert "2147483647" not in said.getvalue()


def test_the_coordinator_is_not_called_silent_while_it_repeats_how_far_the_scripts_are(clock: Any) -> None:
    said = io.StringIO()
    console = shown(said)
    console.show(SUMS)
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
    for message in (SUMS, HERE):
        console.show(message)
    beside.look(console)
    assert told == [-1], "no step is waited for"
