"""Rounds of local steps under kills: a worker's death costs no round, and a server's death changes no byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_survival import SCRIPT, STEPS, Cluster, cluster_of, undisturbed_of

pytestmark = pytest.mark.programs

AT = 9  # the second step of a round
WAITING = """while micro.replica > 0 and micro.step >= int(gate.read_text()):
                gate.with_name(f"waiting-{micro.replica}-{micro.step}").touch()"""
LOCAL = "clip=0.5, sync=rp.LocalSteps(steps=4, keep_inner=False),"
STAGGERED = """clip=0.5, sync=rp.LocalSteps(steps=4, delay=1), groups=(rp.Group(match=("2.*",), sync_every=2),),"""


class RoundsCluster(Cluster):
    """Staggered: its rounds take two steps. Each updates the last layer, every second round the first layer too."""

    def __init__(self, home: Path, sync: str = STAGGERED) -> None:
        script = SCRIPT.replace("while micro.replica > 0 and micro.step >= int(gate.read_text()):", WAITING)
        script = script.replace("clip=0.5,", sync)
        assert script.count("LocalSteps") == script.count("touch()") == 1
        super().__init__(home, script)

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


cluster = cluster_of(RoundsCluster)
undisturbed = undisturbed_of(RoundsCluster)
undisturbed_local = undisturbed_of(lambda home: RoundsCluster(home, LOCAL))


def worker_killed_in_round(cluster: RoundsCluster) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_in_round()
    cluster.processes()["worker1"].kill()
    cluster.ends()
    assert "worker1 was killed (SIGKILL): starting another" in cluster.output
    assert "Traceback" not in cluster.output


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_round_costs_no_round_and_no_contribution(cluster: RoundsCluster) -> None:
    worker_killed_in_round(cluster)
    cluster.check_rounds()


@pytest.mark.slow
def test_with_a_new_optimizer_in_each_round_that_changes_no_byte(
    cluster: RoundsCluster, undisturbed_local: RoundsCluster
) -> None:
    cluster.script.write_text(undisturbed_local.script.read_text())
    worker_killed_in_round(cluster)
    assert cluster.hash == undisturbed_local.hash
    assert [event["step"] for event in cluster.events("StepDone")] == [3, 7, 11, 15, 19, 23]


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_a_round_changes_no_byte(
    cluster: RoundsCluster, undisturbed: RoundsCluster
) -> None:
    """Workers compute again what only the dead server had: each replica goes back to the round's beginning."""
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2")
    cluster.until_in_round()
    cluster.until(lambda: cluster.events("Members")[-1]["exposed"] == 0)  # every shard is on both
    cluster.processes()["server0"].kill()
    cluster.ends(undisturbed.hash)
    assert "server0 was killed (SIGKILL): starting another" in cluster.output
    assert "going back" not in cluster.output
    assert "Traceback" not in cluster.output
    cluster.check_rounds()
