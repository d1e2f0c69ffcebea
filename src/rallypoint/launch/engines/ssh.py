"""Processes on machines that the system's ``ssh`` reaches: the cluster of ``rallypoint run --hosts``."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from rallypoint.launch.engines.remote.cluster import RemoteCluster
from rallypoint.launch.engines.remote.hosts import Host
from rallypoint.launch.engines.remote.link import FAR_END, RemoteShell
from rallypoint.launch.plan import Launch

OPTIONS = (
    "BatchMode=yes",  # ask nobody for a password
    "ConnectTimeout=10",
    "ServerAliveInterval=3",  # a machine that has died is noticed within 9 s
    "ServerAliveCountMax=3",
    "EscapeChar=none",
    "ControlPath=none",  # a shared connection has others' signs of life
)
_OWN_FAILURE = 255


class SshCluster(RemoteCluster):
    """Starts processes on the plan's hosts; a context manager that leaves none behind."""

    def __init__(self, plan: Launch, say: Callable[[str], None]) -> None:
        """`say`: see `RemoteCluster`. Raises UsageError without hosts, or when the folders cannot be written."""
        hint = "write python=PATH after the host, if Rallypoint is in another Python there"
        shell = RemoteShell("ssh", ssh_command, _OWN_FAILURE, hint)
        super().__init__(plan, plan.hosts, shell, say)


def ssh_command(host: Host) -> list[str]:
    """Return the command that starts the far end on a host."""
    options = [word for option in OPTIONS for word in ("-o", option)]
    port = ["-p", str(host.port)] if host.port else []
    program = shlex.join([host.python, "-P", "-m", FAR_END])
    return ["ssh", "-T", *options, *port, "--", host.name, f"exec {program}"]
