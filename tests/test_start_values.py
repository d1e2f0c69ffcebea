"""What a job with tune="auto" begins with: shards of the cost model's size, where no byte depends on it."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.codec.spec import Bf16, Int8
from rallypoint.config import ClusterFacts, resolve, with_start_values
from rallypoint.core.optimizer import SGD, AdamW
from rallypoint.core.plan.tuning import shards_for
from rallypoint.core.policy import Async

FACTS = ClusterFacts(workers=4, servers=4, link_mbit=0.0, one_host=False, shard_bytes=-1)
NBYTES = 2_000_000
DEFAULT = 1 << 20


def started(nbytes: int = NBYTES, facts: ClusterFacts = FACTS, **settings: Any) -> tuple[int, str]:
    given = {"tune": "auto", **settings}
    config, why = with_start_values(resolve(given), given, nbytes, facts)
    return config.network.shard_bytes, why


def test_a_small_model_is_cut_so_that_every_server_has_shards_and_the_log_says_why() -> None:
    size, why = started()
    assert NBYTES / size > 3 * FACTS.servers
    assert why.startswith(f"shard_bytes {size >> 10} KiB, by the cost model: for 2 MB on 4 servers with links of")


def test_a_slower_link_that_is_told_makes_them_smaller_and_a_large_model_keeps_the_default() -> None:
    assert started(facts=FACTS._replace(link_mbit=62.5))[0] < started()[0]
    assert started(1_000_000_000)[0] == DEFAULT


@pytest.mark.parametrize(
    "settings",
    [
        {"tune": "off"}, {"clip": 1.0}, {"codec": Int8()}, {"down": Int8()}, {"sync": Async()},
        {"groups": [{"match": ["*"], "codec": {"type": "int8"}}]}, {"network.shard_bytes": DEFAULT},
    ],
)  # fmt: skip
def test_nothing_is_chosen_where_bytes_depend_on_it_or_where_it_was_said(settings: dict[str, Any]) -> None:
    assert started(**settings) == (DEFAULT, "")


@pytest.mark.parametrize("settings", [{"codec": Bf16()}, {"optimizer": SGD(lr=0.1)}, {"optimizer": AdamW(lr=0.1)}])
def test_it_is_chosen_where_each_word_is_treated_by_itself(settings: dict[str, Any]) -> None:
    assert started(**settings)[0] < DEFAULT


def test_a_job_that_has_shards_keeps_them_whoever_comes_and_whatever_is_tuned() -> None:
    facts = FACTS._replace(shard_bytes=4096, servers=16)
    assert started(facts=facts) == (4096, "")
    assert started(facts=facts, tune="off") == (4096, "")
    assert started(facts=facts, **{"network.shard_bytes": 8192}) == (8192, "")


def test_on_one_host_shards_are_larger_and_each_server_has_some_of_them() -> None:
    facts = FACTS._replace(servers=2, one_host=True)
    for nbytes, size in ((4, 1), (15 << 20, 1), (16 << 20, 2), (32 << 20, 4), (1 << 33, 4)):
        assert started(nbytes, facts, tune="off", clip=1.0) == (size << 20, "")
    assert started(1 << 33, facts._replace(shard_bytes=DEFAULT)) == (DEFAULT, "")  # it has some already
    assert started(1 << 33, facts, **{"network.shard_bytes": DEFAULT}) == (DEFAULT, "")
    assert started(1 << 33, facts, sync=Async()) == (DEFAULT, "")


def test_nothing_is_chosen_for_a_part_of_a_model() -> None:
    assert started(0) == (DEFAULT, "")


def test_shards_are_never_larger_than_the_default_nor_smaller_than_32_kib() -> None:
    for nbytes in (4, 10_000, 10**6, 10**8, 10**10):
        assert 32 << 10 <= shards_for(nbytes, 8, 3).shard_bytes <= DEFAULT
