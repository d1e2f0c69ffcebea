"""A script that calls `rallypoint.join` under ``mpirun``: one cluster; what dies is started again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from gated import AT, ENV, PATIENCE_S, SCRIPT, alone, hash_of, named, steps_done, wait_until
from sshd import kill_all

pytestmark = [pytest.mark.slow, pytest.mark.programs, pytest.mark.timeout(600)]

RECOVERY = ("--mca", "orte_enable_recovery", "1")
LOOPBACK = ("--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo")


@contextmanager
def mpirun(folder: Path, temporary: Path, processes: int, **env: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The job under mpirun, with `temporary` in place of ``/tmp``; and the file with its output."""
    program = shutil.which("mpirun")
    if program is None or b"Open MPI" not in subprocess.run([program, "--version"], capture_output=True).stdout:
        pytest.skip("needs Open MPI's mpirun (Debian: openmpi-bin)")
    (folder / "train.py").write_text(SCRIPT)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    argv = [program, *root, "--oversubscribe", *LOOPBACK, *RECOVERY, "-n", str(processes), sys.executable, "train.py"]
    output = folder / "output"
    with output.open("w") as file:
        started = subprocess.Popen(
            [*argv, str(folder / "gate")], cwd=folder, env={**ENV, "TMPDIR": str(temporary), **env},
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield started, output
    finally:
        below = psutil.Process(started.pid).children(recursive=True) if started.poll() is None else []
        started.kill()
        started.wait()
        kill_all(below)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder of this test's own with a short name: sockets are made in it. Other tests' are not seen there."""
    with tempfile.TemporaryDirectory(prefix="mpi", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.mark.parametrize("shared", [False, True])
def test_mpirun_makes_one_cluster_in_which_deaths_change_no_byte(tmp_path: Path, temporary: Path, shared: bool) -> None:
    (tmp_path / "alone").mkdir()
    undisturbed = alone(tmp_path / "alone")
    env = {"RALLYPOINT_OPTIONS": f"--replication 2 --folder {tmp_path / 'run'}", "RALLYPOINT_SERVERS": "2"}
    if shared:
        env["RALLYPOINT_FOLDER"] = str(tmp_path / "shared")
    with mpirun(tmp_path, temporary, 3, **env) as (started, output):
        running = lambda: started.poll() is None  # noqa: E731
        wait_until(lambda: steps_done(tmp_path / "run") >= AT - 1, running, output.read_text)
        processes = named(psutil.Process(started.pid))
        assert sorted(processes) == ["coordinator", "server0", "server1", "worker0", "worker1", "worker2"]
        for name in ("worker1", "server1", "coordinator"):
            processes[name].kill()
        (tmp_path / "gate").touch()
        assert started.wait(PATIENCE_S) == 0, output.read_text()
        said = output.read_text()
    assert hash_of(said) == undisturbed
    for name in ("worker1", "server1", "coordinator"):
        assert f"{name} was killed (SIGKILL): starting another" in said
    assert not list(temporary.glob("rallypoint-*"))
    assert not shared or not list((tmp_path / "shared").iterdir())


def test_with_recovery_a_rank_that_is_killed_costs_no_byte(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "alone").mkdir()
    undisturbed = alone(tmp_path / "alone")
    env = {"RALLYPOINT_OPTIONS": f"--folder {tmp_path / 'run'}"}
    with mpirun(tmp_path, temporary, 3, **env) as (started, output):
        running = lambda: started.poll() is None  # noqa: E731
        wait_until(lambda: steps_done(tmp_path / "run") >= AT - 1, running, output.read_text)
        worker = named(psutil.Process(started.pid))["worker2"]
        psutil.Process(worker.ppid()).kill()  # its supervisor, and with it the worker
        assert psutil.wait_procs([worker], timeout=PATIENCE_S)[1] == []
        (tmp_path / "gate").touch()
        wait_until(lambda: "done: " in output.read_text(), lambda: True, output.read_text)
        started.wait(PATIENCE_S)
        said = output.read_text()
    assert hash_of(said) == undisturbed
    assert "starting another" not in said
