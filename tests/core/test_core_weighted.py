"""Servers whose links are not alike get bytes in proportion to them, and little moves when that changes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_core_placement import _SIZES, _loads, _shards

from rallypoint.core.placing.placement import _within, place, place_backups, weighted_ranking

NAMES = ("a", "b", "c", "d")
_WEIGHTS = st.lists(st.sampled_from([0.125, 0.5, 1.0, 1.3, 4.0]), min_size=1, max_size=6).map(
    lambda values: {f"server{index}": value for index, value in enumerate(values)}
)


def test_a_server_with_half_the_link_gets_half_the_bytes() -> None:
    shards = _shards([16] * 70)
    loads = _loads(shards, place(shards, NAMES, weights={"a": 1.0, "b": 0.5, "c": 1.0, "d": 1.0}))
    assert {name: loads[name] // 64 for name in NAMES} == {"a": 20, "b": 10, "c": 20, "d": 20}


def test_servers_that_are_alike_are_placed_as_without_weights() -> None:
    shards = _shards([16] * 70)
    assert place(shards, NAMES, weights={}) == place(shards, NAMES)


@given(_SIZES, _WEIGHTS)
def test_no_server_has_more_than_its_share_and_one_largest_shard(sizes: list[int], weights: dict[str, float]) -> None:
    shards = _shards(sizes)
    loads = _loads(shards, place(shards, [*weights], weights=weights))
    total, largest = sum(shard.nbytes for shard in shards), max((shard.nbytes for shard in shards), default=0)
    for server, weight in weights.items():
        assert loads[server] <= total * weight / sum(weights.values()) + largest + 1e-6


@given(_SIZES, _WEIGHTS)
def test_nothing_moves_while_servers_and_weights_stay(sizes: list[int], weights: dict[str, float]) -> None:
    shards = _shards(sizes)
    placed = place(shards, [*weights], weights=weights)
    assert place(shards, [*weights][::-1], placed, weights=dict(reversed(weights.items()))) == placed


@given(st.integers(20, 120), st.integers(2, 6), st.sampled_from([0.25, 0.5, 0.8]))
def test_when_a_link_gets_slower_only_its_own_shards_move_and_no_more_than_must(
    count: int, servers: int, slow: float
) -> None:
    shards, names = _shards([16] * count), [f"server{index}" for index in range(servers)]
    before = place(shards, names)
    weights = dict.fromkeys(names, 1.0) | {"server0": slow}
    after = place(shards, names, before, weights=weights)
    moved = {shard for shard, home in before.items() if after[shard] != home}
    assert {before[shard] for shard in moved} <= {"server0"}
    share = count * slow / (servers - 1 + slow)
    assert len(moved) <= max(0.0, list(before.values()).count("server0") - share) + 1


def test_a_slow_server_has_its_share_of_every_part_of_the_layout() -> None:
    """Shards leave in the layout's order: a server that has them all at one end is idle at the other."""
    shards = _shards([16] * 140)
    weights = dict.fromkeys(NAMES, 1.0) | {"b": 0.5}
    even = place(shards, NAMES)
    for placed in (place(shards, NAMES, weights=weights), place(shards, NAMES, even, weights=weights)):
        counts = [sum(placed[shard] == "b" for shard in range(first, first + 35)) for first in range(0, 140, 35)]
        assert all(3 <= count <= 7 for count in counts), counts


def test_the_ranking_prefers_servers_by_their_weights() -> None:
    weights = {"a": 1.0, "b": 0.5, "c": 1.0, "d": 0.5}
    first = Counter(weighted_ranking(shard, weights)[0] for shard in range(3000))
    assert all(abs(first[server] / 3000 - weight / 3) < 0.03 for server, weight in weights.items())


def test_weighted_placement_is_the_same_in_every_process() -> None:
    placed = place(_shards([16] * 6), ["a", "b"], weights={"a": 2.0, "b": 1.0})
    assert "".join(placed.values()) == "aaabab"


# ---- backups ----


def test_backups_are_in_another_rack_where_there_is_one() -> None:
    shards, hosts = _shards([16] * 40), {name: name for name in NAMES}
    racks = {"a": "left", "b": "left", "c": "right", "d": "right"}
    primary = place(shards, NAMES)
    backup = place_backups(shards, NAMES, primary, hosts=hosts, racks=racks)
    assert all(racks[backup[shard]] != racks[home] for shard, home in primary.items())
    assert set(backup.values()) == set(NAMES)


@pytest.mark.parametrize("racks", [{}, dict.fromkeys(NAMES, ""), dict.fromkeys(NAMES, "one"), {"a": "one"}])
def test_where_no_other_rack_is_known_another_host_will_do(racks: dict[str, str]) -> None:
    shards, hosts = _shards([16] * 40), {"a": "x", "b": "x", "c": "y", "d": "y"}
    primary = place(shards, NAMES)
    backup = place_backups(shards, NAMES, primary, hosts=hosts, racks=racks)
    assert all(hosts[backup[shard]] != hosts[home] for shard, home in primary.items())


def test_a_server_with_half_the_link_gets_half_the_backups() -> None:
    shards, weights = _shards([16] * 140), dict.fromkeys(NAMES, 1.0) | {"b": 0.5}
    primary = place(shards, NAMES, weights=weights)
    loads = Counter(place_backups(shards, NAMES, primary, weights=weights).values())
    assert 15 <= loads["b"] <= 25
    assert all(35 <= loads[name] <= 45 for name in "acd")


@pytest.mark.parametrize("bits", [0, 1, 1 << 63, (1 << 64) - 1])
def test_any_hash_gives_a_score(bits: int) -> None:
    """A number that rounding had made 0 or 1 would have no logarithm, or one to divide by that is 0."""
    assert 0.0 < _within(bits) < 1.0
