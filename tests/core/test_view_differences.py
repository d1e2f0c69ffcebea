"""A view as the difference to an earlier one leads to that view or to an error, never to another view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.view import (
    Assignment,
    Entries,
    Lease,
    Member,
    Moved,
    Reassigned,
    StandingOrders,
    View,
    ViewDifference,
    ViewNumber,
    WrongBase,
    apply,
    canonical,
    difference,
    digest_of,
)

_NAMES = st.sampled_from([f"m{number}" for number in range(6)])
_NUMBERS = st.builds(ViewNumber, st.integers(0, 2), st.integers(0, 9))
_MEMBERS = st.lists(
    st.builds(Member, _NAMES, st.just("host"), incarnation=st.integers(1, 3)), max_size=6, unique_by=lambda one: one.id
).map(tuple)
_REPLICAS = st.dictionaries(_NAMES, st.lists(st.integers(0, 9), max_size=3).map(tuple))
_SHARDS = st.integers(0, 9)
VIEWS = st.builds(
    View, _NUMBERS, _NUMBERS, _MEMBERS, _MEMBERS,
    st.lists(st.builds(Assignment, st.integers(0, 20), _REPLICAS), max_size=3).map(tuple),
    st.dictionaries(_SHARDS, _NAMES), st.dictionaries(_SHARDS, _NAMES), st.dictionaries(_SHARDS, _NUMBERS),
    st.dictionaries(_SHARDS, _NUMBERS), contributors=_REPLICAS, aggregators=_MEMBERS,
    aggregator_of=st.dictionaries(_NAMES, _NAMES), speeds=st.dictionaries(_NAMES, st.floats(0.1, 9)),
    orders=st.builds(
        StandingOrders, lease=st.none() | st.builds(Lease, st.integers(0, 9), _NAMES, st.integers(0, 9)),
        paused=st.none() | st.integers(0, 9),
    ),
)  # fmt: skip


def large(workers: int = 2000, servers: int = 200, **changed: Any) -> View:
    """A view in which worker w computes replica w."""
    names = [f"worker-{number:05}" for number in range(workers)]
    homes = [f"server-{number:05}" for number in range(servers)]
    primary = {shard: homes[shard % servers] for shard in range(8 * servers)}
    number = ViewNumber(1, 1)
    replicas = {name: (index,) for index, name in enumerate(names)}
    view = View(
        number, number, tuple(Member(name, f"host-{name}", "", i) for i, name in enumerate(names, 1)),
        tuple(Member(name, f"host-{name}", "10.0.0.1:40001", i) for i, name in enumerate(homes, workers + 1)),
        (Assignment(0, replicas),), primary, homed=dict.fromkeys(primary, number), contributors=replicas,
    )  # fmt: skip
    return msgspec.structs.replace(view, **changed)


def over_the_wire(change: ViewDifference) -> ViewDifference:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=ViewDifference)


@given(VIEWS, VIEWS)
def test_a_difference_leads_from_any_view_to_any_other(base: View, view: View) -> None:
    reached = apply(over_the_wire(difference(base, canonical(view))), base)
    assert reached == view
    assert msgspec.msgpack.encode(reached) == msgspec.msgpack.encode(canonical(view)), "byte for byte: its proof holds"


@pytest.mark.slow
@given(VIEWS, VIEWS, VIEWS)
def test_a_wrong_base_is_found_also_under_the_right_number(base: View, view: View, other: View) -> None:
    change = difference(base, canonical(view))
    other = msgspec.structs.replace(other, number=base.number)
    try:
        assert apply(change, other) == view
    except WrongBase:
        assert other != base


@pytest.mark.slow
@given(VIEWS, VIEWS, st.integers(0, 1 << 30), st.integers(1, 255))
def test_a_changed_byte_is_found_or_changes_nothing(base: View, view: View, place: int, bits: int) -> None:
    data = bytearray(msgspec.msgpack.encode(difference(base, canonical(view))))
    data[place % len(data)] ^= bits
    try:
        change = msgspec.msgpack.decode(data, type=ViewDifference)
        reached = apply(change, base)
    except (msgspec.DecodeError, UnicodeDecodeError, WrongBase):
        return
    assert reached == view


@pytest.mark.parametrize("changed", [
    {"assignments": (Reassigned(0, 7, Entries()),)}, {"assignments": (Reassigned(0, -2, Entries()),)},
    {"workers": Moved((), ((5, Member("w9", "host")),))}, {"servers": Moved((0,))}, {"digest": bytes(16)},
    {"base": ViewNumber(1, 2)},
], ids=["assignment", "negative", "position", "gone", "digest", "base"])  # fmt: skip
def test_what_does_not_fit_is_an_error_of_its_own(changed: Mapping[str, Any]) -> None:
    base = large(3, 2)
    view = canonical(msgspec.structs.replace(base, number=ViewNumber(1, 2), workers=base.workers[:2]))
    change = difference(base, view)
    assert apply(change, base) == view
    with pytest.raises(WrongBase):
        apply(msgspec.structs.replace(change, **changed), base)


def test_the_order_of_a_table_does_not_change_the_digest() -> None:
    one = large(3, 2)
    other = msgspec.structs.replace(one, primary=dict(reversed(one.primary.items())))
    assert list(one.primary) != list(other.primary)
    assert digest_of(canonical(one)) == digest_of(canonical(other))


def test_a_death_among_thousands_is_some_hundred_bytes() -> None:
    base = large()
    assigned = dict(base.assignments[0].replicas)
    (orphan,) = assigned.pop("worker-00700")
    assigned["worker-00701"] = (*assigned["worker-00701"], orphan)
    view = canonical(msgspec.structs.replace(
        base, number=ViewNumber(1, 2), workers=base.workers[:700] + base.workers[701:],
        assignments=(Assignment(0, assigned),), contributors={**base.contributors, "worker-00701": (701, 700)},
    ))  # fmt: skip
    change = msgspec.msgpack.encode(difference(base, view))
    assert len(change) < 1000
    assert len(msgspec.msgpack.encode(view)) > 200_000
