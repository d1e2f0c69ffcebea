"""The examples as whole programs: the lines that a user changes, both launchers, killed servers and workers."""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.beside import until
from support.programs import Program, run_program

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ENV = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
PATIENCE_S = 200.0
KILLED = """
import os, pathlib, time, torch
import rallypoint.bridges.ddp as servers
state = servers.join()
for number in range(400):
    values = torch.full((3000,), float(state.rank + number))
    state.reducer.sum(values).wait()
    assert float(values[-1]) == 2 * number + 1, number
    pathlib.Path(f"at-{state.rank}").write_text(str(number))
    while number == 100 and not pathlib.Path("go").exists():
        time.sleep(0.01)
print(f"rank {state.rank} has all sums", flush=True)
"""
COLLECTIVES = """
import pathlib, time, torch
import torch.distributed as dist
import rallypoint.bridges.c10d
dist.init_process_group("rallypoint")
rank = dist.get_rank()
for number in range(400):
    values = torch.full((3000,), float(rank + number))
    dist.all_reduce(values)
    dist.broadcast(values, number % 2)
    parts = [torch.zeros(3000) for _ in range(2)]
    dist.all_gather(parts, values)
    dist.barrier()
    assert float(parts[1 - rank][-1]) == 2 * number + 1, number
    pathlib.Path(f"at-{rank}").write_text(str(number))
    while number == 100 and rank == 0 and not pathlib.Path("go").exists():
        time.sleep(0.01)
print(f"rank {rank} has all sums", flush=True)
"""


@pytest.mark.parametrize(("before", "after", "added", "removed"), [
    ("ddp_torch.py", "ddp_rallypoint.py", 3, 0), ("fsdp_torch.py", "fsdp_rallypoint.py", 2, 1),
], ids=["ddp", "fsdp"])  # fmt: skip
def test_an_example_is_the_plain_one_with_so_many_lines_changed(
    before: str, after: str, added: int, removed: int
) -> None:
    """Of code: comments do not count."""
    texts = [_code(EXAMPLES / name) for name in (before, after)]
    lines = list(difflib.ndiff(*texts))
    assert len([line for line in lines if line.startswith("+ ")]) == added, lines
    assert len([line for line in lines if line.startswith("- ")]) == removed, lines


def _code(path: Path) -> list[str]:
    text = re.sub(r'^""".*?"""', "", path.read_text(), flags=re.DOTALL)
    return [line for line in re.sub(r"  #.*", "", text).splitlines() if line.strip()]


def _hashes(text: str) -> set[str]:
    found = re.findall(r"rank \d: (\w{16})", text)
    assert len(found) == 2, text
    return set(found)


def _run(tmp_path: Path, *arguments: str, timeout: float = PATIENCE_S) -> tuple[int, str]:
    return run_program(
        ["-m", "rallypoint.cli", "run", "--workers", "2", "--servers", "2", *arguments], tmp_path / "out", env=ENV,
        cwd=tmp_path, timeout=timeout,
    )  # fmt: skip


