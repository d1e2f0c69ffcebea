"""The alerts and the dashboard that are shipped: promtool reads and plays them, and a real Prometheus scrapes a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import rallypoint.watch
from rallypoint.watch.metrics import MEASURES
from support.beside import until
from support.members import script

SHIPPED = Path(rallypoint.watch.__file__).parent / "prometheus"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
SUFFIXES = {"gauge": [""], "counter": ["_total"], "summary": ["_sum", "_count"],
            "histogram": ["_bucket", "_sum", "_count"]}  # fmt: skip
KNOWN = {f"{name}{suffix}" for name, measure in MEASURES.items() for suffix in SUFFIXES[measure.kind]}
KNOWN |= {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def panels() -> list[dict[str, Any]]:
    board = json.loads((SHIPPED / "grafana.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    drawn = [target["expr"].replace("$__rate_interval", "1m") for panel in panels() for target in panel["targets"]]
    return [*(rule["expr"] for rule in alerts()), *drawn]


def promtool(*arguments: str, folder: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in [*SHIPPED.iterdir(), Path(__file__).with_name("alerts_test.yml")]:
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_asks_for_what_is_measured(expression: str) -> None:
    named = set(re.findall(r"\b(?:rallypoint|process)_\w+", expression))
    assert named or expression.startswith("up{")
    assert named <= KNOWN


def test_no_two_panels_lie_over_each_other() -> None:
    places = [panel["gridPos"] for panel in panels()]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@needs_promtool
def test_the_alerts_fire_when_they_should_and_only_then(folder: Path) -> None:
    promtool("check", "rules", "alerts.yml", folder=folder)
    promtool("test", "rules", "alerts_test.yml", folder=folder)
    promtool("check", "config", "prometheus.yml", folder=folder)


@needs_promtool
def test_prometheus_can_read_what_the_dashboard_asks(folder: Path) -> None:
    rules = [{"record": f"asked:{number}".replace(":", "_"), "expr": one} for number, one in enumerate(expressions())]
    (folder / "asked.yml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    promtool("check", "rules", "asked.yml", folder=folder)


def test_each_alert_is_played(folder: Path) -> None:
    played = {test["alertname"] for one in yaml.safe_load((folder / "alerts_test.yml").read_text())["tests"]
              for test in one["alert_rule_test"] if test["exp_alerts"]}  # fmt: skip
    assert played == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("name", MEASURES)
def test_the_docs_name_what_is_measured(name: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "prometheus.md").read_text()
    total = "_total" * (MEASURES[name].kind == "counter")
    assert re.search(rf"`{name.removeprefix('rallypoint_')}{total}\b", text)


# ---- a real Prometheus, and a real run ----



class Asked:
    """A Prometheus that reads `folder`'s configuration."""

    def __init__(self, port: int) -> None:
        self._at = f"http://127.0.0.1:{port}/api/v1"

    def __call__(self, expression: str) -> dict[str, float]:
        """The expression's values by member."""
        with urllib.request.urlopen(f"{self._at}/query?query={urllib.parse.quote(expression)}", timeout=20) as answer:
            found = msgspec.json.decode(answer.read())["data"]["result"]
        return {one["metric"].get("member", ""): float(one["value"][1]) for one in found}

    def answers(self) -> bool:
        try:
            self("vector(1)")
        except OSError:
            return False
        return True


@contextmanager
def prometheus(folder: Path) -> Iterator[Asked]:
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert PROMETHEUS is not None
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [PROMETHEUS, "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb",
             f"--web.listen-address=127.0.0.1:{port}"], cwd=folder, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        asked = Asked(port)
        until(asked.answers, lambda: (folder / "prometheus.log").read_text())
        yield asked
    finally:
        process.terminate()
        process.wait(30)


def begun(events: Path, run: subprocess.Popen[bytes], told: Callable[[], str]) -> None:
    """Wait until the run's first step is done: on a busy machine its processes may take a minute to start."""
    done = lambda: events.exists() and b'"StepDone"' in events.read_bytes()  # noqa: E731
    until(done, told, running=lambda: run.poll() is None, within=100.0, pause=0.1)


@pytest.mark.slow
@needs_prometheus
def test_a_prometheus_scrapes_every_role_and_forgets_them_with_the_run(folder: Path) -> None:
    (folder / "train.py").write_text(script(10**6))
    (folder / "targets").mkdir()
    argv = [sys.executable, "-m", "rallypoint.cli", "run", "--workers", "2", "--servers", "2", "--aggregators", "1",
            "--metrics", "targets", "--folder", "job", "train.py"]  # fmt: skip
    log = (folder / "run.log").open("wb")
    run = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log, env={**os.environ, "COLUMNS": "200"})
    try:
        with prometheus(folder) as asked:
            everybody = {"coordinator", "server0", "server1", "aggregator0", "worker0", "worker1"}
            told = lambda: (folder / "run.log").read_text()  # noqa: E731
            begun(folder / "job" / "events.jsonl", run, told)
            until(lambda: {name for name, up in asked("up").items() if up} == everybody, told)
            until(lambda: asked("rallypoint_steps_total > 0"), told)
            until(lambda: asked("rallypoint_worker_step > 0").keys() == {"worker0", "worker1"}, told)
            until(lambda: asked('rallypoint_worker_phase_seconds_count{phase="backward"} > 0'), told)
            until(lambda: asked("rallypoint_server_version > 0").keys() == {"server0", "server1"}, told)
            until(lambda: asked("rallypoint_aggregator_taken_total > 0"), told)
            until(lambda: asked("rallypoint_network_sent_bytes_total > 0").keys() == everybody, told)
            assert asked("rallypoint_ready").keys() == everybody
            assert asked("rallypoint_job_running") == {"coordinator": 1.0}
            run.terminate()
            run.wait(60)
            assert list((folder / "targets").iterdir()) == []
            until(lambda: not asked("up"), told)
    finally:
        log.close()
        run.terminate()
        run.wait(60)
