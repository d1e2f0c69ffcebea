"""A run whose evaluations decide ends with the same version, bytes and best snapshot, whoever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_survival import SCRIPT, STEPS, cluster_of
from test_survival_evaluations import EVALUATION as EVALUATED
from test_survival_evaluations import EVERY as OTHER_EVERY
from test_survival_evaluations import EvaluatingCluster

pytestmark = pytest.mark.programs

EVERY = 4
ENDS = 20  # those of 8, 12 and 16 are no improvement by more than 10
EVALUATION = '    run.stop_when("loss", patience=3, min_delta=10.0)\n' + EVALUATED.replace(
    f"run.every({OTHER_EVERY})", f"run.every({EVERY})"
)
PLATEAU = (
    'evaluation=rp.Evaluation(plateau=rp.ReduceOnPlateau("loss", factor=0.5, patience=0, threshold=1.0)), clip=0.5'
)


class DecidingCluster(EvaluatingCluster):
    """Its evaluations decide when it ends, and with which rates; the evaluation of step AT waits for the file `go`."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        script = SCRIPT.replace("    for micro in run:", EVALUATION).replace("clip=0.5", PLATEAU)
        assert script.count("plateau") == script.count("stop_when") == script.count(f"run.every({EVERY})") == 1
        self.script.write_text(script)
        self.open(STEPS)

    def outcome(self) -> tuple[str, bytes, list[tuple[int, float]]]:
        """Of the job, at its end: the weights' hash, the best snapshot, and all figures."""
        assert self.ended() == 0, self.output
        assert [event["stopped_at"] for event in self.events("Finished")] == [ENDS]
        best = self.home / "best.safetensors"
        assert self.ask("export", str(self.folder), "--best", "--to", str(best)) == 0
        assert f"of step-{EVERY:08d}" in self.answer.read_text()
        return self.hash, best.read_bytes(), sorted(self.figures())


KEEP = ("--servers", "2", "--set", "evaluation.keep_best=loss", "--set", "evaluation.best_is=max", "--keep-last", "1")


cluster = cluster_of(DecidingCluster)


@pytest.mark.slow
def test_who_evaluates_is_killed_and_then_the_coordinator_and_the_same_is_decided(
    cluster: DecidingCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = DecidingCluster(tmp_path_factory.mktemp("undisturbed"))
    try:
        alone.go()
        alone.run("--workers", "1", *KEEP)
        wanted = alone.outcome()
    finally:
        alone.close()

    cluster.run("--workers", "2", "--standby", "2", *KEEP)
    file = cluster.home / "evaluating"
    cluster.until(file.exists)
    victim = cluster.processes()[file.read_text()]
    file.unlink()
    victim.kill()
    cluster.until(file.exists)  # another one evaluates
    cluster.processes()["coordinator"].kill()
    cluster.go()
    assert cluster.outcome() == wanted
