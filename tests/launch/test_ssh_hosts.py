"""``rallypoint run --hosts`` on two hosts of a test network: the bytes of one machine, also when a host's processes are
killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from gated import AT, ENV, PATIENCE_S, SCRIPT, alone, hash_of, named, steps_done, wait_until
from sshd import Shell, kill_all, shell

from support.netlab import Netlab

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.programs, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab() -> Iterator[Netlab]:
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
    return alone(tmp_path_factory.mktemp("alone"))


class Launched:
    """``rallypoint run --hosts`` on the first host."""

    def __init__(self, lab: Netlab, hosts: tuple[Shell, str], folder: Path, *options: str) -> None:
        self.folder, self.gate, self.output = folder, folder / "gate", folder / "output"
        (folder / "train.py").write_text(SCRIPT)
        shells, file = hosts
        run = ["run", "--hosts", file, "--folder", "run", "--workers", "4", "--servers", "2"]
        with self.output.open("w") as output:
            self.process = lab.hosts[0].popen(
                [sys.executable, "-m", "rallypoint.cli", *run, *options, "train.py", str(self.gate)],
                cwd=folder, env={**ENV, "PATH": shells.path}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
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
        running = lambda: self.process.poll() is None  # noqa: E731
        wait_until(lambda: steps_done(self.folder / "run") >= step, running, self.said)

    def ended(self) -> str:
        """Let the job end well. Returns its hash."""
        self.gate.touch()
        assert self.process.wait(PATIENCE_S) == 0, self.said()
        return hash_of(self.said())


def test_two_hosts_give_the_bytes_of_one_machine_also_when_the_coordinator_dies(
    lab: Netlab, hosts: tuple[Shell, str], tmp_path: Path, undisturbed: str
) -> None:
    with Launched(lab, hosts, tmp_path) as launched:
        launched.until_step(AT - 1)
        on_each = [named(psutil.Process(daemon.pid)) for daemon in hosts[0].started]
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
        kill_all(victims)
        assert launched.ended() == undisturbed
        assert "was killed (SIGHUP): root@10.77.0.2: " in launched.said()

