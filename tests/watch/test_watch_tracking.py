"""Trackers: a run's figures for TensorBoard."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from test_watch_state import PLAN, line, members, steps

from rallypoint.core.protocol import Aborted, Finished, Metrics, Skipped, StepDone
from rallypoint.errors import UsageError
from rallypoint.watch import tracking
from rallypoint.watch.follow import EVENTS
from rallypoint.watch.tracking import RunFacts, open_tracker, place_of, track
from support.beside import until
from support.programs import Program, run_program
from support.tracker_contract import TRACKER_CONTRACT, Make, Read, Shown


@pytest.fixture(autouse=True)
def _checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes checksums for these files sets this when it is imported, and leaves it."""
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")


class Remembering:
    """Remembers what it was given, as a tracker shows it."""

    def __init__(self) -> None:
        self.logged: dict[str, dict[int, float]] = {}
        self.twice = 0

    def start(self, run: RunFacts) -> None:
        for curve in self.logged.values():
            for step in [step for step in curve if step >= run.step]:
                del curve[step]

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.twice += step in self.logged.get(name, {})
            self.logged.setdefault(name, {})[step] = value

    def close(self) -> None: ...


def test_curves_and_evaluations_are_given_once_whatever_goes_back() -> None:
    tracker = Remembering()
    tracked = tracking._Tracked(tracker, RunFacts("run"))
    for message in (
        PLAN, members("worker0 worker1"), *steps(0, 4), Metrics(4, {"val": 1.5}), Metrics(4, {"val": 1.5}),
        *steps(4, 6), members("worker1\x1b[2J worker2"), Skipped(5, (0,)), *steps(4, 6), Metrics(6, {"val": 1.0}),
        PLAN, *steps(6, 7), Finished(),
    ):  # fmt: skip
        tracked.take((message, 0.0))
    assert tracker.logged["loss"] == {step: 5.0 - step for step in range(7)}
    assert tracker.logged["lr"] == dict.fromkeys(range(7), 0.1)
    assert tracker.logged["evaluation/val"] == {4: 1.5, 6: 1.0}  # that of version 4 is not void
    assert tracker.twice == 0


def shown_by_tensorboard(folder: Path) -> Shown:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    shown.Reload()
    return {tag: [(one.step, one.value) for one in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


@pytest.mark.parametrize("check", TRACKER_CONTRACT)
def test_tensorboard_keeps_the_contract(tmp_path: Path, check: Callable[[Make, Read], None]) -> None:
    pytest.importorskip("tensorboardX")
    check(lambda: open_tracker(f"tensorboard:{tmp_path}"), lambda: shown_by_tensorboard(tmp_path / "run"))


def test_a_log_is_followed_from_where_it_was_left(tmp_path: Path) -> None:
    """A tracker that dies between two steps, a torn line, a resumed run, another run in the same folder."""
    log, place = tmp_path / EVENTS, place_of(tmp_path, "kind:target")
    begins = [PLAN, *steps(0, 4), Aborted("x")]
    log.write_bytes(b"".join(line(n, message) for n, message in enumerate(begins)) + b'{"t":')
    tracker = Remembering()

    def follow() -> int:
        return track(tmp_path, RunFacts("run"), tracker, place, threading.Event(), lambda: False)

    assert follow() == 4
    assert follow() == 4
    with log.open("ab") as file:
        file.write(b"".join([b"1}\n", line(0, PLAN), *(line(1, done) for done in steps(2, 6)), line(9, Finished())]))
    assert follow() == 6
    assert tracker.logged["loss"] == {step: 5.0 - step for step in range(6)}
    assert tracker.twice == 0
    assert json.loads(place.read_text())["events"] == 12
    log.unlink()
    (tmp_path / "other").touch()  # so that the new log has another number
    log.write_bytes(line(0, PLAN) + line(1, StepDone(0, 9.0, 8)))
    assert follow() == 1
    assert tracker.logged["loss"] == {0: 9.0}
    with pytest.raises(UsageError, match="name the folder of a run"):
        track(tmp_path / "none", RunFacts("run"), tracker, place, threading.Event(), lambda: False)


def test_two_processes_never_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a run that tracks itself: one waits for the other to end, and then there is no more."""
    monkeypatch.setattr(tracking, "PREDECESSOR_S", 0.0)
    (tmp_path / EVENTS).write_bytes(b"".join(line(n, message) for n, message in enumerate([PLAN, *steps(0, 4)])))
    tracker, place, over = Remembering(), place_of(tmp_path, "kind:target"), threading.Event()
    first = threading.Thread(target=track, args=(tmp_path, RunFacts("run"), tracker, place, over, lambda: True))
    first.start()
    try:
        until(lambda: len(tracker.logged.get("loss", {})) == 4, "four steps")
        with pytest.raises(UsageError, match="another process writes"):
            track(tmp_path, RunFacts("run"), tracker, place, threading.Event(), lambda: False)
    finally:
        over.set()
        first.join()
    assert track(tmp_path, RunFacts("run"), tracker, place, threading.Event(), lambda: False) == 4
    assert tracker.twice == 0


SCRIPT = """
import sys, time, torch, rallypoint as rp
from pathlib import Path
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
gate = Path(sys.argv[1])
with rp.join() as job:
    run = job.train(model, data, replicas=2, batch=4, steps=30, optimizer=rp.SGD(lr=rp.cosine(0.1, warmup=3)))
    @run.every(10)
    def evaluated(step):
        return {"loss": step / 2}
    for micro in run:
        with micro:
            while micro.step >= 15 and not gate.exists():
                time.sleep(0.005)
                model(micro.batch[0])  # a roll-back ends it here
            micro.log(figure=micro.step)
            micro.backward(model(micro.batch[0]).square().mean())
"""


@pytest.mark.slow
@pytest.mark.programs
def test_tensorboard_shows_a_run_with_a_killed_worker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    run, gate = tmp_path / "run", tmp_path / "gate"
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--workers", "2", "--servers", "1", "--folder", str(run), "--track", f"tensorboard:{tmp_path}/logs"]
    argv = ["-m", "rallypoint.cli", "run", *options, str(tmp_path / "script.py"), str(gate)]
    program = Program(argv, tmp_path / "said", {**os.environ})
    try:
        until(lambda: (run / EVENTS).exists() and (run / EVENTS).read_bytes().count(b"StepDone") == 15, "15 steps")
        members = {child.name(): child for child in psutil.Process(program.pid).children(recursive=True)}
        members["worker1"].kill()
        until(lambda: (run / EVENTS).read_bytes().count(b'"Members"') > 1, "a view without it")
        gate.touch()
        assert program.wait(60) == 0, (tmp_path / "said").read_text()
    finally:
        program.kill()
        program.wait()
    lines = [json.loads(text) for text in (run / EVENTS).read_text().splitlines()]
    losses = {one["step"]: one["loss"] for one in lines if one["type"] == "StepDone"}
    curves = shown_by_tensorboard(tmp_path / "logs" / "run")
    assert [step for step, _ in curves["loss"]] == list(range(30))
    assert curves["loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses.items()]
    assert len(curves["lr"]) == 30
    assert curves["figure"] == [(step, step) for step in range(30)]
    assert curves["evaluation/loss"] == [(10, 5.0), (20, 10.0), (30, 15.0)]

    again = ["-m", "rallypoint.cli", "watch", str(run), "--track", f"tensorboard:{tmp_path}/logs"]
    assert run_program(again, tmp_path / "again", env={**os.environ})[0] == 0
    assert shown_by_tensorboard(tmp_path / "logs" / "run") == curves
