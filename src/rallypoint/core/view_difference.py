"""A view as the difference to an earlier one: of 10,000 members one dies, and some hundred bytes say so.

    base 3.7                          difference to 3.7                 view 3.8
    workers w0 w1 w2          ->      gone: position 1          ->      w0 w2
    replicas w1: (1,)                 gone: w1, entries w2: (1, 2)      w2: (1, 2)

A difference names its base by number, and carries a digest of the view that it must lead to. So a wrong base, or a
wrong difference, is found by who applies it, and is never taken for a view.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from rallypoint.core.typed import build_now
from rallypoint.core.view import Assignment, Incoming, Member, View, ViewNumber

_K = TypeVar("_K", int, str)
_V = TypeVar("_V")
_DIGEST_BYTES = 16
_MEMBERS = ("workers", "servers", "aggregators")
_ENTRIES = ("primary", "backup", "paired", "homed", "contributors", "aggregator_of", "speeds", "incoming")
_LARGE: dict[str, Any] = {"assignments": (), **dict.fromkeys(_MEMBERS, ()), **{name: {} for name in _ENTRIES}}


class WrongBase(ValueError):
    """This difference does not lead from this view to another one."""


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """Members that are gone, by position in the base, and those that are new, by position in the view."""

    gone: tuple[int, ...] = ()
    new: tuple[tuple[int, Member], ...] = ()


class Entries(msgspec.Struct, Generic[_K, _V], frozen=True, array_like=True):
    """Keys of a table that are gone, and entries that are new or have changed."""

    gone: tuple[_K, ...] = ()
    new: dict[_K, _V] = {}


class Reassigned(msgspec.Struct, frozen=True, array_like=True):
    """An assignment from step `start` on: number `base` of the earlier view's (-1: none), with these changes."""

    start: int
    base: int
    replicas: Entries[str, tuple[int, ...]]


class ViewDifference(msgspec.Struct, frozen=True):
    """What leads from the view with the number `base` to another one.

    Attributes:
        base: the number of the view that it is applied to.
        rest: the other view, without its members and its tables.
        digest: of the whole other view: see `digest_of`.
        assignments: all of the other view, as changes.
        workers, servers, aggregators, primary, backup, paired, homed, contributors, aggregator_of, speeds, incoming:
            the changes of these.
    """

    base: ViewNumber
    rest: View
    digest: Annotated[bytes, msgspec.Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]
    assignments: tuple[Reassigned, ...]
    workers: Moved
    servers: Moved
    aggregators: Moved
    primary: Entries[int, str]
    backup: Entries[int, str]
    paired: Entries[int, ViewNumber]
    homed: Entries[int, ViewNumber]
    contributors: Entries[str, tuple[int, ...]]
    aggregator_of: Entries[str, str]
    speeds: Entries[str, float]
    incoming: Entries[int, Incoming] = Entries()


build_now(ViewDifference)


def canonical(view: View) -> View:
    """The same view, with every table in the order of its keys: equal views then have equal bytes."""
    tables = {name: dict(sorted(getattr(view, name).items())) for name in _ENTRIES}
    assignments = tuple(Assignment(one.start, dict(sorted(one.replicas.items()))) for one in view.assignments)
    return msgspec.structs.replace(view, assignments=assignments, **tables)


def digest_of(view: View) -> bytes:
    """The digest of a `canonical` view: 16 bytes. Equal views have equal ones."""
    return hashlib.blake2b(msgspec.msgpack.encode(view), digest_size=_DIGEST_BYTES).digest()


def difference(base: View, view: View) -> ViewDifference:
    """What leads from `base` to `view`. `view` must be `canonical`."""
    changes: dict[str, Any] = {name: _moved(getattr(base, name), getattr(view, name)) for name in _MEMBERS}
    changes |= {name: _entries(getattr(base, name), getattr(view, name)) for name in _ENTRIES}
    assignments = tuple(_reassigned(base.assignments, one) for one in view.assignments)
    rest = msgspec.structs.replace(view, **_LARGE)
    return ViewDifference(base.number, rest, digest_of(view), assignments, **changes)


def apply(change: ViewDifference, base: View) -> View:
    """The view to which `change` leads from `base`; it is `canonical`. WrongBase if it does not lead to one."""
    if change.base != base.number:
        raise WrongBase(f"a difference to view {change.base}, and view {base.number} is here")
    tables: dict[str, Any] = {name: _joined(getattr(base, name), getattr(change, name)) for name in _MEMBERS}
    tables |= {name: _changed(getattr(base, name), getattr(change, name)) for name in _ENTRIES}
    assignments = tuple(_assignment(base.assignments, one) for one in change.assignments)
    view = canonical(msgspec.structs.replace(change.rest, assignments=assignments, **tables))
    if digest_of(view) != change.digest:
        raise WrongBase(f"a difference that does not lead from view {base.number} to view {view.number}")
    return view


def _moved(base: Sequence[Member], members: Sequence[Member]) -> Moved:
    here, before = set(members), set(base)
    if [one for one in base if one in here] != [one for one in members if one in before]:
        return Moved(tuple(range(len(base))), tuple(enumerate(members)))
    gone = tuple(position for position, one in enumerate(base) if one not in here)
    return Moved(gone, tuple((position, one) for position, one in enumerate(members) if one not in before))


def _joined(base: Sequence[Member], change: Moved) -> tuple[Member, ...]:
    gone, new = set(change.gone), dict(change.new)
    kept = [one for position, one in enumerate(base) if position not in gone]
    rest, members = iter(kept), list[Member]()
    for position in range(len(kept) + len(new)):
        if (one := new.get(position) or next(rest, None)) is None:
            raise WrongBase("a difference with a member at a position that the view does not have")
        members.append(one)
    return tuple(members)


def _entries(base: dict[_K, _V], table: dict[_K, _V]) -> Entries[_K, _V]:
    gone = tuple(key for key in base if key not in table)
    none = object()
    return Entries(gone, {key: value for key, value in table.items() if base.get(key, none) != value})


def _changed(base: dict[Any, _V], change: Entries[Any, _V]) -> dict[Hashable, _V]:
    table = {**base, **change.new}
    for key in change.gone:
        table.pop(key, None)
    return table


def _reassigned(base: Sequence[Assignment], assignment: Assignment) -> Reassigned:
    """As changes to the last assignment of the base, or to the one of the same start if these are fewer."""
    alike = [number for number, one in enumerate(base) if one.start == assignment.start or number == len(base) - 1]
    found = [Reassigned(assignment.start, n, _entries(base[n].replicas, assignment.replicas)) for n in alike]
    found.append(Reassigned(assignment.start, -1, Entries((), assignment.replicas)))
    return min(found, key=lambda one: len(one.replicas.gone) + len(one.replicas.new))


def _assignment(base: Sequence[Assignment], change: Reassigned) -> Assignment:
    if not -1 <= change.base < len(base):
        raise WrongBase(f"a difference to assignment {change.base} of {len(base)}")
    before = base[change.base].replicas if change.base >= 0 else {}
    return Assignment(change.start, _changed(before, change.replicas))  # type: ignore[arg-type]
