"""Processes on machines that another program leads to (`RemoteShell`): ``ssh``, or Slurm's ``srun``.

Nothing of ours runs there before: the program starts `far_end`, which starts the processes, and ends with the
connection.
What a process is told (its token, too) goes through the connection, never onto a command line, which others can read.
"""

from __future__ import annotations

import io
import itertools
import os
import secrets
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from rallypoint.errors import UsageError
from rallypoint.launch.engines.cluster import Cluster, Command
from rallypoint.launch.engines.remote.hosts import Host, coordinators_host, place
from rallypoint.launch.engines.remote.link import HostLink, RemoteProcess, RemoteShell
from rallypoint.launch.engines.remote.messages import PACKAGE, Begin, Ready, Unpack
from rallypoint.launch.kept_code import CODE
from rallypoint.launch.plan import AUTO, HERE, Launch, is_loopback

_CONNECT_S = 30.0  # seconds in which the hosts must be ready when a run begins
_AGAIN_S = 20.0  # seconds after which a host that was gone is tried again, when a process is to be started
_END_S = 10.0  # seconds in which the hosts may end their processes


class RemoteCluster(Cluster):
    """Starts processes on these hosts; a context manager that leaves none behind."""

    def __init__(self, plan: Launch, hosts: Sequence[Host], shell: RemoteShell, say: Callable[[str], None]) -> None:
        """`say` gets a sentence about each host that is left out. Raises UsageError when the folders cannot be written.
        """
        self._hosts = tuple(host if host.python else replace(host, python=sys.executable) for host in hosts)
        if not self._hosts:
            raise UsageError("which machines? give --hosts a file with one host a line, or a list as a,b,c")
        self._say, self._bind = say, plan.bind
        self._sharing = Sharing(plan, self._hosts)
        folder, package = str(Path(plan.folder).resolve()), str(PACKAGE)
        self._links = {
            host: HostLink(
                host, shell,
                Begin(folder, host.folder or os.getcwd(), self._sharing.markers, sys.executable, package, HERE),
                self._sharing.judge,
            )
            for host in self._hosts
        }  # fmt: skip
        self._numbers = itertools.count(1)
        self._started: list[RemoteProcess] = []
        self._left_out: set[Host] = set()
        self._ended = False

    def __enter__(self) -> Self:
        """Connect to every host. Raises UsageError if the coordinator's cannot be used."""
        try:
            self._connect()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, command: Command, output: Callable[[str], None]) -> RemoteProcess:
        """Start a process; see `Cluster.start`. Raises UsageError when no host takes its role."""
        if self._ended:
            raise UsageError("this cluster has been ended")
        self._try_again()
        self._started = [process for process in self._started if process.exit() is None]
        up = [host for host, link in self._links.items() if link.up]
        host = place(command.role, self._hosts, up, self._running())
        if host is None:
            raise UsageError(f"{command.name} has no host: none in --hosts takes the role {command.role}")
        process = RemoteProcess(command, next(self._numbers), self._links[host], output)
        self._started.append(process)
        self._links[host].run(process)
        return process

    def end(self) -> None:
        """Kill every process that still runs, and wait until all have ended."""
        self._ended = True
        for link in self._links.values():
            link.close()
        deadline = time.monotonic() + _END_S
        for link in self._links.values():
            link.join(deadline)
        self._sharing.close()

    def _connect(self) -> None:
        deadline = time.monotonic() + _CONNECT_S
        for link in self._links.values():
            link.connect()
        first = coordinators_host(self._hosts)
        for host, link in self._links.items():
            if not link.settled(max(0.0, deadline - time.monotonic())):
                link.close()
            if link.up:
                continue
            why = link.problem or f"it was not ready within {_CONNECT_S:.0f} s"
            if host == first:
                raise UsageError(f"{host}, where the coordinator is to run, cannot be used: {why}")
            self._leave_out(host, why)
        self._check_addresses(self._links[first])

    def _check_addresses(self, first: HostLink) -> None:
        """Raise UsageError if the coordinator would listen at an address that other hosts cannot connect to."""
        far = next((k for k in self._links.values() if k.up and not is_loopback(k.address)), None)
        if self._bind.startswith(HERE) and is_loopback(first.address) and far is not None:
            raise UsageError(
                f"{first.host} is reached at {first.address}, where {far.host} cannot connect to its coordinator: name "
                "it in --hosts by an address that all hosts can connect to"
            )

    def _leave_out(self, host: Host, why: str) -> None:
        if host not in self._left_out:
            self._left_out.add(host)
            self._say(f"{host} is left out: {why}; it is tried again now and then")

    def _try_again(self) -> None:
        """Connect again to hosts that have been away for a while. The next process may be placed there."""
        for host, link in self._links.items():
            if link.up:
                self._left_out.discard(host)
            elif link.failed_at is not None:
                self._leave_out(host, link.problem)
                if time.monotonic() - link.failed_at > _AGAIN_S:
                    link.connect()

    def _running(self) -> dict[Host, list[str]]:
        running: dict[Host, list[str]] = {host: [] for host in self._hosts}
        for process in self._started:
            running[process.host].append(process.command.role)
        return running


class Sharing:
    """Files in the run's folders by which a host shows that it sees them; a context manager that removes them."""

    def __init__(self, plan: Launch, hosts: tuple[Host, ...]) -> None:
        """Make them. Raises UsageError where a folder cannot be written."""
        self._coordinators = coordinators_host(hosts)
        self._folder = Path(plan.folder).resolve()
        self._snapshots = Path(plan.snapshots).resolve() if plan.snapshots and "://" not in plan.snapshots else None
        self._script, self._makes_certificates = plan.script, plan.tls == AUTO
        name = f".seen-{secrets.token_hex(8)}"
        folders = [self._folder, *([self._snapshots] if self._snapshots else [])]
        self.markers = tuple(str(folder / name) for folder in folders)
        try:
            for marker in self.markers:
                Path(marker).parent.mkdir(parents=True, exist_ok=True)
                Path(marker).touch()
        except OSError as error:
            self.close()
            raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Remove the files."""
        for marker in self.markers:
            Path(marker).unlink(missing_ok=True)

    def judge(self, host: Host, ready: Ready) -> str | Unpack | None:
        """Return why a host cannot be used, or what it has to unpack, or None."""
        if ready.problem:
            return ready.problem
        sees = dict(zip(self.markers, ready.sees, strict=False))
        writes = host.takes("server") or host == self._coordinators
        if self._snapshots and writes and not sees.get(self.markers[1], False):
            return (
                f"it does not see {self._snapshots}, where the snapshots would be: give --snapshots a URL "
                "(s3://...), or a folder that all hosts share, or none"
            )
        if sees.get(self.markers[0], False):
            return None
        if self._makes_certificates:
            return f"it does not see {self._folder}, where the certificates of --tls auto are: give --tls FOLDER"
        if not self._script:
            return None
        return Unpack(_archive(self._folder))


def _archive(folder: Path) -> bytes:
    """Return the copy of the script and its modules that the run keeps, as a tar archive."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        tar.add(folder / CODE, CODE)
    return written.getvalue()
