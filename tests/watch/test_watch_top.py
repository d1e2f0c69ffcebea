"""A run in the terminal."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console
from test_watch_state import PLAN, line, members, run_of, steps

from rallypoint.core import protocol
from rallypoint.core.protocol import Aborted, Applied, Members, Metrics, Planned, Say, ScriptAt, Snapshotted, Waiting
from rallypoint.errors import UsageError
from rallypoint.watch.app import PageReader
from rallypoint.watch.follow import EVENTS
from rallypoint.watch.state import RunState
from rallypoint.watch.top import compared, shown, spark, top


def text_of(run: RunState, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(shown(run, "run7", width))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_it_says_what_the_page_says() -> None:
    text = text_of(run_of(
        PLAN, members("worker0 worker1", "worker2"), *steps(0, 5), Metrics(5, {"val_loss": 1.25}),
        Applied(5, 2, 0.0, {"worker1": 0.25}), Snapshotted("s", 5, 2_000_000, 0.1), members("worker0 worker2"),
        Say("[red]worker1[/red] died"),
    ))  # fmt: skip
    for said in (
        "run7", "running", "step 5 of 10", "8 samples/s", "loss", "now 1, 1 to 5", "val_loss", "now 1.25",
        "goodput", "version 5, 2.0 MB", "server0", "worker0, worker2", "without worker1", "[red]worker1[/red] died",
    ):  # fmt: skip
        assert said in text, text


def test_who_came_and_went_stays_in_sight_whatever_advice_is_given() -> None:
    advice = [
        Say(f"workers are not equally fast: from step {n} on replicas are assigned by speed (worker0 {n}, worker2 6)")
        for n in range(4)
    ]
    others = [Say(f"advice {'abcdefgh'[n]}") for n in range(8)]
    text = text_of(run_of(
        Waiting("waiting for 2 more workers, 5 s so far"), PLAN, members(), *steps(0, 3),
        Say("worker1 is gone: it was killed"), members("worker0"), Waiting("waiting for worker1, 5 s so far"),
        members("worker0", "worker2"), *others, *advice,
    ))  # fmt: skip
    happened = text[text.index("what happened") : text.index("loss")]
    assert "from step 3 on replicas are assigned by speed (worker0 3, worker2 6)\n" in re.sub(r" *│?\n", "\n", happened)
    for said in ("worker1 is gone: it was killed", "waiting for worker1", "with worker2", "advice h"):
        assert said in happened, happened
    for said in ("without worker1", "2 more workers", "advice a", "from step 2 on", "times)"):
        assert said not in happened, happened


def test_only_the_same_line_said_again_is_counted_and_the_newest_snapshot_has_no_age() -> None:
    evaluated = [Say(f"worker1 has evaluated step {step}") for step in (20, 40, 60)]
    same = [Say("worker0 waits for its data")] * 3
    text = text_of(run_of(PLAN, members(), *evaluated, *same, Snapshotted("s", 5, 2_000_000, 0.1), *steps(0, 5)))
    assert re.search(r"worker1 has evaluated step 60 *│", text), text
    assert "worker0 waits for its data (3 times)" in text, text
    assert re.search(r"version 5, 2\.0 MB *│", text), text


def test_of_several_runs_it_shows_the_settings_that_differ_and_the_losses_on_one_scale() -> None:
    runs = {"a": run_of(PLAN, members(), *steps(0, 3)), "b": run_of(PLAN, members(), *steps(2, 5)), "c": RunState()}
    settings = {name: {"lr": lr, "clip": "1"} for name, lr in (("a", "0.1"), ("b", "0.2"), ("c", "0.3"))}
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(compared(runs, settings, 80))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for said in ("lr  0.1  0.2  0.3", "loss of a", "now 3, 3 to 5", "█▆▅", "loss of b", "now 1, 1 to 3", "▅▃▁"):
        assert said in text, text
    assert "clip" not in text


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        ("x" * 99, "y" * 99, {"x": 99, "y": 99}),
        ("x" * 99, "x" * 99, {"x": 0, "y": 0}),
        ("x" * 999, "x" * 998 + "y", {"x": 399, "y": 1}),  # a table of rates: its ends
    ],
)
def test_a_long_setting_is_shown_and_where_none_differs_it_says_so(
    one: str, other: str, shown: dict[str, int]
) -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(compared({"a": RunState(), "b": RunState()}, {"a": {"at": one}, "b": {"at": other}}, 80))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert {letter: text.count(letter) for letter in shown} == shown
    assert ("no settings differ" in text) == (shown["x"] == 0)


def test_before_the_first_step_and_after_a_failure_it_says_so() -> None:
    assert "waiting for members" in text_of(RunState())
    assert "worker0: no memory" in text_of(run_of(PLAN, members(), *steps(0, 2), Aborted("worker0: no memory")))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_console(width: int) -> None:
    run = run_of(PLAN, members(" ".join(f"worker{n}" for n in range(1000))), *steps(0, 10), Say("a long word " * 50))
    assert max(map(len, text_of(run, width).splitlines())) <= width


def test_a_terminal_of_24_lines_shows_what_happened_the_first_curves_the_times_and_the_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [Say(f"worker1 did {'abcdefgh'[n]}") for n in range(8)]
    late = Applied(9, 2, 0.0, {f"worker{n}": 0.25 for n in range(5)})
    stored = Snapshotted("s", 5, 2_000_000, 0.1)
    log = [PLAN, members(), *steps(0, 30), late, stored, *said, Metrics(9, {f"eval{n}": 1.0 for n in range(8)})]
    (tmp_path / EVENTS).write_bytes(b"".join(line(float(t), one) for t, one in enumerate(log)))
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system=None)
    monkeypatch.setattr("time.sleep", lambda _: interrupt())
    with pytest.raises(KeyboardInterrupt):
        top({"a": tmp_path}, {}, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for whole in ("worker1 did h", "loss", "now -24, -24 to 5", "goodput", "computing"):
        assert whole in text, text
    assert "eval7" not in text
    assert len(re.findall("╰", text)) == len(re.findall("╭", text)), "no panel is cut"


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_curve_is_a_line_of_blocks_from_the_lowest_to_the_highest() -> None:
    assert spark([0.0, 7.0, 3.5], 10) == "▁█▅"
    assert spark([1.0] * 5, 10) == "▁▁▁▁▁"
    assert spark([float(n) for n in range(1000)], 8) == "▁▂▃▄▅▆▇█"
    assert spark([1.0, 2.0], 8, [1.0, 8.0]) == "▁▂"


def test_a_curve_of_one_value_is_flat_although_sums_of_it_are_rounded() -> None:
    assert spark([0.0003, math.nextafter(0.0003, 1.0), 0.0003], 32) == "▁▁▁"
    assert spark([0.0003, 0.00030001, 0.0003], 32) == "▁█▁"


@pytest.mark.parametrize("values", [[1e308, -1e308, 0.0], [1.7e308] * 9, [float("inf"), 1.0], [float("nan")]])
def test_a_curve_whose_range_is_not_finite_has_no_blocks(values: list[float]) -> None:
    assert spark(values, 3) == ""


def test_nothing_that_a_log_says_commands_the_terminal() -> None:
    """A run's folder may be somebody else's: all of these are in it."""
    bad = "\x1b]0;owned\x07\x1b[2J\u202e"
    here = (f"worker{bad}",)
    run = run_of(
        Planned(10, 2, f"item{bad}", 100, 4, here, ("s",), 1, 8), Members("1.1", here, (), (f"server{bad}",)),
        *(protocol.StepDone(step, 1.0, 8, 0, figures={f"figure{bad}": 1e308 * (-1) ** step}) for step in range(4)),
        Metrics(3, {f"metric{bad}": 1.0}), Applied(3, 2, 0.0, {here[0]: 0.5}), protocol.Finished("", 3, f"why{bad}"),
    )  # fmt: skip
    run.times.lost[f"cause[red]{bad}"] = 1.0
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(shown(run, f"run{bad}", 200))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "".join(c for c in text if not c.isprintable()).strip("\n") == ""
    for said in ("run", "worker", "server", "figure", "metric", "why", "cause[red]"):
        assert f"{said}\\x1b]0;owned" in text, said


def test_where_there_is_no_terminal_it_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_bytes(b"".join(line(float(t), m) for t, m in enumerate([PLAN, members(), *steps(0, 3)])))
    console = Console(file=io.StringIO(), width=100)
    top({"run7": tmp_path}, {}, console)
    assert "step 3 of 10" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="name the folder of a run"):
        top({"nosuch": tmp_path / "nosuch"}, {}, console)


def test_a_store_without_steps_shows_steps_and_no_end() -> None:
    plan = Planned(0, 2, "pushes", 100, 3, ("worker0", "worker1"), ("server0",), items=2, loss="never")
    text = text_of(run_of(plan, members(), *steps(0, 3)))
    assert "step 3" in text
    assert not any(word in text for word in ("of 0", "sums"))


def test_a_job_of_sums_shows_sums_and_no_step() -> None:
    plan = Planned(0, 2, "scripts", 100, 3, ("worker0", "worker1"), ("server0",))
    run = run_of(plan, members(), ScriptAt(0, 1234, 5), ScriptAt(1, 1230, 5))
    assert "1,234 sums" in text_of(run)
    assert "step 0 of 0" not in text_of(run)
    news = PageReader().news(run)
    assert news["sums"] == 1234
