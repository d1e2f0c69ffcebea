"""Which part of a worker's port each of its links gets."""

from __future__ import annotations

import pytest

from rallypoint.core.view import Member, View, ViewNumber

SERVERS = tuple(Member(f"s{number}", "h", f"h:{number}") for number in range(4))


def parts(homes: list[int]) -> list[float]:
    """The parts of s0 to s3, where shard i is on server `homes[i]`."""
    primary = {shard: f"s{home}" for shard, home in enumerate(homes)}
    found = View(ViewNumber(1, 1), ViewNumber(1, 1), (), SERVERS, (), primary).port_parts()
    return [found[server.id] for server in SERVERS]


def test_servers_with_equally_many_shards_get_equal_parts() -> None:
    assert parts([0, 1, 2, 3] * 3) == [0.25] * 4


def test_a_server_with_more_shards_gets_more_and_one_with_fewer_not_less_than_an_equal_part() -> None:
    """Its link may have become faster: at its part of the shards it could not show that."""
    assert parts([0] * 4 + [1] * 2 + [2] + [3]) == [0.5, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("homes", [[], [0, 0]])
def test_a_server_without_shards_gets_an_equal_part(homes: list[int]) -> None:
    assert parts(homes)[3] == 0.25
