"""``rallypoint run --hosts`` on two hosts of a test network: the bytes of one machine, also when a host's processes are
killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sshd import Shell, shell

import rallypoint
from rallypoint.testing import netlab
from rallypoint.testing.netlab import Netlab, NetlabUnavailable
from rallypoint.testing.programs import run_program

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.programs, pytest.mark.timeout(300)]

PATIENCE_S = 90.0
STEPS, AT = 60, 10  # AT: the step that is not left before the gate is open
SCRIPT = f"""
import pathlib, sys, time, torch, rallypoint as rp
from rallypoint.worker.tensors import weights_hash
gate = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Dropout(0.2), torch.nn.Linear(30, 3))
data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 3))
with rp.join() as job:
    run = job.train(model, data, replicas=4, batch=4, steps={STEPS}, clip=0.5, optimizer=rp.AdamW(lr=1e-2))
    for micro in run:
        with micro:
            while micro.step >= {AT} and not gate.exists():
                time.sleep(0.005)
                model[0].weight.sum()
            micro.backward(torch.nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1]))
    if run.lead:
        print("sha256", weights_hash(model), flush=True)
"""
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "PYTHONPATH": str(Path(rallypoint.__file__).parents[1])}


@pytest.fixture(scope="module")
def lab() -> Iterator[Netlab]:
    try:
        netlab.require()
    except NetlabUnavailable as unavailable:
        pytest.skip(str(unavailable))
    with Netlab(hosts=2) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(lab: Netlab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, str]]:
    """Two hosts with sshd, and the file that names them."""
    with shell(tmp_path_factory.mktemp("ssh")) as shells:
        lines = [shells.line(shells.serve(host.address, host.popen)) for host in lab.hosts]
        file = shells.folder / "hosts.txt"
        file.write_text("\n".join(lines))
        yield shells, str(file)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the job in one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    status, text = run_program(["train.py", str(folder)], folder / "output", env=ENV, cwd=folder)
    assert status == 0, text
    return _hash(text)


def _hash(text: str) -> str:
    return re.findall(r"sha256 (\w+)", text)[-1]


class Launched:
    """``rallypoint run --hosts`` on the first host."""

    def __init__(self, lab: Netlab, hosts: tuple[Shell, str], folder: Path, *options: str) -> None:
        self.folder, self.gate, self.output = folder, folder / "gate", folder / "output"
        (folder / "train.py").write_text(SCRIPT)
        shells, file = hosts
        run = ["run", "--hosts", file, "--ssh", shells.ssh, "--folder", "run", "--workers", "4", "--servers", "2"]
        with self.output.open("w") as output:
            self.process = lab.hosts[0].popen(
                [sys.executable, "-m", "rallypoint.cli", *run, *options, "train.py", str(self.gate)],
                cwd=folder, env=ENV, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.output.read_text()

    def until_step(self, step: int) -> None:
        """Wait until the coordinator has counted this step as done."""
        log = self.folder / "run" / "events.jsonl"
        deadline = time.monotonic() + PATIENCE_S
        while not (log.exists() and self._steps(log) >= step):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def _steps(self, log: Path) -> int:
        events = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        return max((event["step"] for event in events if event["type"] == "StepDone"), default=-1)

    def ended(self) -> str:
        """Let the job end well. Returns its hash."""
        self.gate.touch()
        assert self.process.wait(PATIENCE_S) == 0, self.said()
        return _hash(self.said())


def test_two_hosts_give_the_bytes_of_one_machine_also_when_the_coordinator_dies(
    lab: Netlab, hosts: tuple[Shell, str], tmp_path: Path, undisturbed: str
) -> None:
    with Launched(lab, hosts, tmp_path) as launched:
        launched.until_step(AT - 1)
        on_each = [_named(psutil.Process(daemon.pid)) for daemon in hosts[0].started]
        assert [len(names) for names in on_each] == [4, 3]
        assert "coordinator" in on_each[0]
        assert {name[:6] for name in on_each[1]} == {"server", "worker"}
        on_each[0]["coordinator"].kill()
        assert launched.ended() == undisturbed
        assert "coordinator was killed (SIGKILL): starting another" in launched.said()
        assert "is left out" not in launched.said()


def test_a_host_whose_processes_are_killed_changes_no_byte(
    lab: Netlab, hosts: tuple[Shell, str], tmp_path: Path, undisturbed: str
) -> None:
    with Launched(lab, hosts, tmp_path, "--replication", "2") as launched:
        launched.until_step(AT - 1)
        victims = psutil.Process(hosts[0].started[1].pid).children(recursive=True)
        assert len(victims) >= 4
        for victim in victims:
            if victim.is_running():
                victim.kill()
        assert launched.ended() == undisturbed
        assert "was killed (SIGHUP): root@10.77.0.2: " in launched.said()


def _named(daemon: psutil.Process) -> dict[str, psutil.Process]:
    """A run's processes below an sshd, by their names."""
    found = {process.environ().get("RALLYPOINT_ID", ""): process for process in daemon.children(recursive=True)}
    return {name: process for name, process in found.items() if name}
