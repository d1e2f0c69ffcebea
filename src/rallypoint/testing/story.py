"""The story of one shard, from a machine's recording: every change with its cause."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import msgspec

from rallypoint.core.shard.server import On
from rallypoint.core.view import View


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
