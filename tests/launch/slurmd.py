"""A Slurm of a test's own: munged, slurmctld and slurmds, with their files in a temporary folder, on loopback."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import rallypoint
from support.beside import until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "salloc", "srun", "scancel", "scontrol", "squeue", "sinfo")
CREDENTIAL_S = 5  # for so long Slurm does not run a job again that it has requeued
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire={credential}
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, slots=True)
class Slurm:
    """A running Slurm. `env` leads commands to it, and processes that it starts to this package."""

    folder: Path
    nodes: tuple[str, ...]
    env: dict[str, str]

    def run(self, *argv: str, **more: Any) -> str:
        """Run one of Slurm's commands to its end; returns what it prints."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=120, check=False, **more)
        assert done.returncode == 0, (argv, done.stdout, done.stderr)
        return done.stdout.strip()

    def jobs(self) -> list[tuple[str, str]]:
        """Every job (of a heterogeneous one, each component), and its state."""
        lines = self.run("squeue", "--noheader", "--format=%i %t").splitlines()
        return [(line.split()[0], line.split()[1]) for line in lines]

    def steps(self, node: str) -> list[str]:
        """The steps of all jobs that have this node and no other."""
        lines = [line.split() for line in self.run("squeue", "--steps", "--noheader", "--format=%i %N").splitlines()]
        return [step for step, *nodes in lines if nodes == [node]]

    def far_ends(self) -> list[psutil.Process]:
        """What starts and ends the processes of all jobs: one on each node of each component."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = "rallypoint.launch.engines.far_end" in process.cmdline() and process.name() != "srun"
                if ours and process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _steps(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith("slurmstepd"):
                    found += [process] * (process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"])
            except psutil.Error:
                continue
        return found

    def end_jobs(self) -> None:
        """Cancel every job, and wait until nothing of them runs."""
        for job, _ in self.jobs():
            if "+" not in job or job.endswith("+0"):
                subprocess.run(["scancel", job.removesuffix("+0")], env=self.env, timeout=120, check=False)
        try:
            until(lambda: not self._steps())
        finally:
            for process in self._steps():
                process.kill()


@contextmanager
def slurm(nodes: Sequence[str] = ("n1", "n2")) -> Iterator[Slurm]:
    """While in the body, a Slurm of so many nodes, all on this machine. Skips the test where there is none."""
    missing = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Slurm (Debian: slurm-wlm, munge); not here: {', '.join(missing) or 'root'}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rp-slurm-", ignore_cleanup_errors=True)))
        (folder / "state").mkdir()
        made = Slurm(folder, tuple(nodes), _environment(folder))
        _configure(made)
        socket_file = folder / "munge.sock"
        _start(stack, made, "munged", "--force", "--foreground", f"--socket={socket_file}",
               *(f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "seed", "log")))  # fmt: skip
        until(socket_file.exists)
        _start(stack, made, "slurmctld", "-D", "-c")
        for node in nodes:
            _start(stack, made, "slurmd", "-D", "-N", node)
        stack.callback(made.end_jobs)
        until(lambda: _idle(made) == len(nodes))
        yield made


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RALLYPOINT"))}
    path = f"{Path(sys.executable).parent}:{_PATH}"
    package = str(Path(rallypoint.__file__).parents[1])
    return {
        **kept, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path, "PYTHONPATH": package, "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }  # fmt: skip


def _configure(made: Slurm) -> None:
    key = made.folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + len(made.nodes))]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    lines = [
        f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=4000 State=UNKNOWN"
        for node, port in zip(made.nodes, ports[1:], strict=True)
    ]
    text = _CONF.format(folder=made.folder, credential=CREDENTIAL_S, ports=ports, nodes="\n".join(lines))
    (made.folder / "slurm.conf").write_text(text)


def _start(stack: ExitStack, made: Slurm, *argv: str) -> None:
    with (made.folder / f"{argv[0]}.out").open("a") as output:
        process = subprocess.Popen(argv, env=made.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)


def _idle(made: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%N %t"], env=made.env, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    return sum(line.endswith(" idle") for line in done.stdout.splitlines())
