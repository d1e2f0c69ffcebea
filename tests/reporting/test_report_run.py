"""Reports of real runs: of one that stands still, one that was killed, one with half-written files."""

from __future__ import annotations

import os
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rallypoint.launch.folder import REPORTS, read_where
from rallypoint.launch.observing.reports import picture_of, write_report
from support.beside import until
from support.programs import Program

pytestmark = [pytest.mark.programs, pytest.mark.slow]

IN_ENVIRONMENT, IN_ARGUMENTS, IN_OVERRIDES, IN_WORDS = (f"pl4nted-{name}" for name in ("env", "argv", "url", "words"))
SCRIPT = f"""
import os, sys, torch, rallypoint as rp
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
print("\\x1b[2J raw:", os.environ["MY_API_KEY"], sys.argv[2], "token={IN_WORDS}", os.environ["RALLYPOINT_TOKEN"])
def computes_here(batch):
    return model(batch[0]).square().mean()
with rp.join() as job:
    for micro in job.train(model, data, replicas=2, batch=4, steps=10**9):
        with micro:
            micro.backward(computes_here(micro.batch))
"""


@contextmanager
def run_of(tmp_path: Path) -> Iterator[tuple[Program, Path]]:
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    argv = [
        "-m", "rallypoint.cli", "run", "--workers", "2", "--servers", "1", "--heartbeat", "60",
        "--snapshots", f"file://user:{IN_OVERRIDES}@host/run", "--folder", str(folder), str(script),
        "--api-key", IN_ARGUMENTS,
    ]  # fmt: skip
    program = Program(argv, tmp_path / "output", {**os.environ, "MY_API_KEY": IN_ENVIRONMENT}, tmp_path)
    try:
        until(lambda: b"StepDone" in events(folder), lambda: (tmp_path / "output").read_text())
        yield program, folder
    finally:
        children = psutil.Process(program.pid).children(recursive=True) if program.poll() is None else []
        program.kill()
        program.wait()
        psutil.wait_procs(children, 20)


def events(folder: Path) -> bytes:
    path = folder / "events.jsonl"
    return path.read_bytes() if path.exists() else b""


def parts_of(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def worker(folder: Path) -> psutil.Process:
    found = next(
        process.owner for process in picture_of(folder, ask=False).processes if process.owner.name == "worker1"
    )
    return psutil.Process(found.pid)


def test_a_stall_leaves_a_report_without_secrets_and_a_dead_run_has_one_too(tmp_path: Path) -> None:
    with run_of(tmp_path) as (program, folder):
        token = read_where(folder).token
        live = write_report(picture_of(folder, ask=True), tmp_path / "live")
        assert live.sentence.startswith("The run goes on after ")
        stacks = "".join(path.read_text() for path in (tmp_path / "live" / "stacks").iterdir())
        assert stacks.count("(most recent call first)") >= 4  # coordinator, server, workers: every thread
        assert "in coordinator" in stacks or "run_coordinator" in stacks

        stopped = worker(folder)
        stopped.send_signal(signal.SIGSTOP)
        until(lambda: list((folder / REPORTS).glob("stall-*.zip")) != [], lambda: (tmp_path / "output").read_text())
        parts = parts_of(next((folder / REPORTS).glob("stall-*.zip")))
        first = parts["report.txt"].partition("\n")[0]
        assert f"worker1 (process {stopped.pid} on " in first
        assert f"`kill -CONT {stopped.pid}` lets it go on" in first
        assert "script.py" in "".join(text for name, text in parts.items() if name.startswith("stacks/worker0"))
        assert "raw:" in parts["console.log"]
        assert '"replicas": 2' in parts["settings.json"]
        assert {"events.jsonl", "views.json", "versions.json"} <= parts.keys()
        done = events(folder).count(b"StepDone")
        stopped.send_signal(signal.SIGCONT)
        until(lambda: events(folder).count(b"StepDone") > done)

        program.send_signal(signal.SIGKILL)
        program.wait()
        until(lambda: not picture_of(folder, ask=False).running)
        dead = write_report(picture_of(folder, ask=True), tmp_path / "dead.zip")
        assert "was interrupted after " in dead.sentence
        everything = [
            *parts.values(), *parts_of(dead.path).values(), stacks, (tmp_path / "live/settings.json").read_text(),
        ]
        everything += [path.read_text() for path in (tmp_path / "live").glob("*.*")]
    for text in everything:
        for secret in (token, IN_ENVIRONMENT, IN_ARGUMENTS, IN_OVERRIDES, IN_WORDS, "\x1b"):
            assert secret not in text
    until(lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE)
    half_written(folder, tmp_path)


def half_written(folder: Path, tmp_path: Path) -> None:
    """Whatever was being written when the machine died: there is a report."""
    for name in ("events.jsonl", "run.json", "journal.sqlite", "journal.sqlite-wal"):
        path = folder / name
        if path.exists():
            path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    for path in (folder / "stacks").iterdir():
        path.write_bytes(path.read_bytes()[:10])
    (folder / "cluster.json").write_text("{")
    (folder / "console.log").unlink()
    (folder / "console.log").symlink_to("/etc/passwd")
    made = write_report(picture_of(folder, ask=True), tmp_path / "torn.zip")
    assert "was interrupted after " in made.sentence
    text = parts_of(made.path)
    assert "not read: " in text["report.txt"]
    assert "root:" not in "".join(text.values())
    os.truncate(folder / "events.jsonl", 0)
    assert "before its first step" in write_report(picture_of(folder, ask=True), tmp_path / "empty").sentence
