"""Where every thread of a process is: written by faulthandler to a file of the run, when it crashes and when asked.

    process                                            whoever makes a report
    keep_stacks(): STACKS/worker0-4711.txt  ------->   its first line names process 4711
    a crash: the file gets all stacks                  does process 4711 have this very file open?
                                            <-------   then it gets SIGNAL
    faulthandler's handler, in C, appends all stacks   reads them

The handler needs no lock of Python's: it works while a thread is stuck in C and keeps the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import secrets
import signal
import socket
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.launch import environment
from rallypoint.launch.folder import STACKS
from rallypoint.own_files import delete_oldest

SIGNAL = signal.SIGRTMAX - 3  # SIGUSR1 and SIGUSR2 are the script's, and those of batch systems
MOST_FILES = 512
MOST_BYTES = 4 << 20  # of one file: a process whose file is larger is asked no more
_SHOWN_BYTES = 128 << 10  # of one process
_HEAD_BYTES = 1000
_PATIENCE_S, _LOOK_S, _QUIET_S = 2.0, 0.01, 0.1
_FATAL = re.compile(r"^(Fatal Python error: .*|Windows fatal exception: .*)$", re.M)
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a device", "Z": "ended"}


class StackOwner(msgspec.Struct, frozen=True):
    """The first line of a file: whose it is."""

    name: str
    role: str
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """A process of a run, and what it has written of its stacks."""

    owner: StackOwner
    here: bool  # it lives, on this machine
    state: str  # "" or what is unusual: "stopped" (SIGSTOP), "waiting for a device"
    crash: str  # ``Fatal Python error: Segmentation fault``, or ""
    stacks: str  # as faulthandler writes them; "" if there are none
    why_none: str = ""  # why there are none


_kept: list[Any] = []  # the file must stay open


def keep_stacks(role: str) -> None:
    """Let this process write its stacks where the launcher has said (RALLYPOINT_STACKS); without that do nothing.

    It gets its member's name, for ``ps -o pid,comm``, ``pgrep -xP LAUNCHER worker1`` and ``top``. A script that has its
    own faulthandler keeps it. Files of ended processes go when there are very many.
    """
    folder = os.environ.get(environment.STACKS, "")
    if not folder or _kept:
        return
    name = os.environ.get(environment.ID, "") or role
    if rank := os.environ.get("RANK", "") if int(os.environ.get(environment.RANKS) or 1) > 1 else "":
        name = f"{name}-rank{rank}"
    owner = StackOwner(name, role, os.getpid(), socket.gethostname())
    plain = re.sub(r"[^\w.-]", "_", name)[:100]
    try:
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        delete_oldest(Path(folder).glob("*.txt"), MOST_FILES)
        path = Path(folder) / f"{plain}-{owner.pid}.txt"
        if os.path.lexists(path):  # a container's processes have the same numbers each time
            path = path.with_name(f"{plain}-{owner.pid}-{secrets.token_hex(4)}.txt")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        file.write(msgspec.json.encode(owner) + b"\n")
    except OSError:  # a full disk, a folder that was deleted: the job needs no stacks
        return
    _kept.append(file)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(plain[:15])
    if not faulthandler.is_enabled():
        faulthandler.enable(file, all_threads=True)
    faulthandler.register(SIGNAL, file, all_threads=True, chain=False)


def processes_of(run: Path, *, ask: bool) -> list[ProcessStacks]:
    """The processes of a run that have left files, and their stacks; `ask`: those that live on this machine write them
    now. Waits for them up to 2 s. Files that are no such are left out."""
    found = [(path, owner) for path in _files(run / STACKS) if (owner := _owner(path)) is not None]
    sizes, asked, why = dict[Path, int](), list[Path](), dict[Path, str]()
    if ask:
        for path, owner in found:
            sizes[path] = _size(path)
            why[path] = _ask(path, owner)
            if not why[path]:
                asked.append(path)
        _wait(asked, sizes)
    return [_read(path, owner, sizes.get(path), why.get(path, "")) for path, owner in found]


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            paths = [path for path in folder.glob("*.txt") if stat.S_ISREG(path.lstat().st_mode)]
            return sorted(paths, key=lambda path: path.lstat().st_mtime)[-MOST_FILES:]
    return []


def _owner(path: Path) -> StackOwner | None:
    try:
        with path.open("rb") as file:
            owner = msgspec.json.decode(file.read(_HEAD_BYTES).partition(b"\n")[0], type=StackOwner)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return owner if 1 < owner.pid < 1 << 31 else None


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _ask(path: Path, owner: StackOwner) -> str:
    """Ask a process for its stacks. Returns why that cannot be; "" if it was asked. Only a process that has this very
    file open is asked, and only if it handles the signal: it would end another one."""
    try:
        handle = os.pidfd_open(owner.pid)  # from here on the number cannot be another process's
    except OSError:
        return _not_here(owner)
    try:
        if not _has_open(owner.pid, path):
            return _not_here(owner)
        if state := _STATES.get(_status(owner.pid).get("State", "")[:1], ""):
            return f"the process is {state}"
        if not int(_status(owner.pid).get("SigCgt", "0"), 16) >> (SIGNAL - 1) & 1:
            return "the process does not listen to such requests any more"
        if _size(path) > MOST_BYTES:
            return "the process has been asked too often"
        signal.pidfd_send_signal(handle, SIGNAL)
    except (OSError, ValueError):
        return _not_here(owner)
    finally:
        os.close(handle)
    return ""


def _not_here(owner: StackOwner) -> str:
    here = owner.host == socket.gethostname()
    return "the process has ended" if here else f"the process is on {owner.host}: make a report there"


def _has_open(pid: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samefile(f"/proc/{pid}/fd/{number}", path):
                    return True
    return False


def _status(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _wait(asked: Iterable[Path], before: dict[Path, int]) -> None:
    """Wait until each file has grown, and grows no more."""
    deadline = time.monotonic() + _PATIENCE_S
    grown = {path: (before[path], time.monotonic()) for path in asked}
    while time.monotonic() < deadline:
        for path, (size, _) in grown.items():
            if (now := _size(path)) != size:
                grown[path] = now, time.monotonic()
        quiet = time.monotonic() - _QUIET_S
        if all(size > before[path] and changed < quiet for path, (size, changed) in grown.items()):
            return
        time.sleep(_LOOK_S)


def _read(path: Path, owner: StackOwner, before: int | None, why: str) -> ProcessStacks:
    """`before`: the file's size when its process was asked; None: nobody was."""
    here = _has_open(owner.pid, path)
    state = _STATES.get(_status(owner.pid).get("State", "")[:1], "") if here else ""
    try:
        with path.open("rb") as file:
            head = len(file.readline(_HEAD_BYTES))
            size = os.fstat(file.fileno()).st_size
            newest = before if before is not None and size > before else head
            file.seek(max(newest, size - _SHOWN_BYTES))
            text = file.read(_SHOWN_BYTES).decode(errors="replace")
    except OSError:
        text = ""
    crash = [] if here else _FATAL.findall(text)
    if not text and not why:
        why = "it has not answered" if before is not None else "it was not asked" if here else "the process has ended"
    return ProcessStacks(owner, here, state, crash[-1] if crash else "", text, "" if text else why)
