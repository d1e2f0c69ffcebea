"""Where the processes of a run tell their metrics, as a file that Prometheus' ``file_sd_configs`` reads."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shlex
import stat
from pathlib import Path

import msgspec

from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.net.tcp import split_address
from rallypoint.own_files import opened

_AT = "127.0.0.1:0"  # any free port, for this machine alone


class Targets:
    """The targets of the run in `run`, as a file in the folder `into` ("": none) that has the run's name.

    It is there while some process tells its metrics, and always complete. A folder for the files of several runs can be
    named once in Prometheus' configuration: ``files: ["targets/*.json"]``. UsageError if the folder cannot be made, or
    if everybody may replace files in it: they would choose what Prometheus reads.
    """

    def __init__(self, run: Path, into: str) -> None:
        whole = run.resolve()
        self._run, self._wanted = whole.name, bool(into)
        digest = hashlib.sha256(str(whole).encode()).hexdigest()[:8]  # runs of one name in different places
        self._path = Path(into) / f"{whole.name}-{digest}.json"
        self._known: dict[str, tuple[str, str]] = {}  # process -> its role, and where it answers
        if self._wanted:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _refuse_everybodys(self._path.parent)
                self._path.unlink(missing_ok=True)  # of a launcher that was killed
            except OSError as error:
                raise UsageError(f"{into} cannot hold --metrics' files: {error.strerror}") from None

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to tell its metrics."""
        return {environment.HEALTH: _AT} if self._wanted else {}

    def takes(self, name: str, role: str, line: str) -> bool:
        """True if with this line the process has said where it answers: nobody else needs to see it."""
        if not self._wanted or not line.startswith(environment.ANSWERS_AT) or name in self._known:
            return False
        address = line.removeprefix(environment.ANSWERS_AT)
        try:
            split_address(address)
        except UsageError:
            return False  # the script's own words
        self._known[name] = role, address
        self._write()
        return True

    def gone(self, name: str) -> None:
        """That process has ended."""
        if self._known.pop(name, None) is not None:
            self._write()

    def close(self) -> None:
        """The run is over: delete the file."""
        self._known.clear()
        if self._wanted:
            self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(f".{secrets.token_hex(8)}").name  # others may write into the folder
        targets = [
            {"targets": [address], "labels": {"run": self._run, "role": role, "member": name}}
            for name, (role, address) in self._known.items()
        ]  # fmt: skip
        text = msgspec.json.format(msgspec.json.encode(targets), indent=2)
        # OSError: a full disk: the run goes on, and is scraped as far as the file says
        with contextlib.suppress(OSError), opened(self._path.parent) as folder:
            if targets:  # at once: Prometheus, which may be another user, may read it at any moment
                folder.write(self._path.name, text, mode=0o666, beside=fresh)
            else:
                folder.unlink(self._path.name)


def _refuse_everybodys(folder: Path) -> None:
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UsageError(
            f"everybody may write {folder}, and so replace --metrics' files: "
            f"chmod o-w {shlex.quote(str(folder))}, or name another folder"
        )
