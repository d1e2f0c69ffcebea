"""Recordings: files with all calls of one machine, and their results.

A file is a sequence of msgpack records, each after its length in 4 bytes. The first record is the `Beginning`: the
machine's name and whole state. Each other record is a `Call`. Every record is written to the kernel at once, so a
process that is killed loses at most the call in progress.

A recording has a size limit. When a file reaches half of it, the next file begins, again with the whole state, and the
file before the last is deleted. Each file can be replayed alone.

Machines, events and effects are plain msgpack data. A value that msgpack knows stays unchanged. Every other value
becomes a list whose first item is a tag: ``["t", 1, 2]`` is the tuple (1, 2), and ``["core.worker.slots:Filled", 3]``
is ``Filled(shard=3)``. Only the classes and functions of `rallypoint.core` have such a tag. Nothing is pickled, and no
name in a file is imported or called. `tests/support/replay.py` reads them.
"""

from __future__ import annotations

import enum
import importlib
import io
import itertools
import os
import pkgutil
import re
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, cast

import msgspec

import rallypoint.core
from rallypoint.errors import RallypointError
from rallypoint.observe.lenient import say

_SCALARS = (type(None), bool, int, float, str, bytes)
PLAIN: dict[str, type] = {"t": tuple, "f": frozenset, "l": list, "s": set, "q": deque, "d": dict, "C": Counter}
_TAGS = {**{kind: tag for tag, kind in PLAIN.items()}, MappingProxyType: "d"}
UNSET = ["-"]  # a slot of an object that has no value yet
REFERENCE = "r"


class PackingError(RallypointError):
    """A value cannot be written into a recording, or a recording holds a value that is not known here."""


@cache
def known() -> Mapping[str, Any]:
    """Every class and function that a module of `rallypoint.core` defines, by its tag."""
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(rallypoint.core.__path__, "rallypoint.core."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, (type, FunctionType)) and value.__module__ == module.name:
                found[_tag(value)] = value
    return MappingProxyType(found)


def pack(value: Any) -> Any:
    """Pack an event, an effect or another value that no longer changes. PackingError if it cannot be packed."""
    return _Packer(None).pack(value)


def pack_state(machine: Any) -> Any:
    """Pack a machine with everything it holds. PackingError if it cannot be packed.

    An object that it holds twice is one object again after `unpack`.
    """
    return _Packer({}).pack(machine)


class _Packer:
    def __init__(self, seen: dict[int, int] | None) -> None:
        self._seen = seen  # numbers of mutable objects, by id(); None: do not look for repeated objects

    def pack(self, value: Any) -> Any:
        kind = vars(type(value)).get("observed_class", type(value))  # of an observed machine: its original class
        if kind in _SCALARS:
            return value
        if kind is FunctionType:
            return [_known_tag(value)]
        if issubclass(kind, enum.Enum):
            return [_known_tag(kind), value.name]
        if is_made_whole(kind):
            return [_known_tag(kind), *(self.pack(getattr(value, name)) for name in names_of(kind))]
        if self._seen is not None and kind not in (tuple, frozenset):
            if id(value) in self._seen:
                return [REFERENCE, self._seen[id(value)]]
            self._seen[id(value)] = len(self._seen)
        if (plain := _TAGS.get(kind)) is not None:
            return [plain, *([value.maxlen] if kind is deque else []), *map(self.pack, _in_order(value))]
        tag = _known_tag(kind)
        parts = [self.pack(getattr(value, name)) if hasattr(value, name) else UNSET for name in names_of(kind)]
        parts += [self.pack(vars(value))] if hasattr(value, "__dict__") else []
        return [tag, *parts, *([self.pack(tuple(value))] if isinstance(value, list) else [])]


def _in_order(values: Any) -> Iterable[Any]:
    """A mapping's keys, each before its value; a set's members in an order that is the same in every process."""
    if isinstance(values, Mapping):
        return itertools.chain.from_iterable(values.items())
    if isinstance(values, (set, frozenset)):
        return sorted(values, key=lambda value: msgspec.msgpack.encode(pack(value)))
    return cast(Iterable[Any], values)


def _tag(kind: Any) -> str:
    return f"{kind.__module__.removeprefix('rallypoint.')}:{kind.__qualname__}"


def _known_tag(kind: Any) -> str:
    """The tag of a class or a function. PackingError if it is not one of `rallypoint.core`."""
    tag = _tag(kind)
    if known().get(tag) is not kind:
        raise PackingError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be recorded: machines, their events and their effects "
            "consist of numbers, texts, collections, and classes of rallypoint.core"
        )
    return tag


def is_made_whole(kind: type) -> bool:
    """True if the class makes its objects from all their fields, which never change: structs and NamedTuples."""
    return issubclass(kind, msgspec.Struct) or (issubclass(kind, tuple) and kind is not tuple)


@cache
def names_of(kind: Any) -> tuple[str, ...]:
    """The names of an object's fields or slots, those of its base classes first."""
    if is_made_whole(kind):
        return tuple(kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else kind._fields)
    names: list[str] = []
    for base in reversed(kind.__mro__):
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__weakref__", "__dict__"))


FORMAT = 3
LIMIT_BYTES = 64 << 20  # for one machine
SUFFIX = ".recording"
LENGTH = struct.Struct("<I")


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
        self._attempt(lambda: self._begin(machine))

    def called(self, machine: Any, call: Call) -> None:
        """Write a call. `machine` must be in the state after it."""
        self._attempt(lambda: self._write(call))
        if self._size > self._limit // 2:
            self._attempt(lambda: self._begin(machine))

    def close(self) -> None:
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
        record_bytes = memoryview(LENGTH.pack(len(data)) + data)
        self._size += len(record_bytes)
        while record_bytes:
            record_bytes = record_bytes[self._file.write(record_bytes) :]

    def _path(self, part: int) -> Path:
        return self._base.with_name(f"{self._base.name}.{part}{SUFFIX}")


@cache
def version() -> str:
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
    if isinstance(result, BaseException):
        return msgspec.structs.replace(call, result=f"{type(result).__name__}: {result}", raised=True)
    return msgspec.structs.replace(call, result=pack(result))
