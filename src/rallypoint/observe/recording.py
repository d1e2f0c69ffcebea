"""Recordings: files with all calls of one machine, and their results.

A file is a sequence of msgpack records, each after its length in 4 bytes. The first record is the `Beginning`: the
machine's name and whole state. Each other record is a `Call`. Every record is written to the kernel at once, so a
process that is killed loses at most the call in progress.

A recording has a size limit. When a file reaches half of it, the next file begins, again with the whole state, and the
file before the last is deleted. Each file can be replayed alone.
"""

from __future__ import annotations

import io
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.errors import RallypointError
from rallypoint.observe.lenient import say
from rallypoint.observe.packed import PackingError, pack, pack_state

FORMAT = 1
LIMIT_BYTES = 64 << 20  # for one machine
SUFFIX = ".recording"
_LENGTH = struct.Struct("<I")
_MOST = 1 << 30  # bytes of one record
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)  # what msgspec raises


class RecordingError(RallypointError):
    """A file is not a recording, or cannot be read."""


class Beginning(msgspec.Struct, frozen=True, array_like=True):
    """The first record. `state` is the packed machine, before the calls that follow."""

    format: int
    version: str
    name: str
    part: int
    state: Any


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of the machine. `result` is what it returned, packed; with `raised`, the exception as text."""

    time: float
    method: str
    arguments: list[Any]
    keywords: dict[str, Any]
    result: Any
    raised: bool = False


class Recorder:
    """Writes one machine's calls to a file. An error of the file ends the recording, not the process.

    `limit` is in bytes, for all files of this machine together.
    """

    def __init__(self, folder: Path, name: str, limit: int = LIMIT_BYTES) -> None:
        self.name = name
        self._base = folder / _free_name(folder, f"{re.sub('[^A-Za-z0-9_.-]', '_', name)}-{os.getpid()}")
        self._limit, self._size, self._part = limit, 0, 0
        self._file: io.FileIO | None = None
        self._ended = False

    @property
    def path(self) -> Path:
        """The file that is written now."""
        return self._path(self._part)

    def begin(self, machine: Any) -> None:
        """Begin a file with the state of `machine`."""
        self._attempt(lambda: self._begin(machine))

    def called(self, machine: Any, call: Call) -> None:
        """Write a call. `machine` must be in the state after it."""
        self._attempt(lambda: self._write(call))
        if self._size > self._limit // 2:
            self._attempt(lambda: self._begin(machine))

    def close(self) -> None:
        """End the recording."""
        self._ended = True
        if self._file is not None:
            self._file.close()

    def fail(self, why: object) -> None:
        """End the recording, and print why to stderr."""
        say(f"RALLYPOINT_RECORD: the recording of {self.name} ends here: {why}", error=True)
        self.close()

    def _attempt(self, what: Callable[[], None]) -> None:
        if self._ended:
            return
        try:
            what()
        except (OSError, PackingError, TypeError, OverflowError) as error:
            self.fail(error)

    def _begin(self, machine: Any) -> None:
        state = pack_state(machine)
        if self._file is not None:
            self._file.close()
        self._part += 1
        self._size = 0
        self._path(self._part - 2).unlink(missing_ok=True)
        self._path(self._part).parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(self._path(self._part), "x", opener=lambda path, flags: os.open(path, flags, 0o600))
        self._write(Beginning(FORMAT, version(), self.name, self._part, state))

    def _write(self, record: Beginning | Call) -> None:
        assert self._file is not None
        data = msgspec.msgpack.encode(record)
        record_bytes = memoryview(_LENGTH.pack(len(data)) + data)
        self._size += len(record_bytes)
        while record_bytes:
            record_bytes = record_bytes[self._file.write(record_bytes) :]

    def _path(self, part: int) -> Path:
        return self._base.with_name(f"{self._base.name}.{part}{SUFFIX}")


@cache
def version() -> str:
    """The installed version of this package."""
    try:
        return metadata.version("rallypoint")
    except metadata.PackageNotFoundError:
        return "unknown"


def _free_name(folder: Path, wanted: str) -> str:
    """`wanted`, or `wanted` with a number if another machine of this process has that name."""
    name, number = wanted, 1
    while any(folder.glob(f"{name}.*{SUFFIX}")):
        number += 1
        name = f"{wanted}-{number}"
    return name


def call_of(method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    """A call that is about to be made. `answered` adds its result."""
    return Call(time.time(), method, [pack(a) for a in arguments], {k: pack(v) for k, v in keywords.items()}, None)


def answered(call: Call, result: Any) -> Call:
    """The call with its result or exception."""
    if isinstance(result, BaseException):
        return msgspec.structs.replace(call, result=f"{type(result).__name__}: {result}", raised=True)
    return msgspec.structs.replace(call, result=pack(result))


def read(path: Path) -> tuple[Beginning, Iterator[Call]]:
    """Read a recording: its first record, and an iterator over its calls. An incomplete last record is left out.

    RecordingError if it is not a recording, or is of another format.
    """
    records = _records(path)
    try:
        first = msgspec.msgpack.decode(next(records, b""), type=Beginning)
    except _UNREADABLE:
        raise RecordingError(f"{path} is no recording of a machine") from None
    if first.format != FORMAT:
        raise RecordingError(f"{path} is of format {first.format}, not {FORMAT}: use Rallypoint {first.version}")
    return first, _calls(path, records)


def _calls(path: Path, records: Iterator[bytes]) -> Iterator[Call]:
    decoder = msgspec.msgpack.Decoder(Call)
    for number, record in enumerate(records, 1):
        try:
            yield decoder.decode(record)
        except _UNREADABLE as error:
            raise RecordingError(f"{path}: record {number} is damaged: {error}") from None


def _records(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                if length > _MOST:
                    raise RecordingError(f"{path} is no recording of a machine, or is damaged")
                record = file.read(length)
                if len(record) < length:
                    return  # the process was killed in the middle
                yield record
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error}") from None
