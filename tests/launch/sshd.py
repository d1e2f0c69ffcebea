"""An sshd of a test's own: its configuration, keys and port are in a temporary folder, as are the client's."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import rallypoint
from support.beside import until

Start = Callable[..., subprocess.Popen[Any]]
_SEPARATION = Path("/run/sshd")  # without it an sshd of root does not start


def require_sshd() -> str:
    """Return the path of sshd; skip the test where there is none, or no client."""
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd, ssh and ssh-keygen (Debian: openssh-server, openssh-client)")
    return found


@dataclass(slots=True)
class Shell:
    """A folder with keys and a configuration of ssh, and the sshds that it leads to.

    path: for the environment: its `ssh` is one with this configuration. python: a program
    there that has this package, wherever pytest found it.
    """

    folder: Path
    path: str = ""
    python: str = ""
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("host", "user"):
            key = str(self.folder / name)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=120)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        settings = {
            "IdentityFile": self.folder / "user", "IdentitiesOnly": "yes", "IdentityAgent": "none",
            "StrictHostKeyChecking": "no", "UserKnownHostsFile": self.folder / "known", "LogLevel": "ERROR",
            "GlobalKnownHostsFile": "/dev/null",
        }  # fmt: skip
        config = self.folder / "config"
        config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        self.path = self.client(config)
        self.python = self.program("python", "exec")

    def client(self, config: Path) -> str:
        """Write an `ssh` that has this configuration. Returns a PATH on which it is the first."""
        folder = self.folder / f"client-{config.name}"
        folder.mkdir()
        ssh = folder / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F "{config}" "$@"\n')
        ssh.chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    def program(self, name: str, start: str) -> str:
        """Write a program that is this Python, with this package, started by `start` (``exec``)."""
        path, package = self.folder / name, Path(rallypoint.__file__).parent.parent
        path.write_text(f'#!/bin/sh\nexport PYTHONPATH="{package}"\n{start} "{sys.executable}" "$@"\n')
        path.chmod(0o755)
        return str(path)

    def serve(self, address: str = "127.0.0.1", start: Start = subprocess.Popen) -> str:
        """Start an sshd at this address. Returns the host as it is named to the launcher: ``user@address:port``."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        settings = {
            "ListenAddress": f"{address}:{port}", "HostKey": self.folder / "host", "PidFile": "none",
            "AuthorizedKeysFile": self.folder / "authorized", "StrictModes": "no", "UsePAM": "no",
            "PasswordAuthentication": "no", "PermitRootLogin": "prohibit-password", "LogLevel": "ERROR",
        }  # fmt: skip
        config = self.folder / f"sshd-{address}-{port}"
        config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        log = self.folder / f"{config.name}.log"
        argv = [require_sshd(), "-D", "-E", str(log), "-f", str(config)]
        daemon = start(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.started.append(daemon)
        host = f"{getpass.getuser()}@{address}"
        self._answered(daemon, host, port, log)
        return f"{host}:{port}"

    def _answered(self, daemon: subprocess.Popen[Any], host: str, port: int, log: Path) -> None:
        """Wait until it listens; a namespace's addresses cannot be connected to from here, but its sockets are seen."""

        def listens() -> bool:
            assert daemon.poll() is None, f"sshd has ended: {log.read_text()}"
            found = Path(f"/proc/{daemon.pid}/net/tcp").read_text().splitlines()[1:]
            return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in found)

        until(listens, lambda: f"sshd for {host} does not listen")

    def line(self, host: str, *words: str) -> str:
        """The line of a hosts file for a host."""
        return " ".join([host, f"python={self.python}", *words])

    def close(self) -> None:
        """End every sshd, and what it has started."""
        for daemon in self.started:
            children = _processes(daemon.pid)
            daemon.kill()
            daemon.wait()
            kill_all(children)


@contextmanager
def shell(folder: Path) -> Iterator[Shell]:
    """A `Shell` in this folder, closed after the body."""
    require_sshd()
    if os.geteuid() == 0:  # it stays: another test's sshd may use it at the same time, and it is empty
        _SEPARATION.mkdir(mode=0o755, exist_ok=True)
    opened = Shell(folder)
    try:
        yield opened
    finally:
        opened.close()


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kill those that still run, and wait for their end."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10.0)


def _processes(pid: int) -> Sequence[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
