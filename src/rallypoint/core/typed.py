"""Types of numbers and names with their ranges; and msgspec's decoders, built before there are threads."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from rallypoint.errors import ConfigError, meant

LONGEST_NAME, LONGEST_TEXT = 200, 4000  # characters
LONGEST_LINE = 500  # characters of a text of somebody else in a log line
MOST_METRICS, MOST_MEMBERS = 1000, 10_000
MOST_PUSHES = 1 << 30  # of a contributor to a key of a store without `steps=`

_CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"  # also what ends a line or changes its direction
Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME, pattern=f"^[^{_CONTROLS}]*$")]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # a step, a replica, a shard: as in a frame's header
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
MOST_NORM = 1e300
Norm = Annotated[float, msgspec.Meta(ge=0.0, le=MOST_NORM)]
Replicas = Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 16)]
# Ranges of settings: `config.checks` says in words what they allow
AboveZero = Annotated[float, msgspec.Meta(gt=0)]
FromZero = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
ShareOrZero = Annotated[float, msgspec.Meta(ge=0, le=1)]
Decay = Annotated[float, msgspec.Meta(ge=0, lt=1)]
CountFromZero = Annotated[int, msgspec.Meta(ge=0)]
CountFromOne = Annotated[int, msgspec.Meta(ge=1)]
HasSent = Literal["none", "some", "all"]  # which shards have all that a worker owes them at a step


def can_name(text: str) -> bool:
    """May this be a name in a message? It has no control characters, and is not long."""
    return len(text) <= LONGEST_NAME and text.isprintable()


def printable(text: str, longest: int = LONGEST_LINE) -> str:
    """The text as one line for a console: what is not printable is escaped, what is too long is cut.

    Example: ``printable("\\x1b[2J")`` is ``\\\\x1b[2J``. Text that changes its direction (U+202E) is escaped too.
    """
    cut = text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def counted(number: int, what: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {what}{'s' * (number != 1)}"


def named(names: Sequence[str], most: int = 5) -> str:
    """``a.py, b.py and 3 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def unnamed(figures: Mapping[Any, object]) -> str:
    """What is wrong with the names of these figures, or with their number, as the end of a sentence; "" if nothing."""
    if len(figures) > MOST_METRICS:
        return f"{len(figures)} figures: give at most {MOST_METRICS}"
    for name in figures:
        if isinstance(name, str) and not can_name(name):
            long = len(name) > LONGEST_NAME
            what = f"a name of {len(name)} characters, {name[:20]!r}...:" if long else f"the name {name!r}:"
            return f"{what} a name has at most {LONGEST_NAME} characters, and each is printable"
    return ""


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Return `typing.get_type_hints(kind)` with ranges; it compiles every hint anew each time it is asked."""
    return typing.get_type_hints(kind, include_extras=True)


def build_now(*types: Any) -> None:
    """Build msgspec's type information for `types` now. Call it at import, in each module that decodes these types.

    Otherwise msgspec builds it at the first use, and two threads that do so at the same time crash the process (0.22,
    with the GIL: building runs Python code in between). A decoder that is constructed at import works as well.
    """
    for kind in types:
        msgspec.msgpack.Decoder(kind)


# The type of settings that scripts make: a wrong call is answered by a sentence.


EXAMPLES = {"steps": 16, "staleness": 2}  # of what modes need


class SettingsType(type(msgspec.Struct)):  # type: ignore[misc]
    """The type of modes and optimizers. A call with unknown settings, or without a needed one, raises ConfigError."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        fields = cls.__struct_fields__
        if unknown := [name for name in settings if name not in fields]:
            hint = meant(unknown[0], fields) or (f": there are {', '.join(fields)}" if fields else "")
            raise ConfigError(f"rp.{cls.__name__} has no setting {unknown[0]!r}{hint}")
        needed = fields[len(values) : len(fields) - len(cls.__struct_defaults__)]
        if missing := [name for name in needed if name not in settings]:
            raise ConfigError(f"rp.{cls.__name__} needs {missing[0]}: write {written(cls)}")
        return super().__call__(*values, **settings)


class PartType(SettingsType):
    """The type of settings of a job that belong together (`Network`): each remembers what its script has said."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        if values:
            raise ConfigError(f"rp.{cls.__name__} takes settings by name, such as {cls.__struct_fields__[0]}=")
        part = super().__call__(**settings)
        part.__dict__["said"] = settings
        return part


def said(part: msgspec.Struct) -> Mapping[str, Any]:
    """The settings of a part that its script has said; all of them, where no script has made it."""
    found: Mapping[str, Any] | None = part.__dict__.get("said")
    return msgspec.structs.asdict(part) if found is None else found


def written(kind: type[msgspec.Struct]) -> str:
    """How a script writes an object of this class, with what it needs: ``rp.LocalSteps(steps=16)``."""
    needed = kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
    return f"rp.{kind.__name__}({', '.join(f'{name}={EXAMPLES[name]}' for name in needed if name in EXAMPLES)})"
