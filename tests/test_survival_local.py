"""Local steps under fire: a worker is killed in the middle of a round, a real run ends with the undisturbed bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from test_survival import SCRIPT, STEPS, Cluster, undisturbed_run

pytestmark = pytest.mark.programs

AT = 9  # the second step of a round
WAITING = """while micro.replica > 0 and micro.step >= int(gate.read_text()):
                gate.with_name(f"waiting-{micro.replica}-{micro.step}").touch()"""


class LocalCluster(Cluster):
    """Its workers make four steps between two synchronisations, and stop at the gate in the middle of a round."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        script = SCRIPT.replace(
            "while micro.replica > 0 and micro.step >= int(gate.read_text()):", WAITING
        ).replace("clip=0.5,", "clip=0.5, sync=rp.LocalSteps(steps=4, keep_inner=False),")
        assert script.count("LocalSteps") == script.count("touch()") == 1
        self.script.write_text(script)

    def until_in_round(self) -> None:
        """Until replica 1 waits in the middle of a round, a step of its own already made."""
        self.open(AT)
        self.until(lambda: self.home.joinpath(f"waiting-1-{AT}").exists())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A run that nothing happened to."""
    with undisturbed_run(LocalCluster(tmp_path_factory.mktemp("undisturbed"))) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_round_changes_no_byte(
    cluster: LocalCluster, undisturbed: LocalCluster
) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_in_round()
    cluster.processes()["worker1"].kill()
    cluster.open(STEPS)
    assert cluster.ended() == 0, cluster.output
    assert "worker1 was killed (SIGKILL): starting another" in cluster.output
    assert "Traceback" not in cluster.output
    assert cluster.hash == undisturbed.hash
    assert [event["step"] for event in cluster.events("StepDone")] == [3, 7, 11, 15, 19, 23]
