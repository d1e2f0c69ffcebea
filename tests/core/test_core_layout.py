"""The layout: every element has exactly one place, and equal models have equal layouts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core import layout as layouts
from rallypoint.core.layout import Layout, TensorSpec, build_layout, first_difference, forward_ranks, words_of
from rallypoint.core.ranks import HeldTensor, RankPiece, TensorBox, check_shared, spread_over
from rallypoint.errors import ModelError

_SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
_BUFFER_DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


@st.composite
def _models(draw: st.DrawFn) -> list[TensorSpec]:
    specs = []
    for index in range(draw(st.integers(0, 9))):
        group = draw(st.integers(-1, 3))
        dtype = draw(st.sampled_from(_BUFFER_DTYPES if group < 0 else ["float32", "float16", "bfloat16"]))
        specs.append(TensorSpec(f"tensor{index}", draw(_SHAPES), dtype, group))
    trained = TensorSpec("trained", (draw(st.integers(1, 40)),), "float32", draw(st.integers(0, 3)))
    specs.insert(draw(st.integers(0, len(specs))), trained)
    return specs


_CUTS = st.integers(1, 64).map(lambda words: 4 * words)


@given(_models(), _CUTS)
def test_entries_never_overlap_and_every_tensor_has_one(specs: list[TensorSpec], shard_bytes: int) -> None:
    layout = build_layout(specs, shard_bytes)
    assert sorted(entry.spec.name for entry in layout.entries) == sorted(spec.name for spec in specs)
    reached = 0
    for entry in layout.entries:
        assert entry.start >= reached
        assert entry.stop - entry.start == words_of(entry.spec)
        reached = entry.stop
    assert reached == layout.words


@given(_models(), _CUTS)
def test_shards_cover_exactly_the_range_of_each_group_and_none_is_shared(
    specs: list[TensorSpec], shard_bytes: int
) -> None:
    layout = build_layout(specs, shard_bytes)
    for group in {spec.group for spec in specs}:
        entries = [entry for entry in layout.entries if entry.spec.group == group]
        shards = [shard for shard in layout.shards if shard.group == group]
        covered = [word for shard in shards for word in range(shard.start, shard.stop)]
        assert covered == list(range(entries[0].start, entries[-1].stop))
    assert {shard.group for shard in layout.shards} <= {spec.group for spec in specs}


@given(_models(), _CUTS)
def test_shards_are_numbered_in_memory_order_and_never_larger_than_asked(
    specs: list[TensorSpec], shard_bytes: int
) -> None:
    layout = build_layout(specs, shard_bytes)
    assert [shard.index for shard in layout.shards] == list(range(len(layout.shards)))
    assert all(0 < shard.nbytes <= shard_bytes for shard in layout.shards)
    assert all(a.stop <= b.start for a, b in pairwise(layout.shards))
    assert layout.largest_shard == max(shard.words for shard in layout.shards)
    trained = sum(spec.numel for spec in specs if spec.group >= 0)
    assert sum(shard.slot_bytes for shard in layout.shards if shard.group >= 0) == 4 * trained


@pytest.mark.slow
@given(_models(), _CUTS, st.data())
def test_shards_touching_names_exactly_the_shards_that_share_a_word(
    specs: list[TensorSpec], shard_bytes: int, data: st.DataObject
) -> None:
    layout = build_layout(specs, shard_bytes)
    start = data.draw(st.integers(0, layout.words - 1))
    stop = data.draw(st.integers(start + 1, layout.words))
    expected = [s.index for s in layout.shards if set(range(s.start, s.stop)) & set(range(start, stop))]
    assert layout.shards_touching(start, stop) == expected


@given(_models(), _CUTS)
def test_a_group_lies_in_backward_order_and_buffers_come_last(specs: list[TensorSpec], shard_bytes: int) -> None:
    layout = build_layout(specs, shard_bytes)
    groups = [entry.spec.group for entry in layout.entries]
    assert groups == sorted(groups, key=lambda group: (group < 0, group))
    for group in set(groups):
        registered = [spec.name for spec in specs if spec.group == group]
        assert [entry.spec.name for entry in layout.entries if entry.spec.group == group] == registered[::-1]


@given(_models(), _CUTS)
def test_every_buffer_begins_where_an_int64_may_and_has_room_for_its_bytes(
    specs: list[TensorSpec], shard_bytes: int
) -> None:
    sizes = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
    for entry in build_layout(specs, shard_bytes).entries:
        if entry.spec.group < 0:
            nbytes = entry.spec.numel * sizes.get(entry.spec.dtype, 1)
            assert entry.start % 2 == 0
            assert nbytes <= 4 * (entry.stop - entry.start) < nbytes + 8


@given(_models(), _CUTS, _models(), _CUTS)
def test_the_fingerprint_is_equal_exactly_when_entries_and_shards_are(
    ours: list[TensorSpec], our_cut: int, theirs: list[TensorSpec], their_cut: int
) -> None:
    a, b = build_layout(ours, our_cut), build_layout(theirs, their_cut)
    same = (a.entries, a.shards) == (b.entries, b.shards)
    assert (a.fingerprint == b.fingerprint) == same
    assert (first_difference(a, b) is None) == same
    assert build_layout(list(ours), our_cut) == a


@dataclass(frozen=True)
class _Change:
    field: str
    value: object


@given(
    _models(),
    st.data(),
    st.sampled_from([_Change("name", "renamed"), _Change("shape", (7, 1)), _Change("dtype", "other")]),
)
def test_any_change_of_one_tensor_changes_the_fingerprint_and_is_named(
    specs: list[TensorSpec], data: st.DataObject, change: _Change
) -> None:
    index = data.draw(st.integers(0, len(specs) - 1))
    value = change.value
    if change.field == "dtype":
        value = "float16" if specs[index].dtype != "float16" else "bfloat16"
    changed = list(specs)
    changed[index] = msgspec.structs.replace(specs[index], **{change.field: value})
    if not any(spec.group >= 0 and spec.numel for spec in changed):
        return
    ours, theirs = build_layout(specs), build_layout(changed)
    assert ours.fingerprint != theirs.fingerprint
    difference = first_difference(ours, theirs)
    here, there = difference.split(" here, ")
    assert specs[index].name in here
    assert changed[index].name in there
    assert there.endswith(" there")


def _specs(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name, (4,), "float32", 0) for name in names]


def test_first_difference_names_the_first_tensor_in_memory_order_that_differs() -> None:
    ours = [*_specs("a", "b", "c"), TensorSpec("mean", (3,), "float32", -1)]
    theirs = [TensorSpec("a", (5,), "float32", 0), TensorSpec("b", (6,), "float32", 0), *ours[2:]]
    difference = first_difference(build_layout(ours), build_layout(theirs))
    assert difference == "parameter b [4] float32 (group 0) here, parameter b [6] float32 (group 0) there"


def test_first_difference_names_a_tensor_that_only_one_side_has() -> None:
    short, buffer = _specs("a"), TensorSpec("mean", (3,), "float32", -1)
    ours, theirs = build_layout([*short, buffer]), build_layout(short)
    assert first_difference(ours, theirs) == "buffer mean [3] float32 (group -1) exists only here"
    assert first_difference(theirs, ours) == "buffer mean [3] float32 (group -1) exists only there"


def test_first_difference_says_when_only_the_cuts_differ() -> None:
    ours, theirs = build_layout(_specs("a", "b"), 16), build_layout(_specs("a", "b"), 32)
    assert first_difference(ours, theirs) == "the shards are cut differently"


def test_a_model_with_nothing_to_train_is_refused() -> None:
    for specs in ([], [TensorSpec("mean", (3,), "float32", -1)], [TensorSpec("empty", (0, 3), "float32", 0)]):
        with pytest.raises(ModelError, match="no trainable parameter"):
            build_layout(specs)


@pytest.mark.parametrize(
    ("specs", "shard_bytes", "sentence"),
    [
        ([TensorSpec("head", (2,), "float64", 0)], 64, "parameter head is float64"),
        ([*_specs("a"), TensorSpec("phase", (2,), "bits8", -1)], 64, "buffer phase is bits8"),
        (_specs("a", "b", "a"), 64, "both named a"),
        *((_specs("a"), shard_bytes, "impossible") for shard_bytes in (0, -4, 2, 6)),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(specs: list[TensorSpec], shard_bytes: int, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_layout(specs, shard_bytes)


def test_a_float64_buffer_is_carried() -> None:
    assert build_layout([*_specs("a"), TensorSpec("scale", (2,), "float64", -1)]).words == 16 + 4


# ---- matrices that are sent as factors -------------------------------------------------------------------------


@st.composite
def _matrices(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = st.lists(st.integers(0, 30), max_size=4).map(tuple)
    specs = [
        TensorSpec(f"tensor{index}", draw(shapes), "float32", draw(st.integers(-1, 2)))
        for index in range(draw(st.integers(0, 7)))
    ]
    return [*specs, TensorSpec("trained", (draw(st.integers(1, 40)), 20), "float32", 0)]


_RANKS = st.dictionaries(st.integers(0, 2), st.integers(1, 4), max_size=3)
_WIDE_CUTS = st.integers(1, 400).map(lambda words: 4 * words)


@given(_matrices(), _WIDE_CUTS, _RANKS)
def test_a_shard_of_a_matrix_is_whole_rows_of_one_parameter_and_worth_factoring(
    specs: list[TensorSpec], shard_bytes: int, ranks: dict[int, int]
) -> None:
    layout = build_layout(specs, shard_bytes, ranks)
    for shard in layout.shards:
        owners = [entry for entry in layout.entries if entry.start < shard.stop and shard.start < entry.stop]
        assert shard.nbytes <= shard_bytes
        if not shard.columns:
            assert shard.shape == (shard.words,)
            continue
        (owner,) = owners
        rows, columns = shard.shape
        assert rows * columns == shard.words
        assert columns * owner.spec.shape[0] == owner.spec.numel
        assert (shard.start - owner.start) % columns == 0
        assert layouts.factors_pay(rows, columns, ranks[shard.group])


@given(_matrices(), _WIDE_CUTS, _RANKS)
def test_cutting_matrices_by_rows_moves_no_tensor_and_leaves_no_word_out(
    specs: list[TensorSpec], shard_bytes: int, ranks: dict[int, int]
) -> None:
    plain, layout = build_layout(specs, shard_bytes), build_layout(specs, shard_bytes, ranks)
    assert layout.entries == plain.entries
    assert [shard.index for shard in layout.shards] == list(range(len(layout.shards)))
    for group in {spec.group for spec in specs}:
        covered, before = (
            [word for shard in found.shards if shard.group == group for word in range(shard.start, shard.stop)]
            for found in (layout, plain)
        )
        assert covered == before
    matrices = any(shard.columns for shard in layout.shards)
    assert (layout.fingerprint == plain.fingerprint) == (layout.shards == plain.shards)
    assert matrices or layout.shards == plain.shards
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout) == layout


def test_the_rows_of_a_matrix_are_assigned_evenly_and_a_kernel_is_a_matrix_too() -> None:
    kernel, vector = TensorSpec("kernel", (100, 3, 5, 2), "float32", 0), TensorSpec("bias", (100,), "float32", 0)
    layout = build_layout([vector, kernel], 4 * 30 * 60, {0: 4})
    assert [shard.shape for shard in layout.shards] == [(50, 30), (50, 30), (100,)]


def test_a_matrix_whose_rows_are_too_long_for_a_shard_is_cut_like_any_other_words() -> None:
    wide, narrow = TensorSpec("wide", (50, 1000), "float32", 0), TensorSpec("narrow", (50, 1), "float32", 0)
    layout = build_layout([wide, narrow], 4 * 3000, {0: 4})
    assert {shard.columns for shard in layout.shards} == {0}


def test_a_layout_without_matrices_has_the_fingerprint_that_older_snapshots_have() -> None:
    specs = [TensorSpec("a", (100, 30), "float32", 0), TensorSpec("b", (30,), "float32", 1)]
    specs.append(TensorSpec("c", (30,), "int64", -1))
    assert build_layout(specs, 256).fingerprint == "e2714d4bafcbedae9f820fa4145e4b90"


def test_shards_rank_by_depth_across_groups_and_buffers_come_first() -> None:
    """Three layers: weights in group 0, biases in group 1; the first layer's are needed first."""
    specs = [TensorSpec("mean", (4,), "float32", -1)]
    for layer in range(3):
        specs += [TensorSpec(f"w{layer}", (32,), "float32", 0), TensorSpec(f"b{layer}", (16,), "float32", 1)]
    layout = build_layout(specs, 64)
    order = sorted(layout.shards, key=lambda shard: forward_ranks(layout)[shard.index])
    names = [layout.name_at(shard.index, 0) for shard in order]
    assert names == ["mean", "w0", "b0", "w0", "w1", "b1", "w1", "w2", "b2", "w2"]


@given(_models(), _CUTS)
def test_every_shard_has_a_rank_of_its_own(specs: list[TensorSpec], shard_bytes: int) -> None:
    layout = build_layout(specs, shard_bytes)
    assert sorted(forward_ranks(layout)) == list(range(len(layout.shards)))


# ---- Which rank of a group holds and sends which part of a tensor ----


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
