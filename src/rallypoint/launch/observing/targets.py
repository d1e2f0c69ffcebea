"""Where the processes of a run tell their metrics, as a file that Prometheus' ``file_sd_configs`` reads."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.net.tcp import split_address

TARGETS_FILE = "metrics.json"
_AT = "127.0.0.1:0"  # any free port, for this machine alone


class Targets:
    """The targets of the run in `folder`. The file is there while some process tells its metrics, and always complete.

    `wanted`: False for a run without metrics; then there is never a file.
    """

    def __init__(self, folder: Path, *, wanted: bool) -> None:
        self._path, self._wanted = folder / TARGETS_FILE, wanted
        self._run = folder.resolve().name
        self._known: dict[str, tuple[str, str]] = {}  # process -> its role, and where it answers

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
        self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        targets = [
            {"targets": [address], "labels": {"run": self._run, "role": role, "member": name}}
            for name, (role, address) in self._known.items()
        ]  # fmt: skip
        try:
            if targets:
                fresh.write_bytes(msgspec.json.format(msgspec.json.encode(targets), indent=2))
                fresh.replace(self._path)  # at once: Prometheus may read it at any moment
            else:
                self._path.unlink(missing_ok=True)
        except OSError:  # a full disk: the run goes on, and is scraped as far as the file says
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
