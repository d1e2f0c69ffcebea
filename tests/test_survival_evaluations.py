"""A worker that is told to go in the middle of an evaluation: the evaluation is done, once, and no byte changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from test_survival import SCRIPT, STEPS, Cluster, alive, cluster_of, undisturbed_run

pytestmark = pytest.mark.programs

EVERY = 8
AT = 16  # the step after which an evaluation waits until the test lets it end
EVALUATION = f"""    @run.every({EVERY})
    def evaluate(step):
        if step == {AT}:
            evaluating = gate.with_name("evaluating.partial")
            evaluating.write_text(os.environ["RALLYPOINT_ID"])
            evaluating.replace(gate.with_name("evaluating"))
            while not gate.with_name("go").exists():
                time.sleep(0.005)
        return {{"loss": torch.nn.functional.mse_loss(model(data[:][0]), data[:][1]).item()}}

    for micro in run:"""


class EvaluatingCluster(Cluster):
    """Its lead evaluates every few steps; the evaluation of step AT waits for the file `go`."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        script = SCRIPT.replace("    for micro in run:", EVALUATION)
        assert script.count("run.every") == 1
        self.script.write_text(script)

    def evaluating(self) -> str:
        """The worker in the middle of that evaluation; waits for it."""
        self.open(AT + 2)
        file = self.home / "evaluating"
        self.until(file.exists)
        return file.read_text()

    def evaluated_by(self, at: int = AT) -> list[str]:
        """The workers that have got the lease of this step, one after the other."""
        said = [event["text"] for event in self.events("Say")]
        return [text.rpartition(" ")[2] for text in said if text.startswith(f"step {at} is evaluated by")]

    def standby_evaluates(self) -> psutil.Process:
        """The standby in the middle of that evaluation; waits for it."""
        self.open(EVERY + 2)
        self.until(lambda: len(self.evaluated_by()) == 1)  # before anybody may come to that step
        assert self.evaluating() == self.evaluated_by()[0]
        return self.processes()[self.evaluated_by()[0]]

    def go(self) -> None:
        (self.home / "go").touch()

    def figures(self) -> list[tuple[int, float]]:
        """(step, loss) of each evaluation. A coordinator may log again what the one before it had logged: `watch.state`
        takes the two for one, and so does this."""
        told = [(event["step"], event["values"]["loss"]) for event in self.events("Metrics")]
        return list(dict.fromkeys(told))


cluster = cluster_of(EvaluatingCluster)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EvaluatingCluster]:
    """A run that nothing happened to."""
    cluster = EvaluatingCluster(tmp_path_factory.mktemp("undisturbed"))
    cluster.go()
    with undisturbed_run(cluster):
        yield cluster


@pytest.mark.slow
def test_a_worker_that_is_told_to_go_in_the_middle_of_an_evaluation_ends_it_first(
    cluster: EvaluatingCluster, undisturbed: EvaluatingCluster
) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--heartbeat", "60")  # it may take as long to leave
    name = cluster.evaluating()
    victim = cluster.processes()[name]
    victim.terminate()
    other = "worker1" if name == "worker0" else "worker0"
    cluster.until(lambda: cluster.events("Members")[-1]["workers"] == [other])
    cluster.until_caught_up(AT + 2)  # the other one computes all replicas
    assert alive(victim)
    cluster.go()
    cluster.until(lambda: not alive(victim))
    cluster.ends(undisturbed.hash)
    assert f"{name} has left" in cluster.output
    assert "starting another" not in cluster.output
    assert "Traceback" not in cluster.output
    assert sorted(cluster.figures()) == undisturbed.figures()
    assert [step for step, _ in undisturbed.figures()] == list(range(EVERY, STEPS + 1, EVERY))


@pytest.mark.slow
def test_a_standby_evaluates_while_workers_train_and_if_it_is_killed_another_does(
    cluster: EvaluatingCluster, undisturbed: EvaluatingCluster
) -> None:
    cluster.run("--workers", "2", "--standby", "2", "--servers", "2")
    victim = cluster.standby_evaluates()
    cluster.until_caught_up(AT + 2)  # the others train meanwhile
    (cluster.home / "evaluating").unlink()
    victim.kill()
    cluster.until(lambda: len(cluster.evaluated_by()) == 2)
    assert cluster.evaluating() == cluster.evaluated_by()[1]
    cluster.open(STEPS)
    cluster.go()
    assert cluster.ended() == 0, cluster.output
    assert cluster.hash == undisturbed.hash
    assert sorted(cluster.figures()) == undisturbed.figures()


@pytest.mark.slow
def test_the_server_that_keeps_the_version_is_killed_while_a_standby_evaluates(
    cluster: EvaluatingCluster, undisturbed: EvaluatingCluster
) -> None:
    cluster.run("--workers", "2", "--standby", "2", "--servers", "2", "--replication", "2")
    victim = cluster.standby_evaluates()
    cluster.until_caught_up(AT + 2)
    cluster.until(lambda: cluster.members["exposed"] == 0)
    (cluster.home / "evaluating").unlink()
    cluster.processes()["server0"].kill()
    victim.kill()  # the next one gets the version from the backup
    cluster.until(lambda: len(cluster.evaluated_by()) == 2)
    assert cluster.evaluating() == cluster.evaluated_by()[1]
    cluster.go()
    cluster.ends(undisturbed.hash)
    assert sorted(cluster.figures()) == undisturbed.figures()