def _torchrun(tmp_path: Path, script: str, **more: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
        cwd=tmp_path, env={**ENV, "TMPDIR": str(tmp_path), **more}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_example_ends_with_gloo_s_bytes_under_both_launchers(kind: str, tmp_path: Path) -> None:
    status, plain = _torchrun(tmp_path, str(EXAMPLES / f"{kind}_torch.py"))
    assert status == 0, plain
    script = str(EXAMPLES / f"{kind}_rallypoint.py")
    for status, text in (_run(tmp_path, "--replication", "2", script), _torchrun(tmp_path, script)):
        assert status == 0, text
        assert _hashes(text) == _hashes(plain), text


class Killed:
    """A program that makes sums, held at sum 100 until `go`."""

    def __init__(self, folder: Path, script: str = KILLED) -> None:
        self.folder = folder
        (folder / "train.py").write_text(script)
        self.program = Program(
            ["-m", "rallypoint.cli", "run", "--workers", "2", "--servers", "2", "--replication", "2", "train.py"],
            folder / "out", ENV, folder,
        )  # fmt: skip

    def said(self) -> str:
        return (self.folder / "out").read_text()

    def until_held(self) -> None:
        running = lambda: self.program.poll() is None  # noqa: E731
        until(lambda: [self._at(0), self._at(1)] == ["100"] * 2, self.said, running=running, within=PATIENCE_S)

    def _at(self, rank: int) -> str:
        file = self.folder / f"at-{rank}"
        return file.read_text() if file.exists() else ""

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send this signal to the process that the launcher has given this name."""
        for child in psutil.Process(self.program.pid).children(recursive=True):
            if child.name() == name:
                child.send_signal(number)
                return
        raise AssertionError(f"no {name}")

    def go_on(self) -> tuple[int, str]:
        (self.folder / "go").touch()
        status = self.program.wait(PATIENCE_S)
        return status, self.said()

    def close(self) -> None:
        self.program.kill()
        self.program.wait()


def killed_in(folder: Path, victim: str, script: str | None = None, number: int = signal.SIGKILL) -> tuple[int, str]:
    """How the run of a script ends of which a process is killed while its sums are held."""
    killed = Killed(folder) if script is None else Killed(folder, script)
    try:
        killed.until_held()
        killed.kill(victim, number)
        return killed.go_on()
    finally:
        killed.close()


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize(("victim", "script"), [("server0", None), ("coordinator", None), ("server0", COLLECTIVES)])
def test_a_killed_server_or_coordinator_costs_no_sum_with_replication(
    tmp_path: Path, victim: str, script: str | None
) -> None:
    status, text = killed_in(tmp_path, victim, script)
    assert status == 0, text
    assert "rank 0 has all sums" in text
    assert "rank 1 has all sums" in text
    assert f"{victim} was killed (SIGKILL)" in text


@pytest.mark.slow
@pytest.mark.programs
def test_a_killed_worker_ends_the_job_with_a_sentence_that_names_it(tmp_path: Path) -> None:
    status, text = killed_in(tmp_path, "worker1")
    assert status == 1, text
    assert "worker1 is gone, and this script's world is fixed: start all of it again" in text


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_who_waits_in_a_collective_for_a_worker_that_is_gone_ends_with_its_name(tmp_path: Path, number: int) -> None:
    status, text = killed_in(tmp_path, "worker1", COLLECTIVES, number)
    assert status == 1, text
    assert "worker1 is gone" in text
    if number == signal.SIGSTOP:  # its connections are open: nothing but this wakes who waits for it
        assert "(this script is ended in 30 s, unless it ends by itself)" in text


@pytest.mark.slow
@pytest.mark.programs
def test_a_closed_connection_that_comes_before_the_coordinators_word_is_explained_by_it(tmp_path: Path) -> None:
    killed = Killed(tmp_path, COLLECTIVES)
    try:
        killed.until_held()
        killed.kill("coordinator", signal.SIGSTOP)
        killed.kill("worker1")
        (tmp_path / "go").touch()
        time.sleep(1.0)  # rank 0 is at its next collective by now; the coordinator has not said yet who is gone
        killed.kill("coordinator", signal.SIGCONT)
        status, text = killed.go_on()
    finally:
        killed.close()
    assert status == 1, text
    assert "worker1 is gone, and this script's world is fixed" in text


EARLY_END = """
import torch
import torch.distributed as dist
import rallypoint.bridges.c10d
dist.init_process_group("rallypoint")
dist.all_reduce(torch.ones(100))
dist.barrier()
if dist.get_rank() == 0:
    dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.programs
def test_who_waits_in_gloo_for_a_script_that_has_ended_is_told_by_a_closed_connection(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EARLY_END)
    status, text = _run(tmp_path, "train.py")
    assert status == 1, text
    assert re.search("onnection (closed|reset) by peer", text), text  # whichever TCP says
