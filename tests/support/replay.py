"""``python tests/support/replay.py FILE...``: runs a machine's recording again and compares its answers.

A process writes a recording when ``RALLYPOINT_RECORD=FOLDER`` is set (`observe/recording.py`). In a test:

    replay(Path("worker0-4711.1.recording")).check()
"""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any

import msgspec
import typer

from rallypoint.core.shard.server import On
from rallypoint.core.view import View
from rallypoint.errors import RallypointError
from rallypoint.observe.observed import changing_methods
from rallypoint.observe.recording import (
    FORMAT,
    LENGTH,
    PLAIN,
    REFERENCE,
    SUFFIX,
    UNSET,
    Beginning,
    Call,
    PackingError,
    is_made_whole,
    known,
    names_of,
    pack,
    version,
)

CALL_S = 5.0  # seconds of processor time for one call; a machine needs milliseconds
_MOST = 1 << 30  # bytes of one record
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)  # what msgspec raises


# ---- what a recording holds ----


def unpack(data: Any) -> Any:
    """The value that `pack` or `pack_state` packed. PackingError if the data holds something unknown or damaged."""
    try:
        return _Unpacker().unpack(data)
    except PackingError:
        raise
    except Exception as error:  # a damaged value can break the methods of its own class: __hash__, __post_init__
        raise PackingError(f"the recording is damaged: {error}") from None


class _Unpacker:
    def __init__(self) -> None:
        self._seen: list[Any] = []  # mutable objects, in the order of their numbers

    def unpack(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        if not data or not isinstance(data[0], str):
            raise PackingError(f"the recording is damaged: {data!r:.80} has no tag")
        tag, *parts = data
        if tag == REFERENCE:
            if len(parts) != 1 or not isinstance(parts[0], int) or not 0 <= parts[0] < len(self._seen):
                raise PackingError(f"the recording is damaged: it has no value {parts!r:.80}")
            return self._seen[parts[0]]
        if tag in ("t", "f"):
            return PLAIN[tag](map(self.unpack, parts))
        return self._collection(tag, parts) if tag in PLAIN else self._object(tag, parts)

    def _collection(self, tag: str, parts: list[Any]) -> Any:
        value: Any = self._keep(deque(maxlen=parts.pop(0)) if tag == "q" else PLAIN[tag]())
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
        kind = known().get(tag)
        if kind is None:
            raise PackingError(f"the recording holds a {tag}, which this version of Rallypoint does not know")
        if isinstance(kind, FunctionType):
            return kind
        if issubclass(kind, enum.Enum):
            if len(parts) != 1 or parts[0] not in kind.__members__:
                raise PackingError(f"the recording holds {parts!r:.80}, which is no {kind.__name__}")
            return kind[parts[0]]
        names, value = names_of(kind), None if is_made_whole(kind) else self._keep(kind.__new__(kind))
        has_dict, is_list = hasattr(value, "__dict__"), isinstance(value, list)
        if len(parts) != (wanted := len(names) + has_dict + is_list):
            raise PackingError(
                f"the recording's {tag} has {len(parts)} fields, and {wanted} here: use the same version"
            )
        if value is None:
            return kind(**dict(zip(names, map(self.unpack, parts), strict=True)))
        for name, part in zip(names, parts, strict=False):
            if part != UNSET:
                object.__setattr__(value, name, self.unpack(part))
        if has_dict:
            vars(value).update(self.unpack(parts[len(names)]))
        if isinstance(value, list):
            value.extend(self.unpack(parts[-1]))
        return value


class RecordingError(RallypointError):
    """A file is not a recording, or cannot be read."""


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
            while len(head := file.read(LENGTH.size)) == LENGTH.size:
                (length,) = LENGTH.unpack(head)
                if length > _MOST:
                    raise RecordingError(f"{path} is no recording of a machine, or is damaged")
                record = file.read(length)
                if len(record) < length:
                    return  # the process was killed in the middle
                yield record
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error}") from None


# ---- a machine that runs it again ----


