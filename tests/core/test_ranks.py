"""Which rank of a group holds and sends which part of a tensor."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.ranks import HeldTensor, RankPiece, TensorBox, check_shared, spread_over
from rallypoint.errors import ModelError


def held(
    name: str, shape: tuple[int, ...], offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = (), role: str = "trained"
) -> HeldTensor:
    """What a rank holds of a tensor: by default all of it."""
    return HeldTensor(name, shape, "float32", role, TensorBox(offsets or (0,) * len(shape), sizes or shape))


@given(rows=st.integers(1, 9), ranks=st.integers(1, 5), copies=st.integers(1, 3))
def test_each_element_is_sent_once_however_many_ranks_hold_it(rows: int, ranks: int, copies: int) -> None:
    cuts = [rows * rank // ranks for rank in range(ranks + 1)]
    parts = [held("w", (rows, 2), (a, 0), (b - a, 2)) for a, b in itertools.pairwise(cuts)]
    (tensor,) = spread_over([[part] for part in parts * copies])
    sent = [row for piece in tensor.sent for row in range(rows)[piece.block.slices[0]]]
    assert sorted(sent) == list(range(rows))
    assert all(piece.rank < ranks for piece in tensor.sent)  # of copies, the first
    assert len(tensor.pieces) == copies * sum(a != b for a, b in itertools.pairwise(cuts))


def test_a_tensor_cut_in_two_dimensions_is_whole() -> None:
    blocks = [(a, b) for a in (0, 3) for b in (0, 2)]
    (tensor,) = spread_over([[held("w", (6, 4), block, (3, 2))] for block in blocks])
    assert tensor.sent == tuple(RankPiece(r, TensorBox(b, (3, 2))) for r, b in enumerate(blocks))


def test_a_scalar_is_whole() -> None:
    (tensor,) = spread_over([[held("steps", ())], [held("steps", ())]])
    assert [piece.rank for piece in tensor.sent] == [0]


def test_the_stages_of_a_pipeline_follow_each_other_in_the_order_of_ranks() -> None:
    stages = [[held("first", (2,))], [held("first", (2,))], [held("second", (2,)), held("head", (1,))]]
    assert [tensor.name for tensor in spread_over(stages)] == ["first", "second", "head"]


def test_interleaved_stages_get_the_order_of_the_whole_model() -> None:
    stages = [[held("a", (1,)), held("c", (1,))], [held("b", (1,)), held("d", (1,))]]
    assert [tensor.name for tensor in spread_over(stages, ["a", "b", "c", "d"])] == ["a", "b", "c", "d"]
    with pytest.raises(ModelError, match="d is not in the whole model"):
        spread_over(stages, ["a", "b", "c"])
    with pytest.raises(ModelError, match="e is on no rank"):
        spread_over(stages, ["a", "b", "c", "d", "e"])


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ([[held("w", (4,))], [held("w", (5,))]], r"w is trained, float32 \[5\] on rank 1 .* and trained"),
        ([[held("w", (4,))], [held("w", (4,), role="frozen")]], "w is frozen"),
        ([[held("w", (4,), (0,), (2,))]], "do not hold all of its elements"),
        ([[held("w", (4,), (0,), (3,))], [held("w", (4,), (2,), (2,))]], "overlap and are not the same"),
    ],
)
def test_ranks_that_do_not_fit_together_are_told(ranks: list[list[HeldTensor]], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        spread_over(ranks)


def test_a_parameter_that_two_stages_train_is_refused() -> None:
    ends = [held("tied", (2,)), held("first", (2,))], [held("last", (2,)), held("tied", (2,))]
    with pytest.raises(ModelError, match="tied is on two stages"):
        spread_over(ends)
    frozen = [[HeldTensor(one.name, one.shape, one.dtype, "frozen", one.block) for one in stage] for stage in ends]
    assert len(spread_over(frozen)) == 3


def test_ranks_that_share_neither_model_nor_batch_are_refused() -> None:
    whole = [HeldTensor("w", (4,), "float32", "trained", TensorBox((0,), (4,)))]
    spread = spread_over([whole, whole])
    check_shared(spread, 2, 2)
    check_shared(spread_over([whole]), 1, 1)
    with pytest.raises(ModelError, match="all 2 ranks of this worker hold the whole model"):
        check_shared(spread, 2, 1)
