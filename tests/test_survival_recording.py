"""A run of real processes, of which some are killed, is recorded; every machine of it replays to the same effects."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.replay import recordings, replay, story, told
from test_survival import AT, STEPS, Cluster, cluster

__all__ = ["cluster"]  # the fixture

pytestmark = pytest.mark.slow  # starts whole programs


def test_what_killed_and_surviving_processes_recorded_replays_to_the_same_effects(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recordings"
    monkeypatch.setenv("RALLYPOINT_RECORD", str(folder))
    monkeypatch.setenv("RALLYPOINT_CHECK", "1")
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2")
    cluster.until_caught_up(AT)
    cluster.processes()["worker1"].kill()
    cluster.until(lambda: _is_replaced(cluster, "worker1", "workers"))
    cluster.until_caught_up(AT + 4)
    cluster.until(lambda: cluster.events("Members")[-1]["exposed"] == 0)  # every shard is on both
    cluster.processes()["server0"].kill()
    cluster.until(lambda: _is_replaced(cluster, "server0", "servers"))
    cluster.ends()
    assert cluster.output.count("was killed (SIGKILL): starting another") == 2, cluster.output

    replayed = [replay(path) for path in recordings([folder])]
    for machine in replayed:
        machine.check()
        assert machine.calls > 0
    names = [machine.name for machine in replayed]
    assert set(names) == {f"{role}{i}" for role in ("server", "worker") for i in range(3)} | {"coordinator"}
    stories = {machine.name: "\n".join(story(told(machine.path), 0)) for machine in replayed}
    assert "Publish(version=1)" in stories["server0"] + stories["server1"]
    assert f"Install(version={STEPS})" in "".join(_calls(replayed[names.index("worker0")].path))


def _is_replaced(cluster: Cluster, member: str, role: str) -> bool:
    """By another one, of another name."""
    here = cluster.events("Members")[-1][role]
    return len(here) == 2 and member not in here


def _calls(path: Path) -> list[str]:
    return [str(call.arguments) for call in told(path)]
