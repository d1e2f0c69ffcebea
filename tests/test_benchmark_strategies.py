"""The comparison of ways to synchronise: its arithmetic, and that it runs, ends and writes what it promises."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # its modules import one another by name

import strategies
from cluster import BenchmarkFailed, Case
from rallypoint.config import resolve
from strategies import Point, chosen_rows, reach, sentence
from strategies_member import Point as MemberPoint
from strategies_member import Result, Task
from strategies_rows import (
    OPTIMIZERS,
    ROWS,
    baseline_of,
    choose_replicas,
    least_seconds,
    optimizer,
    rows_of,
    settings_with,
)
from strategies_workloads import WORKLOADS

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
MODEL = [(1000, 1000)]  # K = 4 MB: 0.32 s on a link of 100 Mbit/s
KB = 0.32
SLOW_LINKS, FAST_LINKS = Case(4, 2, 100.0), Case(4, 2, 1e6)


def least(name: str, case: Case, replicas: int = 4, slow: float = 1.0) -> float:
    return least_seconds(ROWS[name], case, replicas, slow, 0.4, MODEL)


def test_the_limit_on_slow_links_is_the_busiest_link() -> None:
    assert least("ddp", SLOW_LINKS) == pytest.approx(1.5 * KB)  # a ring of four
    assert least("sync", SLOW_LINKS) == pytest.approx(2.0 * KB)  # two servers for four workers
    assert least("sync", Case(4, 4, 100.0)) == pytest.approx(1.0 * KB)
    assert least("bf16", SLOW_LINKS) == pytest.approx(1.0 * KB)
    assert least("int8", SLOW_LINKS) == pytest.approx(1.0 * KB)  # on its way down it is bf16 still
    assert least("sync", SLOW_LINKS, replicas=8) == pytest.approx(4.0 * KB)  # each replica sends its own gradient
    assert least("diloco", SLOW_LINKS) == pytest.approx(max(0.1, 2.0 * KB / 16))


def test_the_limit_on_fast_links_is_computing_as_the_replicas_can_be_dealt() -> None:
    assert least("sync", FAST_LINKS) == pytest.approx(0.1)
    assert least("ddp", FAST_LINKS, slow=3.0) == pytest.approx(0.3)
    assert least("sync", FAST_LINKS, replicas=4, slow=3.0) == pytest.approx(0.2)  # two of them on a usual worker
    assert least("sync", FAST_LINKS, replicas=8, slow=3.0) == pytest.approx(0.15)
    assert least("diloco", FAST_LINKS, slow=3.0) == pytest.approx(0.3)  # its optimizers' states stay where they are


def test_replicas_are_as_many_as_the_limit_says_is_faster() -> None:
    def chosen(name: str, case: Case, slow: float) -> int:
        return choose_replicas(ROWS[name], case, slow, 0.4, MODEL)

    assert chosen("sync", FAST_LINKS, 1.0) == 4
    assert chosen("sync", FAST_LINKS, 3.0) == 8
    assert chosen("sync", SLOW_LINKS, 3.0) == 4
    assert chosen("ddp", FAST_LINKS, 3.0) == 4
    assert chosen("int8", FAST_LINKS, 3.0) == 4  # its residuals stay where they are, and so do its replicas


def test_the_goal_is_reached_between_two_points_of_the_curve() -> None:
    curve = [Point(0.0, 0, 5.0), Point(10.0, 100, 3.0), Point(20.0, 200, 2.0), Point(30.0, 300, 2.5)]
    assert reach(curve, 2.5) == pytest.approx((15.0, 150.0))
    assert reach(curve, 2.0) == pytest.approx((20.0, 200.0))
    assert reach(curve, 6.0) == (0.0, 0)
    assert reach(curve, 1.9) is None


def test_a_failure_is_the_sentence_that_a_member_said() -> None:
    def said(words: str) -> str:
        return sentence(BenchmarkFailed(words))

    traced = "worker0 ended with status 1\n--- worker0:\nTraceback ...\nrallypoint.errors.ConfigError: codec x cannot"
    assert said(traced) == "codec x cannot"
    assert said("worker1 ended with status 1\n--- worker1:\nerror: no such thing") == "no such thing"
    assert said("worker1 was not done after 9 s\n") == "worker1 was not done after 9 s"


@pytest.mark.parametrize("model", WORKLOADS)
def test_every_row_has_a_baseline_before_it_and_settings_that_make_sense(model: str) -> None:
    names = chosen_rows(None, False, model)
    assert set(names) == set(rows_of(model))
    for name in names:
        baseline = baseline_of(model, name)
        assert names.index(baseline) <= names.index(name)
        assert baseline in OPTIMIZERS[model]
        resolve({**settings_with(ROWS[name], 4), "replicas": 4, "optimizer": optimizer(model, name, 100, 1.0)})


def test_a_row_that_fails_leaves_its_sentence_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(at: object, tasks: list[Task], patience: float) -> list[Result]:
        if tasks[0].hook is None:
            raise BenchmarkFailed("worker0 ended with status 1\n--- worker0:\nerror: that cannot be")
        points = [MemberPoint(1.0, 5.0), MemberPoint(9.0, 3.0)]
        return [Result(1.0, 9.0, [float(t) for t in range(2, 10)], 80, 160, 0.1, points) for _ in tasks]

    monkeypatch.setattr(strategies, "_train", train)
    rows = ("ddp", "sync", "ddp-sgd")
    plan = strategies.Plan(model="gpt", rows=rows, seeds=1, margin=1.02, patience=9.0, steps=8)
    trials: list[strategies.Trial] = []
    setting = strategies.Setting(Case(2, 1, None), 1.0)
    strategies.run_setting(setting, plan, Console(file=io.StringIO()), trials)
    ddp, sync, sgd = trials
    assert sync.error == "that cannot be"
    assert (ddp.error, sgd.error) == (None, None)
    assert (ddp.final, ddp.seconds) == (3.0, pytest.approx(1.0, rel=0.1))  # 8 samples of each of two workers a second
    assert ddp.seconds_to_goal == pytest.approx(8.0 * (5.0 - 3.06) / 2.0)
    assert len(strategies.tables(trials, plan)) == 1


@pytest.mark.slow
def test_it_compares_ddp_with_sync(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    argv = [sys.executable, str(FOLDER / "strategies.py"), "--loopback", "--even", "--workers", "2", "--servers", "1"]
    argv += ["--rows", "sync", "--steps", "4", "--json", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    ddp, sync = (trial["curve"][-1]["loss"] for trial in json.loads(path.read_text())["results"])
    assert sync == pytest.approx(ddp, rel=1e-4)