class _TooLong(BaseException):
    """A call does not end. No Exception: the machine must not catch it, and it is no result of the machine."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Call number `number` (from 1) had another result than in the recording."""

    number: int
    call: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"call {self.number}: {self.call}\n  recorded: {self.expected}\n  now:      {self.got}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: the machine after its last call, or at the first difference."""

    path: Path
    name: str
    recorded_by: str
    machine: Any
    calls: int
    difference: Difference | None = None

    def check(self) -> None:
        """Raise AssertionError with the first difference, if there is one."""
        assert self.difference is None, f"{self.path}, {self.name}: {self.difference}"


def replay(path: Path) -> Replayed:
    """Run a recording again, up to the first difference; the machine's rules are checked after each call.

    Raises RecordingError when the file is no recording, or a call does not end (a damaged number may make a machine
    loop; only the main thread can stop that). Raises PackingError when it holds what this version does not know.
    """
    first, calls = read(path)
    machine = unpack(first.state)
    number = 0
    for number, call in enumerate(calls, 1):
        try:
            with _bounded():
                got, raised = _call(machine, call)
        except _TooLong:
            raise RecordingError(
                f"{path}: call {number}, {call.method}, has not ended after {CALL_S:g} s of processor time: the "
                "recording is damaged, or the machine loops for ever"
            ) from None
        if (difference := _difference(number, call, got, raised)) is not None:
            return Replayed(path, first.name, first.version, machine, number, difference)
    return Replayed(path, first.name, first.version, machine, number)


def told(path: Path) -> Iterator[Told]:
    """Yield all calls of a recording, in order."""
    _, calls = read(path)
    for number, call in enumerate(calls, 1):
        result = call.result if call.raised else unpack(call.result)
        yield Told(number, call.time, call.method, [unpack(a) for a in call.arguments], result)


