"""The tree over replicas: any order of arrival, any cut into blocks, any repeats give the same sum."""

from __future__ import annotations

import math
import random
from functools import reduce

import pytest
import torch

from rallypoint.core.sums import Block, Forest, blocks_of, halves, is_block, leaf, parent, sibling


def nodes(replicas: int) -> set[Block]:
    """Every node, from the root down."""
    found, todo = set(), [Block(0, replicas)]
    while todo:
        block = todo.pop()
        found.add(block)
        todo += halves(block) if block.size > 1 else ()
    return found


@pytest.mark.parametrize("replicas", range(1, 40))
def test_blocks_are_the_nodes_of_one_binary_tree(replicas: int) -> None:
    tree = nodes(replicas)
    every = {Block(a, b) for a in range(replicas + 2) for b in range(a - 1, replicas + 2)}
    assert {block for block in every if is_block(block, replicas)} == tree
    assert len(tree) == 2 * replicas - 1
    for block in tree:
        above = parent(block, replicas)
        if block == (0, replicas):
            assert above == block == sibling(block, replicas)
        else:
            assert block in halves(above)
            assert {block, sibling(block, replicas)} == set(halves(above))
    aligned = {(a, min(a + 2**k, replicas)) for k in range(7) for a in range(0, replicas, 2**k)}
    assert tree == aligned


def test_the_example_of_five() -> None:
    assert halves(Block(0, 5)) == ((0, 4), (4, 5))
    assert parent(leaf(4), 5) == (0, 5)
    assert blocks_of([3, 4, 5], 8) == [(3, 4), (4, 6)]
    assert blocks_of([0, 1, 2, 4], 5) == [(0, 2), (2, 3), (4, 5)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8, 13, 16, 31])
def test_a_run_is_cut_into_few_blocks(replicas: int) -> None:
    for start in range(replicas):
        for stop in range(start + 1, replicas + 1):
            blocks = blocks_of(range(start, stop), replicas)
            assert [r for block in blocks for r in range(*block)] == list(range(start, stop))
            assert all(is_block(block, replicas) for block in blocks)
            length = stop - start
            assert len(blocks) <= max(1 if length == 1 else 2, 2 * math.log2(length))
    for _ in range(20):
        some = random.sample(range(replicas), random.randint(1, replicas))
        blocks = blocks_of(some, replicas)
        assert sorted(r for block in blocks for r in range(*block)) == sorted(some)
        assert not any(sibling(b, replicas) in blocks for b in blocks if b.size < replicas)


def tree_sum(leaves: list[torch.Tensor], block: Block) -> torch.Tensor:
    """The definition, by recursion."""
    if block.size == 1:
        return leaves[block.start]
    left, right = halves(block)
    return tree_sum(leaves, left) + tree_sum(leaves, right)


@pytest.mark.parametrize("seed", range(60))
def test_any_schedule_gives_the_same_bytes(seed: int) -> None:
    """Blocks arrive in any order, some twice, some that overlap: the root is the same, bit for bit."""
    rng = random.Random(seed)
    replicas = rng.randint(1, 17)
    leaves = list(torch.randn(replicas, 9, generator=torch.Generator().manual_seed(seed)).unbind())
    every = sorted(nodes(replicas))
    arrivals = [*rng.choices(every, k=rng.randint(0, 2 * replicas)), *rng.sample(every, len(every))]
    forest, values, most = Forest(replicas), dict[Block, torch.Tensor](), 0
    for block in arrivals:
        if forest.covers(block):
            continue
        values[block] = tree_sum(leaves, block)
        for old in forest.add(block):
            del values[old]
        while (merged := forest.merge(block)) is not None:
            left, right = merged
            block = Block(left.start, right.stop)
            values[block] = values.pop(left) + values.pop(right)
        forest.validate()
        assert set(values) == set(forest)
        most = max(most, len(forest))
    assert forest.whole
    assert torch.equal(values[Block(0, replicas)], tree_sum(leaves, Block(0, replicas)))
    assert most <= max(1, (replicas + 1) // 2)


def test_leaves_in_order_need_few_sums() -> None:
    forest = Forest(1000)
    for replica in range(1000):
        block = leaf(replica)
        assert not forest.add(block)
        while (merged := forest.merge(block)) is not None:
            block = Block(merged[0].start, merged[1].stop)
        assert len(forest) <= math.log2(1000) + 1
        assert forest.has(replica)
        assert not forest.has(replica + 1)
    assert forest.whole


def test_the_tree_is_not_a_chain() -> None:
    """The bytes differ from those of adding in replica order: the test above would not see a chain otherwise."""
    leaves = list(torch.randn(7, 4096, generator=torch.Generator().manual_seed(1)).unbind())
    chain = reduce(torch.add, leaves)
    assert not torch.equal(tree_sum(leaves, Block(0, 7)), chain)
    assert torch.allclose(tree_sum(leaves, Block(0, 7)), chain, atol=1e-5)
