"""A report as a file: everything that somebody else needs to understand a run, bounded, and without secrets."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import secrets
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rallypoint.errors import UsageError
from rallypoint.launch.cluster import PRIVATE, ClusterConfig
from rallypoint.launch.folder import REPORTS
from rallypoint.launch.options import options_of
from rallypoint.launch.plan import Launch
from rallypoint.launch.reporting.picture import Picture, config_of, view_of
from rallypoint.launch.reporting.redaction import Redaction, secrets_among, secrets_in
from rallypoint.launch.reporting.sentence import sentence_of
from rallypoint.net.frames import PROTOCOL

MOST_BYTES = 16 << 20  # of all texts together
MOST_REPORTS = 24  # in one run's folder
_MOST_PROCESSES = 64  # whose stacks are in a report
_VERSIONS = (
    "rallypoint", "torch", "numpy", "msgspec", "fsspec", "zstandard", "cryptography", "xxhash", "safetensors", "ray",
)  # fmt: skip
_OF_PLAN = ("script", "workers", "workers_start", "overrides", "restart", "changes", "resume")  # and options


class Report(NamedTuple):
    """A report that has been made: its first sentence, and where it is."""

    sentence: str
    path: Path


def write_report(picture: Picture, out: Path, doctor: str = "") -> Report:
    """Write the report of a run to `out`: a zip file (``.zip``), or else a folder, which must be new.

    It holds the newest events, views, stacks, versions, settings and printed lines. `doctor`: what it has said of this
    machine. Raises UsageError if `out` exists or cannot be written.
    """
    redact = Redaction(_known_secrets(picture))
    sentence = redact(sentence_of(picture)).replace("\n", " ")
    left = MOST_BYTES
    try:
        with _writer(out) as write:
            for name, text in _parts(picture, sentence, doctor):
                clean = redact(text).encode(errors="replace")
                if len(clean) > left:
                    clean = clean[: max(0, left)] + b"\n... the report is full\n"
                left -= len(clean)
                write(name, clean)
    except FileExistsError:
        raise UsageError(f"{out} exists already: choose another --out") from None
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}: choose another --out") from None
    return Report(sentence, out)


def place_in(folder: Path, kind: str) -> Path:
    """A new name in a run's folder: ``reports/stall-20260131-235959-1a2b.zip``. Of very many reports the oldest go."""
    place = folder / REPORTS
    place.mkdir(mode=0o700, exist_ok=True)
    own = sorted((path for path in place.glob("*-*.zip")), key=lambda path: path.lstat().st_mtime)
    for path in own[: max(0, len(own) - MOST_REPORTS + 1)]:
        path.unlink(missing_ok=True)
    return folder / REPORTS / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.zip"


def _known_secrets(picture: Picture) -> list[str]:
    """Values that appear nowhere: the run's tokens, and what environments and arguments hold under secret names."""
    known = [*picture.tokens, *secrets_among(os.environ)]
    for process in picture.processes:
        if process.here:
            known += secrets_among(_environment_of(process.owner.pid))
    if picture.plan is not None:
        known += secrets_in(picture.plan.worker)
    return known


def _environment_of(pid: int) -> Mapping[str, str]:
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return {name: value for name, equals, value in (pair.partition("=") for pair in pairs) if equals}
    return {}


def _parts(picture: Picture, sentence: str, doctor: str) -> Iterator[tuple[str, str]]:
    yield "report.txt", "\n".join([sentence, "", *_overview(picture)]) + "\n"
    yield "events.jsonl", b"\n".join([*picture.events, b""]).decode(errors="replace")
    members = [msgspec.to_builtins(view) for view in picture.members]
    yield "views.json", _json({"newest": view_of(picture.state), "members": members})
    yield "settings.json", _json({"plan": _plan(picture.plan), "settings": config_of(picture.state)})
    yield "versions.json", _json(_versions())
    places = set[str]()
    for process in picture.processes[-_MOST_PROCESSES:]:
        owner = process.owner
        head = f"{owner.name} ({owner.role}), process {owner.pid} on {owner.host}"
        state = process.state or ("lives" if process.here else "is not here any more")
        name = re.sub(r"[^\w.-]", "_", owner.name)[:100]
        place = f"stacks/{name}-{owner.pid}"
        while place in places:  # of a container that was restarted
            place += "-again"
        places.add(place)
        yield f"{place}.txt", f"{head}: {state}\n{process.stacks or process.why_none}\n"
    if picture.log:
        yield "console.log", picture.log
    if doctor:
        yield "doctor.txt", doctor


def _overview(picture: Picture) -> Iterator[str]:
    yield f"run: {picture.folder}, {'under way' if picture.running else 'not under way'}"
    yield f"steps: {picture.step} of {picture.steps or 'nobody knows how many'}"
    if picture.silent_s is not None:
        yield f"the last event was {picture.silent_s:.1f} s ago"
    if picture.waits:
        yield f"it waits: {picture.waits}"
    if picture.said:
        yield f"the coordinator's last word: {picture.said}"
    for process in picture.processes:
        owner = process.owner
        state = process.crash or process.state or ("lives" if process.here else process.why_none or "ended")
        yield f"{owner.name}: process {owner.pid} on {owner.host}: {state}"
    for trouble in picture.troubles:
        yield f"not read: {trouble}"
    yield f"made {time.strftime('%Y-%m-%d %H:%M:%S %z')}; look through it before you give it to others"


def _plan(plan: Launch | None) -> dict[str, Any]:
    if plan is None:
        return {}
    known = msgspec.to_builtins(plan)
    arguments = max(0, len(plan.worker) - (1 if not plan.script else 2))
    told = [*_OF_PLAN, *options_of(ClusterConfig, without=PRIVATE)]
    return {name: known[name] for name in told} | {"arguments": f"{arguments}, not shown"}


def _versions() -> dict[str, str]:
    found = {"python": sys.version, "system": platform.platform(), "libc": " ".join(platform.libc_ver())}
    found["protocol"] = str(PROTOCOL)
    for package in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode() + "\n"


@contextlib.contextmanager
def _writer(out: Path) -> Iterator[Any]:
    """In the body a function that writes a part: to a new zip file, which is complete or not there, or to a folder."""
    if out.suffix != ".zip":
        out.mkdir(mode=0o700)

        def write(name: str, data: bytes) -> None:
            path = out / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(data)

        yield write
        return
    if os.path.lexists(out):
        raise FileExistsError(out)
    fresh = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        with os.fdopen(fd, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            yield lambda name, data: archive.writestr(name, data)
        fresh.replace(out)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