def recordings(paths: list[Path]) -> list[Path]:
    """Return the files themselves, and the recordings inside folders."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    return found


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise _TooLong in the body after CALL_S. On the main thread only: others get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def too_long(number: int, frame: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, too_long)
    # Repeated: an exception that is raised inside a callback of the garbage collector is lost
    signal.setitimer(signal.ITIMER_VIRTUAL, CALL_S, CALL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _call(machine: Any, call: Call) -> tuple[Any, bool]:
    """Make the call. Returns the result or the exception, and whether it was raised."""
    if call.method not in changing_methods(type(machine)):
        raise RecordingError(f"a {type(machine).__name__} has no {call.method}(): replay it with the same version")
    arguments = [unpack(argument) for argument in call.arguments]
    keywords = {name: unpack(value) for name, value in call.keywords.items()}
    try:
        result = getattr(machine, call.method)(*arguments, **keywords)
        validate = getattr(machine, "validate", None)
        if validate is not None:
            validate()
    except Exception as error:  # an exception of the machine is a result to compare
        return f"{type(error).__name__}: {error}", True
    return result, False


def _difference(number: int, call: Call, got: Any, raised: bool) -> Difference | None:
    """Return how the result differs from the recorded one. Raises RecordingError when the two cannot be compared."""
    try:
        if raised == call.raised and _same(call, got):
            return None
        return Difference(number, _said(call), _answer(call), str(got) if raised else repr(got))
    except RallypointError:
        raise
    except Exception as error:  # if a value lacks a field, its class's __eq__ and __repr__ fail
        raise RecordingError(f"the recording is damaged: call {number} cannot be compared: {error}") from None


def _same(call: Call, got: Any) -> bool:
    if call.raised:
        return bool(call.result == got)
    return bool(call.result == pack(got) or unpack(call.result) == got)


def _said(call: Call) -> str:
    said = [repr(unpack(a)) for a in call.arguments] + [f"{k}={unpack(v)!r}" for k, v in call.keywords.items()]
    return f"{call.method}({', '.join(said)})"


def _answer(call: Call) -> str:
    return str(call.result) if call.raised else repr(unpack(call.result))


def _version_note(first: Beginning) -> str:
    return "" if first.version == version() else f" (recorded by version {first.version}, this is {version()})"


# ---- the story of one shard: every change with its cause ----


@dataclass(frozen=True, slots=True)
class Told:
    """One recorded call of a machine."""

    number: int
    time: float
    method: str
    arguments: list[Any]
    result: Any


def story(told: Iterable[Told], shard: int) -> list[str]:
    """Return a line for each call that concerned the shard, and below it a line for each effect on that shard.

    Of a view only the shard's homes are shown, and only when they differ from the view before.
    """
    lines: list[str] = []
    homes = ""
    for call in told:
        views = [part for argument in call.arguments for part in _parts(argument) if isinstance(part, View)]
        new_homes = _homes(views[0], shard) if views else homes
        effects = [effect for effect in _effects(call.result) if concerns(effect, shard)]
        if not (effects or new_homes != homes or _is_about(call, shard)):
            continue
        said = ", ".join(_short(argument, shard) for argument in call.arguments)
        lines.append(f"{call.number:7d} {_clock(call.time)} {call.method}({said})")
        lines += [f"                       -> {_short(effect, shard)}" for effect in effects]
        homes = new_homes
    return lines


def concerns(value: Any, shard: int) -> bool:
    """True if a `shard` or `shards` field in the value names this shard."""
    for part in _parts(value):
        if getattr(part, "shard", None) == shard or (_is_collection(part) and shard in part.shards):
            return True
    return False


def _is_collection(part: Any) -> bool:
    return isinstance(getattr(part, "shards", None), (tuple, list, set, frozenset, dict))


def _is_about(call: Told, shard: int) -> bool:
    """A machine of many shards gets the shard first: `handle(3, event)`."""
    about = call.method == "handle" and len(call.arguments) == 2 and call.arguments[0] == shard
    return about or any(concerns(argument, shard) for argument in call.arguments)


def _effects(result: Any) -> list[Any]:
    return result if isinstance(result, list) else []


def _parts(value: Any) -> Iterator[Any]:
    """Yield the value and everything in it."""
    yield value
    if isinstance(value, View):
        return  # a view names every shard
    if isinstance(value, msgspec.Struct):
        inner: Iterable[Any] = (getattr(value, name) for name in value.__struct_fields__)
    elif is_dataclass(value):
        inner = (getattr(value, field.name) for field in fields(value))
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    else:
        return
    for part in inner:
        yield from _parts(part)


def _homes(view: View, shard: int) -> str:
    backup = f", backup {view.backup[shard]}" if shard in view.backup else ""
    if shard in view.incoming:
        backup += f", {view.incoming[shard].server} is filled"
    return f"primary {view.primary.get(shard, 'nobody')}{backup}, generation {view.generation}"


def _short(value: Any, shard: int) -> str:
    if isinstance(value, On):
        return repr(value.effect)
    views = [part for part in _parts(value) if isinstance(part, View)]
    return f"view {views[0].number}: {_homes(views[0], shard)}" if views else repr(value)


def _clock(seconds: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}"


def main(
    paths: Annotated[list[Path], typer.Argument(help="Recordings, or folders of them.")],
    shard: Annotated[int, typer.Option("--story", help="Print what concerned this shard instead.")] = -1,
) -> None:
    """Run recordings of machines again: is what they answer the same?"""
    differences = 0
    try:
        for path in recordings(paths):
            if shard >= 0:
                print(f"{path}:")
                print("\n".join(story(told(path), shard)))
                continue
            replayed = replay(path)
            differences += replayed.difference is not None
            verdict = f"the same answers to {replayed.calls} calls" if replayed.difference is None else "DIFFERENT"
            print(f"{path}: {verdict}{_version_note(read(path)[0])}")
            if replayed.difference is not None:
                print(replayed.difference)
    except RallypointError as error:
        raise SystemExit(str(error)) from None
    raise typer.Exit(1 if differences else 0)


if __name__ == "__main__":
    typer.run(main)
