"""Tables in the layout: every row has one place, and the flat vector knows nothing of them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.codec.base import gradient_bytes
from rallypoint.core.layout import PART_BYTES, Layout, TensorSpec, build_layout, first_difference
from rallypoint.errors import ModelError
from rallypoint.net.frames import Header, Kind, pack, unpack

TOP = TensorSpec("top", (40, 3), "float32", 0)
TABLES = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 40)), min_size=1, max_size=3)


def _layout(*shapes: tuple[int, int], shard_bytes: int = 1024, specs: tuple[TensorSpec, ...] = (TOP,)) -> Layout:
    tables = [TensorSpec(f"table{i}", shape, "float32", 0) for i, shape in enumerate(shapes)]
    return build_layout(specs, shard_bytes, None, tables)


@given(TABLES, st.sampled_from([64, 1024, 1 << 20]))
def test_every_row_of_a_table_is_in_one_part(shapes: list[tuple[int, int]], shard_bytes: int) -> None:
    layout = _layout(*shapes, shard_bytes=shard_bytes)
    for index, (rows, columns) in enumerate(shapes):
        shards = [s for s in layout.shards if s.part is not None and s.part.table == index]
        parts = [s.part for s in shards if s.part is not None]
        held = sorted(row for part in parts for row in range(part.part, rows, part.parts))
        assert held == list(range(rows))
        assert [part.rows for part in parts] == [len(range(p.part, rows, p.parts)) for p in parts]
        assert all(s.words == s.part.rows * columns and s.nbytes <= PART_BYTES for s in shards if s.part is not None)
        assert {s.role for s in shards} == {"rows"}


@pytest.mark.parametrize("columns", [1, 1 << 20, (1 << 22) + 1, (1 << 24) - 2])
def test_the_gradient_of_every_part_fits_into_a_frame(columns: int) -> None:
    for rows in (1, 2, 3, 9, 10_000):
        for shard in _layout((rows, columns)).shards:
            if shard.part is not None:
                data = gradient_bytes(shard.part.rows, columns)
                assert unpack(pack(Header(Kind.PUSH, length=data))).length == data


@pytest.mark.parametrize("columns", [(1 << 24) - 1, 1 << 24, 1 << 26])
def test_a_row_that_no_frame_carries_is_refused_before_the_job(columns: int) -> None:
    with pytest.raises(ModelError, match=r"a row of table1 has .* MiB, and at most 64 MiB go in one piece"):
        _layout((10, 3), (5, columns))


@given(TABLES)
def test_the_vector_and_its_shards_are_those_without_tables(shapes: list[tuple[int, int]]) -> None:
    bare, layout = build_layout([TOP], 1024), _layout(*shapes)
    assert layout.shards[: len(bare.shards)] == bare.shards
    assert (layout.entries, layout.words, layout.largest_shard) == (bare.entries, bare.words, bare.largest_shard)
    assert sum(s.slot_bytes for s in layout.shards) == sum(s.slot_bytes for s in bare.shards)
    assert all(s.slot_bytes == 0 for s in layout.shards[len(bare.shards) :])
    assert [s.index for s in layout.shards] == list(range(len(layout.shards)))


def test_a_large_table_is_in_parts_of_bounded_size_and_a_small_one_still_in_several() -> None:
    assert len(_layout((1 << 20, 64), shard_bytes=1 << 20).shards) == 1 + (1 << 20) * 64 * 4 // PART_BYTES
    assert len(_layout((1 << 16, 64), shard_bytes=1 << 20).shards) == 1 + 8
    assert len(_layout((100, 4), shard_bytes=1 << 20).shards) == 1 + 1


def test_a_model_may_have_nothing_but_tables() -> None:
    layout = _layout((9, 2), specs=())
    assert (layout.words, layout.largest_shard, len(layout.shards)) == (0, 0, 1)


def test_a_layout_with_tables_survives_the_job_record() -> None:
    layout = _layout((700, 5), (30, 2))
    assert msgspec.convert(msgspec.to_builtins(layout), Layout) == layout


def test_models_that_differ_in_a_table_are_told_apart() -> None:
    ours, theirs = _layout((700, 5)), _layout((701, 5))
    assert ours.fingerprint != theirs.fingerprint
    assert first_difference(ours, theirs) == (
        "parameter table0 [700, 5] float32 (group 0) here, parameter table0 [701, 5] float32 (group 0) there"
    )
    assert first_difference(ours, build_layout([TOP], 1024)) == (
        "parameter table0 [700, 5] float32 (group 0) exists only here"
    )


def test_a_table_and_a_parameter_of_one_name_are_refused() -> None:
    with pytest.raises(ModelError, match="both named top"):
        build_layout([TOP], 1024, None, [TOP])
