"""Workers that are groups of ranks, as whole programs: FSDP2, tensor and pipeline parallel, and deaths of any rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch
from safetensors.torch import load_file

from support.beside import until
from support.programs import Program

sys.path.insert(0, str(Path(__file__).parent))

from shapes_job import HELD_AT, MESHES

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).parent / "shapes_job.py"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "PYTHONPATH": str(ROOT / "src")}
PATIENCE_S = 180.0
RANKS = {"one": 1, "any": 1} | {shape: torch.Size(sizes).numel() for shape, (sizes, _) in MESHES.items()}
SHAPES = sorted(MESHES)


class Run:
    """A run of the job. At step HELD_AT its ranks wait for `open`."""

    def __init__(self, folder: Path, shape: str, workers: int, *options: str, stop: int | None = None) -> None:
        self.folder, self.out, self.shape = folder, folder / "out", shape
        self.out.mkdir(parents=True)
        cluster = ["--workers", str(workers), "--servers", "1", "--heartbeat", "60", "--ranks", str(RANKS[shape])]
        script = [str(JOB), shape, str(self.out), *([] if stop is None else [str(stop)])]
        self._start("run", *cluster, "--folder", str(folder / "run"), *options, *script)

    def _start(self, *arguments: str) -> None:
        self.program = Program(["-m", "rallypoint.cli", *arguments], self.folder / "output", ENV, self.folder)

    def goes_on(self, *options: str) -> None:
        """Resume the run that has ended, to its end."""
        self._start("resume", str(self.folder / "run"), *options)
        assert self.program.wait(PATIENCE_S) == 0, self.text()

    def until_held(self, *workers: str) -> None:
        """Wait until these workers have computed the steps before HELD_AT."""
        self._until(lambda: all(self.pid(worker, 0) for worker in workers) and self.steps_done() >= HELD_AT - 1)

    def pid(self, worker: str, rank: int) -> int:
        """The process of a rank; 0 before it has begun."""
        path = self.out / f"pid-{worker}-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def kill(self, member: str) -> None:
        """SIGKILL for the coordinator or a server."""
        children = psutil.Process(self.program.pid).children(recursive=True)
        (process,) = [child for child in children if child.name() == member]
        process.kill()

    def steps_done(self) -> int:
        """The last step that is done; -1: none."""
        log = self.folder / "run" / "events.jsonl"
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return max((event["step"] for event in events if event["type"] == "StepDone"), default=-1)

    def _until(self, true: object) -> None:
        until(lambda: self.program.poll() is not None or true(), PATIENCE_S)  # type: ignore[operator]
        assert self.program.poll() is None, self.text()

    def text(self) -> str:
        """What it has printed."""
        return (self.folder / "output").read_text()

    def ends(self) -> dict[str, set[str]]:
        """Open the gate, wait for the end: rank -> the fingerprints of what that rank of every worker holds."""
        (self.out / "open").touch()
        assert self.program.wait(PATIENCE_S) == 0, self.text()
        found: dict[str, set[str]] = {}
        for path in self.out.glob("worker*"):
            found.setdefault(path.name.partition("-")[2], set()).add(path.read_text())
        assert found, self.text()
        assert all(len(of_rank) == 1 for of_rank in found.values()), found
        return found

    def exported(self) -> dict[str, torch.Tensor]:
        """The whole model at its last snapshot."""
        target = self.folder / "model.safetensors"
        export = ["-m", "rallypoint.cli", "export", str(self.folder / "run"), "--to", str(target)]
        assert Program(export, self.folder / "exporting", ENV, self.folder).wait(PATIENCE_S) == 0
        return load_file(target)


@cache
def undisturbed(shape: str) -> tuple[dict[str, set[str]], dict[str, torch.Tensor]]:
    """The job on one worker of this shape: what each rank holds at the end, and the whole model."""
    with TemporaryDirectory() as folder:
        run = Run(Path(folder), shape, 1)
        return run.ends(), run.exported()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_group_trains_the_same_model_as_one_process(shape: str) -> None:
    (_, alone), (_, spread) = undisturbed("one"), undisturbed(shape)
    assert spread.keys() == alone.keys() - ({"seen"} if "pp" in shape else set())
    for name, values in spread.items():
        torch.testing.assert_close(values, alone[name], rtol=0, atol=1e-6 * float(alone[name].abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_two_groups_end_with_the_bytes_of_one(shape: str, tmp_path: Path) -> None:
    assert Run(tmp_path, shape, 2).ends() == undisturbed(shape)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "shape"), [
    ("the leader", "fsdp"), ("the last rank", "tp"), ("the leader", "pp"), ("the last rank", "pp"),
    ("the leader", "tp-pp"), ("the last rank", "fsdp-tp"),
])  # fmt: skip
def test_a_killed_rank_changes_no_byte(victim: str, shape: str, tmp_path: Path) -> None:
    run = Run(tmp_path, shape, 2)
    run.until_held("worker0", "worker1")
    rank = 0 if victim == "the leader" else RANKS[shape] - 1
    others = [run.pid("worker1", other) for other in range(RANKS[shape]) if other != rank]
    os.kill(run.pid("worker1", rank), signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others), PATIENCE_S)  # one failure domain
    assert run.ends() == undisturbed(shape)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("member", "shape"), [("coordinator", "fsdp"), ("server0", "tp"), ("server1", "pp")])
def test_a_killed_server_or_coordinator_changes_no_byte(member: str, shape: str, tmp_path: Path) -> None:
    run = Run(tmp_path, shape, 2, "--servers", "2", "--replication", "2")
    run.until_held("worker0", "worker1")
    run.kill(member)
    assert run.ends() == undisturbed(shape)[0]
    assert f"{member} was killed (SIGKILL): starting another" in run.text()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["fsdp", "tp-pp"])
def test_a_rank_stops_the_job_also_when_a_group_is_lost_before(shape: str, tmp_path: Path) -> None:
    short = Run(tmp_path / "short", shape, 1, "--set", "steps=8").ends()
    stopped = Run(tmp_path / "stopped", shape, 2, stop=7)
    stopped.until_held("worker0", "worker1")
    os.kill(stopped.pid("worker0", 1), signal.SIGKILL)
    assert stopped.ends() == short
    assert "enough" in stopped.text()
    assert stopped.steps_done() == 7


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 1), (1, 2)])
def test_a_job_goes_on_with_other_ranks_from_the_same_weights(first: int, then: int, tmp_path: Path) -> None:
    run = Run(tmp_path, "any", 1, "--ranks", str(first), "--set", "steps=4")
    run.ends()
    end = (run.out / f"whole-{first}-end").read_text()
    run.goes_on("--ranks", str(then), "--set", "steps=8")
    assert (run.out / f"whole-{then}-4").read_text() == end
    assert (run.out / f"whole-{then}-end").read_text() != end
