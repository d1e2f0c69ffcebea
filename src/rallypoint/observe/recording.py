"""Recordings: files with all calls of one machine, and their results.

A file is a sequence of msgpack records, each after its length in 4 bytes. The first record is the `Beginning`: the
machine's name and whole state. Each other record is a `Call`. Every record is written to the kernel at once, so a
process that is killed loses at most the call in progress.

A recording has a size limit. When a file reaches half of it, the next file begins, again with the whole state, and the
file before the last is deleted. Each file can be replayed alone.

Machines, events and effects are plain msgpack data. A value that msgpack knows stays unchanged. Every other value
becomes a list whose first item is a tag: ``["t", 1, 2]`` is the tuple (1, 2), and ``["core.worker.slots:Filled", 3]``
is ``Filled(shard=3)``. Only the classes and functions of `rallypoint.core` have such a tag. Nothing is pickled, and no
name in a file is imported or called.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
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
_PLAIN: dict[str, type] = {"t": tuple, "f": frozenset, "l": list, "s": set, "q": deque, "d": dict, "C": Counter}
_TAGS = {**{kind: tag for tag, kind in _PLAIN.items()}, MappingProxyType: "d"}
_UNSET = ["-"]  # a slot of an object that has no value yet
_REFERENCE = "r"


class PackingError(RallypointError):
    """A value cannot be written into a recording, or a recording holds a value that is not known here."""


@cache
def _known() -> Mapping[str, Any]:
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


def unpack(data: Any) -> Any:
    """The value that `pack` or `pack_state` packed. PackingError if the data holds something unknown or damaged."""
    try:
        return _Unpacker().unpack(data)
    except PackingError:
        raise
    except Exception as error:  # a damaged value can break the methods of its own class: __hash__, __post_init__
        raise PackingError(f"the recording is damaged: {error}") from None


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
        if _is_made_whole(kind):
            return [_known_tag(kind), *(self.pack(getattr(value, name)) for name in _names_of(kind))]
        if self._seen is not None and kind not in (tuple, frozenset):
            if id(value) in self._seen:
                return [_REFERENCE, self._seen[id(value)]]
            self._seen[id(value)] = len(self._seen)
        if (plain := _TAGS.get(kind)) is not None:
            return [plain, *([value.maxlen] if kind is deque else []), *map(self.pack, _in_order(value))]
        tag = _known_tag(kind)
        parts = [self.pack(getattr(value, name)) if hasattr(value, name) else _UNSET for name in _names_of(kind)]
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
    if _known().get(tag) is not kind:
        raise PackingError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be recorded: machines, their events and their effects "
            "consist of numbers, texts, collections, and classes of rallypoint.core"
        )
    return tag


def _is_made_whole(kind: type) -> bool:
    """True if the class makes its objects from all their fields, which never change: structs and NamedTuples."""
    return issubclass(kind, msgspec.Struct) or (issubclass(kind, tuple) and kind is not tuple)


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    """The names of an object's fields or slots, those of its base classes first."""
    if _is_made_whole(kind):
        return tuple(kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else kind._fields)
    names: list[str] = []
    for base in reversed(kind.__mro__):
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__weakref__", "__dict__"))


class _Unpacker:
    def __init__(self) -> None:
        self._seen: list[Any] = []  # mutable objects, in the order of their numbers

    def unpack(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        if not data or not isinstance(data[0], str):
            raise PackingError(f"the recording is damaged: {data!r:.80} has no tag")
        tag, *parts = data
        if tag == _REFERENCE:
            if len(parts) != 1 or not isinstance(parts[0], int) or not 0 <= parts[0] < len(self._seen):
                raise PackingError(f"the recording is damaged: it has no value {parts!r:.80}")
            return self._seen[parts[0]]
        if tag in ("t", "f"):
            return _PLAIN[tag](map(self.unpack, parts))
        return self._collection(tag, parts) if tag in _PLAIN else self._object(tag, parts)

    def _collection(self, tag: str, parts: list[Any]) -> Any:
        value: Any = self._keep(deque(maxlen=parts.pop(0)) if tag == "q" else _PLAIN[tag]())
        if tag in ("d", "C"):
            for key, one in zip(parts[::2], parts[1::2], strict=True):
                value[self.unpack(key)] = self.unpack(one)
        else:
            (value.update if tag == "s" else value.extend)(map(self.unpack, parts))
        return value

    def _keep(self, value: Any) -> Any:
        self._seen.append(value)
        return value

    def _object(self, tag: str, parts: list[Any]) -> Any:
        kind = _known().get(tag)
        if kind is None:
            raise PackingError(f"the recording holds a {tag}, which this version of Rallypoint does not know")
        if isinstance(kind, FunctionType):
            return kind
        if issubclass(kind, enum.Enum):
            if len(parts) != 1 or parts[0] not in kind.__members__:
                raise PackingError(f"the recording holds {parts!r:.80}, which is no {kind.__name__}")
            return kind[parts[0]]
        names, value = _names_of(kind), None if _is_made_whole(kind) else self._keep(kind.__new__(kind))
        has_dict, is_list = hasattr(value, "__dict__"), isinstance(value, list)
        if len(parts) != (wanted := len(names) + has_dict + is_list):
            raise PackingError(
                f"the recording's {tag} has {len(parts)} fields, and {wanted} here: use the same version"
            )
        if value is None:
            return kind(**dict(zip(names, map(self.unpack, parts), strict=True)))
        for name, part in zip(names, parts, strict=False):
            if part != _UNSET:
                object.__setattr__(value, name, self.unpack(part))
        if has_dict:
            vars(value).update(self.unpack(parts[len(names)]))
        if isinstance(value, list):
            value.extend(self.unpack(parts[-1]))
        return value


FORMAT = 2
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
