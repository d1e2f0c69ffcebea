"""Placement: every shard has a home, the load is even, and only what must move moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.layout import Shard
from rallypoint.core.placing.placement import _within, place, place_backups, weighted_ranking


def _shards(words: Sequence[int]) -> list[Shard]:
    shards, start = [], 0
    for index, size in enumerate(words):
        shards.append(Shard(index, 0, start, start + size))
        start += size
    return shards


def _servers(count: int) -> list[str]:
    return [f"server{i}" for i in range(count)]


def _loads(shards: Sequence[Shard], placed: dict[int, str]) -> Counter[str]:
    loads: Counter[str] = Counter()
    for shard in shards:
        loads[placed[shard.index]] += shard.nbytes
    return loads


def _moved(before: dict[int, str], after: dict[int, str]) -> set[int]:
    return {shard for shard in before if before[shard] != after[shard]}


_SIZES = st.lists(st.integers(1, 64), max_size=60)
_EQUAL = st.integers(0, 80).map(lambda count: [16] * count)


@given(_SIZES, st.integers(1, 8), st.randoms(use_true_random=False))
def test_every_shard_is_placed_on_a_server_that_is_here_whatever_order_servers_are_listed_in(
    sizes: list[int], count: int, random: object
) -> None:
    shards, servers = _shards(sizes), _servers(count)
    placed = place(shards, servers)
    assert list(placed) == [shard.index for shard in shards]
    assert set(placed.values()) <= set(servers)
    random.shuffle(servers)  # type: ignore[attr-defined]
    assert place(shards, servers) == placed


@given(_EQUAL, st.integers(1, 8))
def test_equal_shards_are_assigned_within_the_even_share_rounded_up(sizes: list[int], count: int) -> None:
    shards = _shards(sizes)
    loads = _loads(shards, place(shards, _servers(count)))
    assert max(loads.values(), default=0) <= -(-len(sizes) // count) * 64


@given(_EQUAL, st.integers(2, 8), st.data())
def test_when_a_server_leaves_only_its_shards_move(sizes: list[int], count: int, data: st.DataObject) -> None:
    shards, servers = _shards(sizes), _servers(count)
    before = place(shards, servers)
    gone = data.draw(st.sampled_from(servers))
    after = place(shards, [server for server in servers if server != gone], before)
    assert _moved(before, after) == {shard for shard, home in before.items() if home == gone}
    assert max(_loads(shards, after).values(), default=0) <= -(-len(sizes) // (count - 1)) * 64


@given(_EQUAL, st.integers(1, 8))
def test_when_a_server_joins_shards_move_to_it_alone_and_nobody_keeps_more_than_a_quarter_over_its_share(
    sizes: list[int], count: int
) -> None:
    shards, servers = _shards(sizes), _servers(count)
    before = place(shards, servers)
    after = place(shards, [*servers, "newcomer"], before)
    room = -(-len(sizes) // (count + 1))
    kept = int(room * 64 * 1.25) // 64
    surplus = sum(max(0, load // 64 - kept) for load in _loads(shards, before).values())
    assert len(_moved(before, after)) == surplus  # the least that leaves nobody above what is tolerated
    assert max(_loads(shards, after).values(), default=0) <= kept * 64


def test_a_server_a_little_over_its_share_keeps_its_shards_when_another_joins() -> None:
    shards = _shards([16] * 10)
    before = dict.fromkeys(range(5), "a") | dict.fromkeys(range(5, 10), "b")
    assert place(shards, ["a", "b", "c"], before) == before  # a share is 4 now, a quarter more is 5
    crowded = dict.fromkeys(range(7), "a") | dict.fromkeys(range(7, 10), "b")
    moved = _moved(crowded, place(shards, ["a", "b", "c"], crowded))
    assert len(moved) == 2
    assert all(crowded[shard] == "a" for shard in moved)


@given(_SIZES, st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_a_shard_of_any_size_moves_only_if_its_server_is_gone_or_full(
    sizes: list[int], before_count: int, after_count: int, first: int
) -> None:
    shards = _shards(sizes)
    before = place(shards, _servers(before_count))
    servers = [f"server{i}" for i in range(first, first + after_count)]
    after = place(shards, servers, before)
    share = sum(shard.nbytes for shard in shards) / after_count
    kept = _loads([s for s in shards if after[s.index] == before[s.index]], after)
    for index in _moved(before, after):
        home = before[index]
        assert home not in servers or kept[home] + shards[index].nbytes > share


# ---- backups ----


@given(_SIZES, st.integers(2, 6), st.integers(1, 4), st.data())
def test_every_backup_is_on_another_server_and_on_another_host_if_there_is_one(
    sizes: list[int], count: int, hosts: int, data: st.DataObject
) -> None:
    shards, servers = _shards(sizes), _servers(count)
    host = {server: f"host{data.draw(st.integers(0, hosts - 1))}" for server in servers}
    primary = place(shards, servers)
    backup = place_backups(shards, servers, primary, hosts=host)
    assert list(backup) == [shard.index for shard in shards]
    for shard, home in primary.items():
        assert backup[shard] in servers
        assert backup[shard] != home
        if len(set(host.values())) > 1:
            assert host[backup[shard]] != host[home]


@given(_SIZES, st.integers(2, 6), st.data())
def test_a_backup_stays_as_long_as_its_server_is_here_and_is_not_the_primary(
    sizes: list[int], count: int, data: st.DataObject
) -> None:
    shards, servers = _shards(sizes), _servers(count)
    primary = place(shards, servers)
    before = place_backups(shards, servers, primary)
    gone = data.draw(st.sampled_from(servers))
    here = [*(server for server in servers if server != gone), "newcomer"]
    primary = {shard: before[shard] if home == gone else home for shard, home in primary.items()}  # promoted
    after = place_backups(shards, here, primary, before)
    for shard, home in before.items():
        assert after[shard] in here
        assert after[shard] != primary[shard]
        if home in here and home != primary[shard]:
            assert after[shard] == home


@given(st.integers(60, 120), st.integers(3, 6))
def test_backups_of_one_server_are_not_all_on_one_other(count: int, servers: int) -> None:
    shards, names = _shards([16] * count), _servers(servers)
    primary = place(shards, names)
    backup = place_backups(shards, names, primary)
    for home in names:
        assert len({backup[shard] for shard in primary if primary[shard] == home}) > 1


def test_one_server_alone_has_nobody_to_back_it_up() -> None:
    shards = _shards([16] * 3)
    assert place_backups(shards, ["a"], place(shards, ["a"])) == {}


@given(st.integers(0, 80), st.integers(1, 8))
def test_neighbours_are_on_different_servers(count: int, servers: int) -> None:
    """They belong to one layer, and leave together."""
    placed = place(_shards([16] * count), _servers(servers))
    for first in range(0, count - servers + 1, servers):
        assert len({placed[shard] for shard in range(first, first + servers)}) == servers


def test_placement_is_the_same_in_every_process() -> None:
    assert place(_shards([16] * 6), ["a", "b", "c"]) == {0: "a", 1: "c", 2: "b", 3: "c", 4: "a", 5: "b"}


def test_shards_have_different_favourites() -> None:
    servers = _servers(4)
    favourites = Counter(place([Shard(index, 0, 0, 16)], servers)[index] for index in range(400))
    assert all(60 < favourites[server] < 140 for server in servers)


def test_without_a_server_there_is_no_placement() -> None:
    with pytest.raises(ValueError, match="no server"):
        place(_shards([1]), [])


# ---- Servers whose links are not alike get bytes in proportion to them, and little moves when that changes ----


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
