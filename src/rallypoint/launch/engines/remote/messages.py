"""What the launcher and its remote end say to each other: one line of JSON for each message."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message to a host.

    Attributes:
        folder: the run's folder, which is made if it is not there.
        working: the working directory of the processes; the home folder if it is not there.
        markers: files that the launcher has made. A host that sees one shares the folder that it is in.
        python, package: the launcher's Python, and its folder of this package: in command lines both become the host's.
        here: the word that becomes the host's address.
    """

    folder: str
    working: str
    markers: tuple[str, ...]
    python: str
    package: str
    here: str


class Unpack(msgspec.Struct, frozen=True, tag=True):
    """Unpack this tar archive in the run's folder."""

    archive: bytes


class Run(msgspec.Struct, frozen=True, tag=True):
    """Start a process. `number` names it from now on: names come back, when the coordinator is started again."""

    number: int
    name: str
    role: str
    argv: tuple[str, ...]
    env: dict[str, str]

    def __repr__(self) -> str:
        """All but `env`, in which tokens may be."""
        return f"Run(number={self.number!r}, name={self.name!r}, role={self.role!r}, argv={self.argv!r})"


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a process and its children."""

    process: int
    number: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A host answers `Begin`: which of the markers it sees, its address, and what is wrong there ("": nothing)."""

    sees: tuple[bool, ...]
    address: str = ""
    problem: str = ""


class Unpacked(msgspec.Struct, frozen=True, tag=True):
    """A host answers `Unpack`."""

    problem: str = ""


class Line(msgspec.Struct, frozen=True, tag=True):
    """A process has printed this line."""

    process: int
    text: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process has ended; all of its lines came before. See `Exit`."""

    process: int
    status: int
    signal: str = ""
    reason: str = ""
    started: bool = True


ToHost = Begin | Unpack | Run | Signal
FromHost = Ready | Unpacked | Line | Ended
PACKAGE = Path(__file__).parents[3]  # the folder of rallypoint, here
GREETING = "rallypoint-remote-1"  # the first line from a host that is ours: a shell may print a welcome before it
