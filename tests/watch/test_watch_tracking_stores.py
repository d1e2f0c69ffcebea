"""Trackers whose stores cannot take back a step: W&B offline and MLflow, read back with the library itself.

A run that went back is several of theirs: each holds up to where the next one, in its name, says that it begins.
"""

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
from rallypoint.watch import tracking
from rallypoint.watch.tracking import open_tracker, parse_target
from support.tracker_contract import TRACKER_CONTRACT, Make, Read, Shown

WHY = "an optional tracker: pip install 'rallypoint[{}]'"


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


def together(parts: list[tuple[str, Shown]]) -> Shown:
    """What the parts of a run hold together, the oldest first: each voids what those before have from its step on."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, part in parts:
        first = int(name.removeprefix("run from step ")) if name != "run" else 0
        for curve in curves.values():
            curve[:] = [point for point in curve if point[0] < first]
        for of, points in part.items():
            curves.setdefault(of, []).extend(points)
    return curves


def read_mlflow(folder: Path) -> Shown:
    tracking = pytest.importorskip("mlflow.tracking", reason=WHY.format("mlflow"))
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rallypoint").experiment_id
    parts = []
    for run in client.search_runs([experiment], "tags.`rallypoint.run` = 'run'", order_by=["start_time ASC"]):
        curves = {}
        for name in run.data.metrics:
            points = client.get_metric_history(run.info.run_id, name)
            curves[name] = sorted((one.step, math.inf if one.value > 1.7e308 else one.value) for one in points)
        parts.append((run.info.run_name, curves))
    return together(parts)


def read_wandb(folder: Path) -> Shown:
    """The records that `wandb sync` would send. A file: blocks of 32 KiB, records in pieces."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason=WHY.format("wandb"))
    parts = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns):
        data, at, piece, name = path.read_bytes(), 7, b"", ""
        curves: dict[str, list[tuple[int, float]]] = {}
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            piece += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last piece
                record, piece = records.Record.FromString(piece), b""
                name = record.run.display_name if record.HasField("run") else name
                for of, point in _points(record.history) if record.HasField("history") else ():
                    curves.setdefault(of, []).append(point)
        parts.append((name, curves))
    return together(parts)


def _points(history: Any) -> Iterator[tuple[str, tuple[int, float]]]:
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
    step = values.pop("rallypoint/step")
    return ((name, (step, float(value))) for name, value in values.items() if not name.startswith("_"))


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
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs (alembic|mlflow): pip install 'mlflow-skinny"):
        parse_target("mlflow:logs")
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: object())
    monkeypatch.chdir(tmp_path)
    assert parse_target("wandb:a:b") == f"wandb:{tmp_path}/a:b"
