"""A worker that computes wrong is found, what it sent is not applied, and the bytes are those of honest workers."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rallypoint.core.cluster.terms import Terms
from rallypoint.testing.processes import ClusterFailed, ProcessCluster
from support.wrong import KINDS

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import wrong_workers.py by name

from wrong_workers import train


def run(folder: Path, wrong: dict[str, str], settings: dict[str, Any], *, workers: int = 3) -> list[str]:
    """Train with so many workers, patiently; return the weights' hash on each."""
    terms = Terms(workers_start=workers, workers_max=workers, servers=2, heartbeat=60.0)
    with ProcessCluster(workers, 2, terms=terms, folder=str(folder)) as cluster:
        return cluster.run(train, wrong, 3, settings)


@cache
def honest() -> str:
    with ProcessCluster(1, 1) as cluster:
        return str(cluster.run(train, {}, 0, {"audit.share": 0.0})[0])


def said(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["type"] == "Say" and event["text"].startswith("audit")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_computes_wrong_is_drained_and_changes_no_byte(kind: str, tmp_path: Path) -> None:
    first, _, third = run(tmp_path, {"worker1": kind}, {})  # nobody waits for the one that was drained
    assert first == third == honest()
    assert any("agree, and worker1 on " in text and "has computed something else" in text for text in said(tmp_path))
    assert not any("worker0 on" in text.partition(" agree")[2] for text in said(tmp_path)), "nobody else is blamed"
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert any(event["type"] == "AuditFound" and event["others"] == ["worker1"] for event in events)


def test_honest_workers_agree_and_nothing_is_said(tmp_path: Path) -> None:
    assert run(tmp_path, {}, {"network.window": 1, "network.hold_bytes": 256}) == [honest()] * 3
    assert said(tmp_path) == []


@pytest.mark.some("two workers")
@pytest.mark.parametrize(("workers", "wrong", "settings", "sentence"), [
    (2, {"worker1": "bit"}, {}, r"step 3, .*nobody can decide|nobody can decide step 3"),
    (3, {"worker1": "bit", "worker2": "scale"}, {}, "have each computed something else for step 3"),
    (3, {"worker1": "scale"}, {"audit.action": "stop"}, r"worker1 on \S+ has computed something else"),
], ids=["two workers", "three with three results", "stop"])  # fmt: skip
def test_where_nobody_can_decide_or_with_stop_the_job_ends_with_a_sentence(
    workers: int, wrong: dict[str, str], settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ClusterFailed, match=sentence):
        run(tmp_path, wrong, settings, workers=workers)


@pytest.mark.slow
def test_with_tell_the_job_goes_on_and_says_it(tmp_path: Path) -> None:
    assert run(tmp_path, {"worker1": "bit"}, {"audit.action": "tell"}) == [honest()] * 3
    assert sum("has computed something else" in text for text in said(tmp_path)) > 2, "at each step"
