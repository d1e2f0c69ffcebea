"""Staggered rounds with a delay, under kills: a worker's death costs no round, a server's death changes no byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from test_survival import SCRIPT, STEPS, Cluster, undisturbed_run

pytestmark = pytest.mark.programs

AT = 9  # the second step of a round
WAITING = """while micro.replica > 0 and micro.step >= int(gate.read_text()):
                gate.with_name(f"waiting-{micro.replica}-{micro.step}").touch()"""
SYNC = """clip=0.5, sync=rp.LocalSteps(steps=4, delay=1), groups=(rp.Group(match=("2.*",), sync_every=2),),"""


class StaggeredCluster(Cluster):
    """Its rounds take two steps. Each round updates the last layer, every second round the first layer too."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        script = SCRIPT.replace("while micro.replica > 0 and micro.step >= int(gate.read_text()):", WAITING)
        script = script.replace("clip=0.5,", SYNC)
        assert script.count("LocalSteps") == script.count("touch()") == 1
        self.script.write_text(script)

    def until_in_round(self) -> None:
        """Until replica 1 waits in the middle of a round, after a local step."""
        self.open(AT)
        self.until(lambda: self.home.joinpath(f"waiting-1-{AT}").exists())

    def check_rounds(self) -> None:
        """Every round ended with all three replicas."""
        assert [event["step"] for event in self.events("StepDone")] == [*range(1, STEPS, 2)]
        assert {(event["step"], event["replicas"]) for event in self.events("Applied")} == {
            (round, 3) for round in range(STEPS // 2)
        }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StaggeredCluster]:
    cluster = StaggeredCluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StaggeredCluster]:
    """A run that nothing happened to."""
    with undisturbed_run(StaggeredCluster(tmp_path_factory.mktemp("undisturbed"))) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_round_costs_no_round_and_no_contribution(cluster: StaggeredCluster) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_in_round()
    cluster.processes()["worker1"].kill()
    cluster.open(STEPS)
    assert cluster.ended() == 0, cluster.output
    assert "worker1 was killed (SIGKILL): starting another" in cluster.output
    assert "Traceback" not in cluster.output
    cluster.check_rounds()


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_a_round_changes_no_byte(
    cluster: StaggeredCluster, undisturbed: StaggeredCluster
) -> None:
    """Workers compute again what only the dead server had: each replica goes back to the round's beginning."""
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2")
    cluster.until_in_round()
    cluster.until(lambda: cluster.events("Members")[-1]["exposed"] == 0)  # every shard is on both
    cluster.processes()["server0"].kill()
    cluster.open(STEPS)
    assert cluster.ended() == 0, cluster.output
    assert "server0 was killed (SIGKILL): starting another" in cluster.output
    assert "going back" not in cluster.output
    assert "Traceback" not in cluster.output
    assert cluster.hash == undisturbed.hash
    cluster.check_rounds()
