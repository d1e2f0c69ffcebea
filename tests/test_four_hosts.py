"""Roles that are started by hand on four hosts: whatever moves or dies, the bytes are those of one machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.launch.access import token_for
from rallypoint.net.handshake import role_token
from support.beside import until
from support.netlab import Host, Netlab
from support.programs import run_program

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.programs]

STEPS, PATIENCE_S = 60, 120.0
SCRIPT = """
import os, pathlib, time
import torch, rallypoint as rp
from rallypoint.worker.tensors import weights_hash
home = pathlib.Path(__file__).parent
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Dropout(0.2), torch.nn.Linear(30, 3))
data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 3))
with rp.join() as job:
    for micro in job.train(model, data, replicas=4, batch=4, steps=60, clip=0.5, network=rp.Network(shard_bytes=256)):
        with micro:
            while (home / "gate").exists() and micro.step >= int((home / "gate").read_text()):
                time.sleep(0.01)
                model[0].weight.sum()
            print("step", micro.step, flush=True)
            micro.backward(torch.nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1]))
print("sha256", weights_hash(model), flush=True)
"""


class ByHand:
    """Four hosts with one shared folder: one for the coordinator, two for servers, one for workers."""

    def __init__(self, lab: Netlab, home: Path, tls: bool) -> None:
        self.lab, self.home = lab, home
        self.first, self.servers, self.workers = lab.hosts[0], lab.hosts[1:3], lab.hosts[3]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.places = f"{self.first.address}:4700,{self.servers[1].address}:4700"
        (home / "train.py").write_text(SCRIPT)
        (home / "job.token").write_text(token := token_for("", ""))
        for role in ("server", "worker"):
            (home / f"{role}.token").write_text(role_token(token, role))
        self.tls = ["--tls", str(home / "certs")] if tls else []
        if tls:
            status, said = run_program(
                ["-m", "rallypoint.cli", "token", "--tls", str(home / "certs")], home / "certs.out", env=os.environ
            )
            assert status == 0, said

    def start(self, name: str, role: str, host: Host, *arguments: str) -> None:
        token = "job" if role == "coordinator" else role
        where = [] if role == "coordinator" else ["--coordinator", self.places, "--id", name]
        argv = [
            sys.executable, "-m", "rallypoint.cli", role, "--token-file", str(self.home / f"{token}.token"),
            *where, *self.tls, *arguments,
        ]  # fmt: skip
        with (self.home / f"{name}.out").open("wb") as out:
            self.running[name] = host.popen(argv, stdout=out, stderr=out, cwd=self.home)

    def coordinate(self, name: str, host: Host) -> None:
        self.start(
            name, "coordinator", host, "--bind", f"{host.address}:4700", "--folder", str(self.home / "run"),
            "--workers", "2", "--servers", "2", "--replication", "2", "--heartbeat", "2",
        )  # fmt: skip

    def serve(self, name: str, host: Host) -> None:
        self.start(name, "server", host, "--bind", "0.0.0.0:0")

    def work(self, name: str) -> None:
        self.start(name, "worker", self.workers, "--", sys.executable, "train.py")

    def said(self, name: str) -> str:
        return (self.home / f"{name}.out").read_text()

    def until(self, name: str, pattern: str) -> None:
        """Wait until this program has printed the pattern."""
        until(
            lambda: bool(re.search(pattern, self.said(name))), lambda: f"{name} printed only {self.said(name)!r}",
            running=lambda: self.running[name].poll() is None, within=PATIENCE_S, pause=0.02,
        )  # fmt: skip

    def open(self, step: int) -> None:
        """Let workers go on up to this step."""
        (self.home / "opened").write_text(str(step))
        (self.home / "opened").rename(self.home / "gate")

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()


@pytest.fixture(params=[False, True], ids=["token", "tls"])
def by_hand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ByHand]:
    with Netlab(hosts=4) as lab:
        yield ByHand(lab, tmp_path, request.param)


def test_a_coordinator_that_moves_and_kills_change_no_byte(by_hand: ByHand) -> None:
    by_hand.open(20)
    by_hand.serve("server0", by_hand.servers[0])  # members first: the order is free
    by_hand.work("worker0")
    by_hand.coordinate("coordinator0", by_hand.first)
    by_hand.serve("server1", by_hand.servers[1])
    by_hand.work("worker1")
    for name in ("worker0", "worker1"):
        by_hand.until(name, r"\nstep 19\n")

    by_hand.kill("coordinator0")
    by_hand.coordinate("coordinator1", by_hand.servers[1])
    by_hand.until("coordinator1", "the coordinator listens at")
    by_hand.open(40)
    for name in ("worker0", "worker1"):
        by_hand.until(name, r"\nstep 39\n")

    by_hand.kill("worker0")  # now the coordinator has to act
    by_hand.work("worker2")
    by_hand.until("worker2", "has joined the job")
    by_hand.kill("server0")
    by_hand.serve("server2", by_hand.servers[0])
    by_hand.until("server2", "has joined the job")
    by_hand.open(STEPS)
    for name, process in by_hand.running.items():
        assert process.wait(PATIENCE_S) == 0, f"{name}: {by_hand.said(name)}"

    assert f"done: {STEPS} steps" in by_hand.said("coordinator1")
    found = re.findall(r"(?m)^sha256 (\w+)", by_hand.said("worker1") + by_hand.said("worker2"))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    (by_hand.home / "gate").unlink()
    status, alone = run_program([str(by_hand.home / "train.py")], by_hand.home / "alone.out", env=env)
    assert status == 0, alone
    assert set(found) == set(re.findall(r"(?m)^sha256 (\w+)", alone))
    assert len(found) == 2


def test_a_server_that_no_other_host_could_reach_is_refused_before_it_joins(by_hand: ByHand) -> None:
    host = by_hand.servers[0]
    by_hand.start("server0", "server", host)
    assert by_hand.running.pop("server0").wait(PATIENCE_S) == 1
    where = f"the coordinator is at {by_hand.first.address}:4700, which others reach too: add --bind {host.address}:0"
    assert where in by_hand.said("server0")
