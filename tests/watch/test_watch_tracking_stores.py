"""Trackers whose stores cannot take back a step: W&B offline and MLflow, read back with the library itself."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch.reporting.redaction import Redaction
from rallypoint.testing.contracts.trackers import TRACKER_CONTRACT, Make, Read, Shown
from rallypoint.watch.tracking import kinds
from rallypoint.watch.tracking.copying import Copying
from rallypoint.watch.tracking.kinds import open_tracker, parse_target
from rallypoint.watch.tracking.tracker import RunFacts

WHY = "an optional tracker: pip install 'rallypoint[{}]'"


class Listing:
    """A store in memory: it can only add, and hide."""

    def __init__(self, runs: list[tuple[str, list[Any]]]) -> None:
        self.runs, self.hidden = runs, list[int]()

    def hide(self, name: str, step: int) -> None:
        self.hidden.append(step)
        self.runs[:] = [run for run in self.runs if run[0] != name]

    def begin(self, run: RunFacts) -> None:
        self.runs.append((run.name, []))

    def log(self, step: int, scalars: Any) -> None:
        self.runs[-1][1].append((step, dict(scalars)))

    def event(self, step: int, text: str) -> None:
        self.runs[-1][1].append((step, text))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def shown(rows: list[tuple[int, Any]]) -> Shown:
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, what in rows:
        for name, value in () if isinstance(what, str) else what.items():
            curves.setdefault(name, []).append((step, value))
    return curves, [row for row in rows if isinstance(row[1], str)]


@pytest.mark.parametrize("check", TRACKER_CONTRACT)
def test_a_store_that_can_only_add_keeps_the_contract(tmp_path: Path, check: Callable[[Make, Read], None]) -> None:
    runs = list[tuple[str, list[Any]]]()

    def read() -> Shown:
        ((_, rows),) = runs  # one run is seen
        return shown(rows)

    check(lambda: Copying(tmp_path, Listing(runs)), read)


def test_a_torn_row_is_left_out_and_other_runs_are_left_alone(tmp_path: Path) -> None:
    runs = list[tuple[str, list[Any]]]()
    for name in ("other", "run"):
        tracker = Copying(tmp_path, Listing(runs))
        tracker.start(RunFacts(name))
        tracker.log(0, {"loss": math.inf})
        tracker.event(0, "said")
        tracker.log(1, {"loss": 1.0})
        tracker.close()
    with (tmp_path / "run.rows.jsonl").open("a") as file:
        file.write('[2, {"lo')
    store = Listing(runs)
    tracker = Copying(tmp_path, store)
    tracker.start(RunFacts("run", step=1))
    tracker.close()
    assert store.hidden == [1]
    assert dict(runs)["run"] == [(0, {"loss": math.inf}), (0, "said")]
    assert len(dict(runs)["other"]) == 3


def test_no_secret_of_an_event_reaches_a_store_or_its_rows(tmp_path: Path) -> None:
    runs = list[tuple[str, list[Any]]]()
    tracker = Copying(tmp_path, Listing(runs), Redaction(["hunter-two"]))
    tracker.start(RunFacts("run"))
    tracker.event(0, "failed: hunter-two")
    tracker.close()
    assert runs[-1][1] == [(0, "failed: ***")]
    assert "hunter-two" not in (tmp_path / "run.rows.jsonl").read_text()


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The libraries set variables, and leave them."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    before = dict(os.environ)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
    os.environ.clear()
    os.environ.update(before)


def read_mlflow(folder: Path) -> Shown:
    tracking = pytest.importorskip("mlflow.tracking", reason=WHY.format("mlflow"))
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rallypoint").experiment_id
    (run,) = client.search_runs([experiment])  # what its page shows
    assert run.info.run_name == "run"
    curves = {}
    for name in run.data.metrics:
        points = client.get_metric_history(run.info.run_id, name)
        curves[name] = sorted((one.step, math.inf if one.value > 1.7e308 else one.value) for one in points)
    told = [path.read_text().splitlines() for path in (folder / "artifacts" / run.info.run_id).rglob("events.txt")]
    events = [(int(step), text) for lines in told for step, text in (line.split("\t", 1) for line in lines)]
    return curves, events


def read_wandb(folder: Path) -> Shown:
    """The records of the one run that `wandb sync` would send. The file: blocks of 32 KiB, records in pieces."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason=WHY.format("wandb"))
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, piece, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            rows.append(records.Record.FromString(piece))
            piece = b""
    return shown([row for one in rows if one.HasField("history") for row in [_row(one.history)]])


def _row(history: Any) -> tuple[int, Any]:
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
    step = values.pop("rallypoint/step")
    values = {name: value for name, value in values.items() if not name.startswith("_")}
    if "event" in values:
        return step, values["event"]
    return step, {name: float(value) for name, value in values.items()}


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize(("kind", "read"), [("mlflow", read_mlflow), ("wandb", read_wandb)])
@pytest.mark.parametrize("check", TRACKER_CONTRACT)
def test_a_library_keeps_the_contract(
    tmp_path: Path, check: Callable[[Make, Read], None], kind: str, read: Callable[[Path], Shown]
) -> None:
    pytest.importorskip(kind, reason=WHY.format(kind))
    check(lambda: open_tracker(f"{kind}:{tmp_path}"), lambda: read(tmp_path))


def test_a_target_that_cannot_be_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in ("wandb", "wandb:", "prometheus:logs", ""):
        with pytest.raises(UsageError, match="KIND being one of tensorboard, wandb, mlflow"):
            parse_target(wrong)
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs (alembic|mlflow): pip install 'mlflow-skinny"):
        parse_target("mlflow:logs")
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: object())
    monkeypatch.chdir(tmp_path)
    assert parse_target("wandb:a:b") == f"wandb:{tmp_path}/a:b"
