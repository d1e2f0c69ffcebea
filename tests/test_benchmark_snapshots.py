"""The benchmark of snapshots: what it makes of times, and that it runs against the real checkpoints of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # its modules import one another by name

from cluster import BenchmarkFailed
from snapshots import figures, from_log, prices
from snapshots_member import Result

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"

# After the first, steps of 1 s; but a snapshot touches the one of 2.5 s and the next, another that of 1.5 s.
STARTS = [0.0, 5.0, 6.0, 7.0, 8.0, 10.5, 11.5, 12.5, 14.0, 15.0]
SAVES = [(8.0, 11.0), (13.0, 13.5)]


def test_a_snapshot_s_price_is_what_its_steps_took_longer_than_those_without_one() -> None:
    undisturbed, paid = prices(Result(STARTS, SAVES), warm_up=1)
    assert undisturbed == [1.0] * 5
    assert [(price.longest, price.lost, price.durable) for price in paid] == [(1.5, 1.5, 3.0), (0.5, 0.5, 0.5)]


def test_the_first_snapshot_of_a_round_stands_apart() -> None:
    found = figures("dcp-thread", [Result(STARTS, SAVES)] * 2, warm_up=1)
    assert (found.first_longest, found.longest.median, found.longest.count) == (1.5, 0.5, 2)
    assert (found.usual.median, found.noise) == (1.0, 0.0)


def test_without_a_step_to_compare_with_there_is_no_figure() -> None:
    with pytest.raises(BenchmarkFailed):
        prices(Result([0.0, 1.0, 2.0], [(0.0, 2.0)]), warm_up=0)
    with pytest.raises(BenchmarkFailed):
        prices(Result([0.0, 1.0, 2.0], []), warm_up=0)


def test_the_log_says_when_a_version_was_there_and_when_it_was_stored(tmp_path: Path) -> None:
    steps = [{"type": "StepDone", "step": step, "t": float(step)} for step in range(6)]
    stored = [{"type": "Snapshotted", "version": version, "t": t} for version, t in ((0, 0.5), (3, 2.75), (6, 9.0))]
    log = tmp_path / "events.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in [*steps, *stored]))
    assert from_log(log) == Result([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [(2.0, 2.75)])


@pytest.mark.slow
def test_it_runs_against_torch_s_own_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    small = ("--layers", "2", "--width", "512", "--pad", "0.1", "--every", "8", "--snapshots", "1", "--rounds", "1")
    argv = [sys.executable, str(FOLDER / "snapshots.py"), *small, "--json", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["results"]
    assert [design["design"] for design in found] == ["rallypoint", "dcp-thread", "dcp-process", "dcp-blocking"]
    assert all(design["durable"]["median"] > 0 for design in found)
