"""The machines of a run over ssh: ``--hosts hosts.txt`` or ``--hosts a,b``.

One host a line, with optional words after it; ``#`` begins a comment::

    10.0.0.7                        # the coordinator runs on the first
    me@10.0.0.8:2222 slots=2        # twice as many processes as on the others
    gpu1 roles=worker python=/opt/torch/bin/python folder=/scratch/me
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rallypoint.errors import UsageError, meant

ROLES = ("coordinator", "server", "aggregator", "worker")
_WORDS = ("roles", "slots", "python", "folder")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine.

    Attributes:
        name: what ``ssh`` is told: ``name`` or ``user@name``.
        port: ssh's port; 0: as ssh's own configuration says.
        roles: what may run there; empty: everything.
        slots: its share of the processes, compared with the other hosts'.
        python: the Python that has Rallypoint there; "": the path of the launcher's.
        folder: the working directory of processes there; "": the launcher's, or the home folder where that is missing.
    """

    name: str
    port: int = 0
    roles: tuple[str, ...] = ()
    slots: int = 1
    python: str = ""
    folder: str = ""

    def takes(self, role: str) -> bool:
        """True if a process of this role may run there."""
        return not self.roles or role in self.roles

    def __str__(self) -> str:
        return self.name


def hosts_of(given: str) -> tuple[Host, ...]:
    """Return the hosts of a file, or of a list with commas. Raises UsageError if it is neither, or holds a mistake."""
    path = Path(given)
    if path.is_file():
        try:
            return parse(path.read_text(), given)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UsageError(f"{given} cannot be read: {why}") from None
    if "/" in given or given.endswith(".txt"):
        raise UsageError(f"there is no file {given}: --hosts takes a file with one host a line, or a list as a,b,c")
    return parse("\n".join(given.split(",")), "--hosts")


def parse(text: str, source: str) -> tuple[Host, ...]:
    """Return the hosts of a text. Raises UsageError that names `source` and the line."""
    found: dict[tuple[str, int], Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"{source}, line {number}")
        if (host.name, host.port) in found:
            raise UsageError(f"{source}, line {number}: {host.name} stands there twice: write it once, with slots=2")
        found[host.name, host.port] = host
    if not found:
        raise UsageError(f"{source} names no host")
    return tuple(found.values())


def coordinators_host(hosts: tuple[Host, ...]) -> Host:
    """Return the host of the coordinator: the first that has this role by name, else the first of all."""
    return next((host for host in hosts if "coordinator" in host.roles), hosts[0])


def _host(words: list[str], where: str) -> Host:
    host = _place(words[0], where)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in _WORDS or not equals or not value:
            hint = meant(key, _WORDS) or f": the words after a host are {', '.join(f'{word}=' for word in _WORDS)}"
            raise UsageError(f"{where}: '{word}' is not understood{hint}")
        match key:
            case "roles":
                roles = tuple(value.split(","))
                if wrong := next((role for role in roles if role not in ROLES), None):
                    raise UsageError(f"{where}: there is no role {wrong}{meant(wrong, ROLES)}")
                host = replace(host, roles=roles)
            case "slots":
                host = replace(host, slots=_number(value, f"{where}: slots={value}", most=100_000))
            case "python":
                host = replace(host, python=value)
            case _:
                host = replace(host, folder=value)
    return host


def _place(word: str, where: str) -> Host:
    """Parse ``user@name:port``. An IPv6 address with a port has brackets: ``me@[fd00::7]:2222``."""
    user, at, place = word.rpartition("@")
    name, colon, port = place.rpartition(":")
    if place.startswith("["):
        name, _, port = place.removeprefix("[").partition("]")
        colon, port = port[:1], port[1:]
    elif not colon or ":" in name:
        name, colon, port = place, "", ""
    # ssh would take a word that begins with a hyphen for one of its options, some of which run commands
    if not name or name.startswith("-") or user.startswith("-") or (colon and not port):
        raise UsageError(f"{where}: '{word}' is not a host: write name, user@name or user@name:port")
    return Host(f"{user}{at}{name}", _number(port, f"{where}: port {port}", most=65535) if port else 0)


def _number(text: str, what: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise UsageError(f"{what}: write a number from 1 to {most}")
    return int(text)


def place(
    role: str, hosts: Sequence[Host], up: Collection[Host], running: Mapping[Host, Sequence[str]]
) -> Host | None:  # fmt: skip
    """Return the host for another process of this role; None if no host takes the role.

    The coordinator has a host of its own choice (`coordinators_host`): members look for it at one address. Of the
    others, each goes to the host with the fewest of its role, then with the fewest of all, each divided by the host's
    slots. Hosts that are not `up` are used only if no other takes the role. `running`: the roles that run on each.
    """
    if role == "coordinator":
        return coordinators_host(tuple(hosts))
    takers = [host for host in hosts if host.takes(role)]
    candidates = [host for host in takers if host in up] or takers

    def load(host: Host) -> tuple[float, float]:
        roles = [other for other in running.get(host, ()) if other != "coordinator"]
        return roles.count(role) / host.slots, len(roles) / host.slots

    return min(candidates, key=load, default=None)
