"""A worker adds up its replicas: few pushes, and nothing is kept that will never be sent."""

from __future__ import annotations

import math
import random

import pytest

from rallypoint.core.sums import Block, Part, Presum, blocks_of, halves, is_block, leaf

SHARD = 0


def compute(presum: Presum, replica: int, *, use: bool = True, send: bool = True) -> Block | None:
    part = presum.part(SHARD, replica) or Part((), leaf(replica), keep=False)
    return presum.filled(SHARD, part, use=use, send=send)


def test_the_example_of_the_docs() -> None:
    presum = Presum(frozenset({SHARD}), 8, 8)
    presum.plan([3, 4, 5])
    assert presum.part(SHARD, 3) is None
    assert compute(presum, 3) == (3, 4)
    assert presum.part(SHARD, 4) == Part((), Block(4, 5), keep=True)
    assert compute(presum, 4) is None
    assert presum.has(SHARD, 4)
    assert presum.part(SHARD, 5) == Part((4,), Block(4, 6), keep=False)
    assert compute(presum, 5) == (4, 6)


@pytest.mark.parametrize(
    ("run", "pushes"), [((0, 4), 1), ((4, 8), 1), ((0, 3), 2), ((3, 6), 2), ((6, 8), 1), ((0, 8), 1)]
)
def test_a_run_of_neighbours_is_pushed_in_few_blocks(run: tuple[int, int], pushes: int) -> None:
    presum = Presum(frozenset({SHARD}), 8, 8)
    presum.plan(range(*run))
    sent = [block for replica in range(*run) if (block := compute(presum, replica)) is not None]
    assert len(sent) == pushes
    assert sent == blocks_of(range(*run), 8)


@pytest.mark.parametrize("largest", [1, 2, 4])
def test_no_larger_blocks_than_there_is_memory_for(largest: int) -> None:
    presum = Presum(frozenset({SHARD}), 8, largest)
    presum.plan(range(8))
    sent = [block for replica in range(8) if (block := compute(presum, replica)) is not None]
    assert sent == [(start, start + largest) for start in range(0, 8, largest)]


def test_other_shards_and_backup_tasks_are_sent_one_by_one() -> None:
    presum = Presum(frozenset({SHARD}), 8, 8)
    presum.plan([0, 1])
    assert presum.part(1, 0) is None
    assert presum.part(SHARD, 6) is None
    assert compute(presum, 6) == (6, 7)


def test_what_was_sent_already_is_not_waited_for() -> None:
    """[0,4) is sent; then this worker gets the other half too: [4,8) is whole without it."""
    presum = Presum(frozenset({SHARD}), 8, 8)
    presum.plan(range(4))
    assert [compute(presum, replica) for replica in range(4)][-1] == (0, 4)
    presum.plan(range(8))
    assert [compute(presum, replica) for replica in range(4, 8)] == [None, None, None, (4, 8)]


def test_a_link_that_is_lost_makes_all_of_it_due_again() -> None:
    presum = Presum(frozenset({SHARD}), 4, 4)
    presum.plan(range(4))
    for replica in range(3):
        compute(presum, replica)
    assert compute(presum, 3, send=False) is None  # no link: the sum is dropped
    assert not any(presum.has(SHARD, replica) for replica in range(4))
    assert [compute(presum, replica) for replica in range(4)][-1] == (0, 4)
    presum.lost(SHARD)
    assert not any(presum.has(SHARD, replica) for replica in range(4))


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_everything_is_sent_in_the_end(seed: int) -> None:
    """Replicas come and go in mid-sum, links are lost, sums are dropped: no replica is ever stuck."""
    rng = random.Random(seed)
    replicas = rng.randint(1, 9)
    presum = Presum(frozenset({SHARD}), replicas, 1 << rng.randint(0, 4))
    own: list[int] = []
    arrived: set[int] = set()
    for _ in range(40):
        match rng.choice(["plan", "compute", "compute", "compute", "race", "lost", "drop"]):
            case "plan":
                own = sorted(rng.sample(range(replicas), rng.randint(0, replicas)))
                presum.plan(own)
            case "lost":
                presum.lost(SHARD)
                arrived.clear()
            case "race":  # the plan changes between `part` and `filled`
                replica = rng.randrange(replicas)
                if not presum.has(SHARD, replica):
                    part = presum.part(SHARD, replica) or Part((), leaf(replica), keep=False)
                    own = sorted(rng.sample(range(replicas), rng.randint(0, replicas)))
                    presum.plan(own)
                    if (block := presum.filled(SHARD, part, use=True, send=True)) is not None:
                        arrived |= set(range(*block))
            case kind:
                todo = [replica for replica in own if not presum.has(SHARD, replica)]
                if todo and (block := compute(presum, todo[0], use=kind == "compute", send=kind == "compute")):
                    assert is_block(block, replicas)
                    arrived |= set(range(*block))
        presum.validate()
    for replica in own:
        if not presum.has(SHARD, replica) and (block := compute(presum, replica)) is not None:
            arrived |= set(range(*block))
        presum.validate()
    assert arrived >= set(own)


def test_the_memory_is_the_logarithm_of_the_block() -> None:
    presum = Presum(frozenset({SHARD}), 64, 64)
    presum.plan(range(64))
    kept: set[int] = set()
    most = 0
    for replica in range(64):
        part = presum.part(SHARD, replica)
        kept -= set(part.merges)
        if part.keep:
            kept.add(part.block.start)
        most = max(most, len(kept))
        presum.filled(SHARD, part, use=True, send=True)
    assert most == math.log2(64)
    assert halves(Block(0, 64)) == ((0, 32), (32, 64))
