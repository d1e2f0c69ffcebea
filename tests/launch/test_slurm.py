"""Jobs of a real Slurm: the contract of a cluster within an allocation; a submitted job has the bytes of one machine,
also when it is run again and when a node's processes are gone."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gated import AT, SCRIPT, alone, hash_of, steps_done
from slurmd import CREDENTIAL_S, Slurm, slurm

from rallypoint.launch.engines.remote import RemoteProcess
from rallypoint.launch.engines.slurm import SlurmCluster
from rallypoint.launch.plan import Launch
from support.beside import until
from support.cluster_contract import ClusterContract, Started

pytestmark = [pytest.mark.slow, pytest.mark.programs, pytest.mark.timeout(600)]

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def made() -> Iterator[Slurm]:
    with slurm() as running:
        yield running


@pytest.fixture(scope="module")
def allocation(made: Slurm) -> Iterator[dict[str, str]]:
    """The environment within a job of both nodes."""
    done = subprocess.run(
        ["salloc", "--no-shell", "--nodes=2", "--ntasks=2"], env=made.env, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    job = re.findall(r"job allocation (\d+)", done.stderr)[-1]
    until(lambda: (job, "R") in made.jobs())
    yield {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    made.end_jobs()


class TestSlurmCluster(ClusterContract):
    @pytest.fixture
    def cluster(
        self, made: Slurm, allocation: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[SlurmCluster]:
        for name, value in {**made.env, **allocation}.items():
            monkeypatch.setenv(name, value)
        with SlurmCluster(Launch(worker=(), engine="slurm", folder=str(tmp_path / "run")), [].append) as cluster:
            yield cluster

    def test_processes_are_on_both_nodes_and_slurms_notices_do_not_end_them(
        self, running: SlurmCluster, made: Slurm, allocation: dict[str, str]
    ) -> None:
        code = "import os, time; print(os.environ['SLURMD_NODENAME'], flush=True); time.sleep(1000)"
        workers = [Started(running, code, name=f"worker{number}") for number in range(2)]
        assert {worker.line() for worker in workers} == {"n1", "n2"}
        made.run("scancel", "--signal=USR1", allocation["SLURM_JOB_ID"])
        later = Started(running, "print('later')", name="worker2")
        assert later.exit().status == 0
        assert [worker.handle.exit() for worker in workers] == [None, None]

    def test_a_step_that_is_cancelled_is_the_death_of_its_processes(self, running: SlurmCluster, made: Slurm) -> None:
        worker = Started(running, "import time; print('here', flush=True); time.sleep(1000)")
        worker.line()
        assert isinstance(worker.handle, RemoteProcess)
        node = worker.handle.host.name
        until(lambda: len(made.steps(node)) == 1)  # Slurm shows the steps of the test before for a while
        made.run("scancel", *made.steps(node))
        how = worker.exit()
        assert how.died
        assert how.reason.startswith(worker.handle.host.name)
        again = Started(running, "print('again')", name="worker2")
        assert again.exit().status == 0


# ---- a submitted job ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return alone(tmp_path_factory.mktemp("alone"))


class Submitted:
    """A job that `rallypoint slurm` has written and sbatch has taken."""

    def __init__(self, made: Slurm, folder: Path, *options: str) -> None:
        self.slurm, self.folder, self.gate = made, folder, folder / "gate"
        (folder / "train.py").write_text(SCRIPT)
        argv = [sys.executable, "-m", "rallypoint.cli", "slurm", "--servers", "2", "--workers", "3", *options]
        script = made.run(*argv, "--snapshot-steps", "4", "train.py", "gate", cwd=folder)
        (folder / "job.sbatch").write_text(script)
        self.id = made.run("sbatch", "--parsable", "job.sbatch", cwd=folder)

    def __enter__(self) -> Submitted:
        return self

    def __exit__(self, *_: object) -> None:
        self.slurm.end_jobs()

    def said(self) -> str:
        output = self.folder / f"train-{self.id}.out"
        return output.read_text() if output.exists() else ""

    def until_said(self, words: str, times: int = 1) -> None:
        self._until(lambda: self.said().count(words) >= times)

    def until_step(self, step: int) -> None:
        self._until(lambda: steps_done(self.folder / "runs" / f"slurm-{self.id}") >= step)

    def _until(self, happened: Callable[[], bool]) -> None:
        until(happened, lambda: (self.slurm.jobs(), self.said()), within=PATIENCE_S, pause=0.05)

    def until_it_runs_again(self) -> None:
        """Wait until it goes on. A job of two components would wait for minutes longer: Slurm is told to start it."""
        deadline, began = time.monotonic() + PATIENCE_S, time.monotonic()
        while "going on from step" not in self.said():
            assert time.monotonic() < deadline, (self.slurm.jobs(), self.said())
            time.sleep(1.0)
            if time.monotonic() - began > 2 * CREDENTIAL_S:  # (before, its nodes would refuse it as a replay)
                for job in [job for job, state in self.slurm.jobs() if state == "PD"]:
                    argv = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
                    subprocess.run(argv, env=self.slurm.env, timeout=120, check=False)  # (it may run by now)

    def ended(self) -> str:
        """Let the job end well. Returns its hash."""
        self.gate.touch()
        self.until_said("everything of this run")
        until(lambda: not any(job.startswith(self.id) for job, state in self.slurm.jobs() if state != "CG"))
        return hash_of(self.said())


@pytest.mark.parametrize("options", [[], ["--together"]], ids=["two components", "together"])
def test_a_job_that_is_run_again_has_the_bytes_of_one_machine(
    made: Slurm, tmp_path: Path, undisturbed: str, options: list[str]
) -> None:
    with Submitted(made, tmp_path, *options) as job:
        job.until_step(AT - 1)
        made.run("scancel", "--batch", "--signal=USR1", job.id)
        job.until_said("to go on from step")
        job.until_it_runs_again()
        assert job.ended() == undisturbed


def test_a_job_goes_on_when_a_nodes_processes_are_gone(made: Slurm, tmp_path: Path, undisturbed: str) -> None:
    with Submitted(made, tmp_path, "--replication", "2") as job:
        job.until_step(AT - 1)
        far_ends = made.far_ends()
        assert len(far_ends) == 2
        workers = max(far_ends, key=lambda process: len(process.children()))  # three; the others are servers
        workers.kill()
        job.until_said("starting another", times=3)
        assert job.ended() == undisturbed
