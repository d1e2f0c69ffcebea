"""Sparse payloads, sums and updates of a table's part: what is touched changes, and exactly as torch would have it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rallypoint as rp
from rallypoint.codec import base
from rallypoint.codec.base import RowSum, check_gradient, decode_ids, encode_gradient, encode_ids, gradient_bytes
from rallypoint.config import resolve
from rallypoint.core.layout import PART_BYTES, Layout, TensorSpec, build_layout, first_difference
from rallypoint.core.schedule import rate_at
from rallypoint.core.shard.effects import Apply
from rallypoint.errors import ConfigError, ModelError, ProtocolError, RallypointError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.net.frames import Header, Kind, pack, unpack
from rallypoint.net.pool import Buffer, BufferPools
from rallypoint.optim import RowsOptimizer
from rallypoint.server.rows import OwnedRows, first_rows, fits_rows
from rallypoint.store.record import decode_record, encode_record
from rallypoint.worker.tensors import ModelTensors

ROWS, COLUMNS = 40, 3
IDS = st.sets(st.integers(0, ROWS - 1)).map(sorted)


def _gradient(ids: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(ids, dtype=torch.int64), torch.randn(len(ids), COLUMNS, generator=generator)


# ---- payloads ----


@given(IDS)
def test_a_gradient_survives_the_wire_and_is_as_long_as_its_rows(chosen: list[int]) -> None:
    ids, values = _gradient(chosen, 1)
    data = encode_gradient(ids, values)
    assert len(data) == gradient_bytes(len(chosen), COLUMNS) == 4 + len(chosen) * (4 + 4 * COLUMNS)
    check_gradient(data, ROWS, COLUMNS)
    found = base.decode_gradient(data, COLUMNS)
    assert torch.equal(found[0], ids)
    assert torch.equal(found[1], values)


@given(IDS)
def test_a_pull_survives_the_wire(chosen: list[int]) -> None:
    ids, _ = _gradient(chosen, 1)
    assert torch.equal(decode_ids(bytearray(encode_ids(ids)), ROWS), ids)


@pytest.mark.parametrize("ids", [[3, 3], [4, 2], [ROWS], [0, 2**31]])
def test_rows_out_of_order_or_out_of_the_part_are_refused(ids: list[int]) -> None:
    given = torch.tensor(ids)
    with pytest.raises(ProtocolError, match="do not ascend, or not of a part"):
        decode_ids(bytearray(encode_ids(given)), ROWS)
    with pytest.raises(ProtocolError, match="do not ascend, or not of a part"):
        check_gradient(encode_gradient(given, torch.zeros(len(ids), COLUMNS)), ROWS, COLUMNS)


@pytest.mark.parametrize("change", [b"", b"\1", b"\1\0\0", b"\2\0\0\0", b"\xff\xff\xff\xff"])
def test_a_payload_that_is_not_what_it_says_is_refused(change: bytes) -> None:
    whole = bytes(encode_gradient(*_gradient([5], 1)))
    with pytest.raises(ProtocolError, match="claim to be"):
        check_gradient(memoryview(bytearray(change + whole[4:] if len(change) == 4 else change)), ROWS, COLUMNS)


# ---- sums and updates ----


@given(st.lists(IDS, min_size=1, max_size=5))
def test_a_sum_of_rows_has_the_bytes_of_the_sum_of_whole_tables(parts: list[list[int]]) -> None:
    total, dense = RowSum(COLUMNS), torch.zeros(ROWS, COLUMNS)
    for seed, part in enumerate(parts):
        ids, values = _gradient(part, seed)
        dense.index_add_(0, ids, values)
        total.add(ids, values)
    assert total.ids.tolist() == sorted({row for part in parts for row in part})
    assert torch.equal(total.values, dense[total.ids])


@pytest.mark.parametrize(
    ("spec", "peer"),
    [
        (rp.SGD(lr=rp.cosine(0.3, warmup=2)), lambda p: torch.optim.SGD([p])),
        (rp.AdamW(lr=rp.cosine(0.3, warmup=2), weight_decay=0.0), lambda p: torch.optim.SparseAdam([p])),
        (rp.Adam(lr=0.2, betas=(0.8, 0.9), eps=1e-3),
         lambda p: torch.optim.SparseAdam([p], lr=0.2, betas=(0.8, 0.9), eps=1e-3)),
        (rp.Adagrad(lr=rp.cosine(0.3, warmup=2)), lambda p: torch.optim.Adagrad([p])),
        (rp.Adagrad(lr=0.2, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-3),
         lambda p: torch.optim.Adagrad([p], lr=0.2, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-3)),
    ],
    ids=["sgd", "adamw", "adam", "adagrad", "adagrad with all its settings"],
)  # fmt: skip
def test_an_update_has_the_bytes_of_torchs_sparse_optimizer(spec: Any, peer: Any) -> None:
    config = resolve({"optimizer": spec, "steps": 6})
    ours = RowsOptimizer(config, 0, ROWS, COLUMNS)
    theirs = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = peer(theirs)
    for step, chosen in enumerate([[0, 3, 9], [3], [], [3, 39], [0]]):
        ids, values = _gradient(chosen, step)
        ours.apply(ids, values.clone(), step)
        theirs.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), values, theirs.shape, check_invariants=False)
        optimizer.param_groups[0]["lr"] = rate_at(config.schedule, step, config.steps)
        optimizer.step()
        assert torch.equal(ours.master, theirs.detach())


@pytest.mark.parametrize("spec", [rp.AdamW(lr=0.1, weight_decay=0.5), rp.Adam(lr=0.1, weight_decay=0.5),
                                  rp.SGD(lr=0.1, weight_decay=0.5), rp.Adagrad(lr=0.1, weight_decay=0.5)])  # fmt: skip
def test_weight_decay_is_for_the_rows_touched(spec: Any) -> None:
    ours = RowsOptimizer(resolve({"optimizer": spec}), 0, ROWS, COLUMNS)
    ours.master.fill_(1.0)
    ours.apply(torch.tensor([7]), torch.zeros(1, COLUMNS), 0)
    changed = (ours.master != 1.0).any(1)
    assert changed.nonzero().tolist() == [[7]]
    assert bool((ours.master[7] < 1.0).all())


# ---- a part on its server ----


def _part(optimizer: Any = None) -> OwnedRows:
    config = resolve({"optimizer": optimizer or rp.AdamW(lr=0.1), "seed": 9, "steps": 50})
    shards = build_layout((), 256, None, [TensorSpec("users", (ROWS * 2, COLUMNS), "float32", 0)]).shards
    place = shards[1]
    owned = OwnedRows(place, "users", config, pools := BufferPools(), pools.take(0))
    owned.install(BufferPools().take(0))
    return owned


def _payload(ids: torch.Tensor, values: torch.Tensor) -> Buffer:
    nbytes = gradient_bytes(len(ids), COLUMNS)
    buffer = BufferPools().take(nbytes)
    encode_gradient(ids, values, buffer.bytes[:nbytes])
    return buffer


def _step(owned: OwnedRows, version: int, chosen: list[int], *, skip: bool = False, replicate: bool = False) -> Any:
    owned.take(_payload(*_gradient(chosen, version)), 1.0)
    owned.mean(1.0)
    return owned.apply(Apply(version, version - 1, None if skip else 1.0, max(0, version - 1), replicate=replicate))


def _read(owned: OwnedRows, version: int, ids: list[int]) -> torch.Tensor:
    buffer, nbytes = owned.rows(version, torch.tensor(ids))
    return buffer.tensor[: nbytes // 4].clone().view(len(ids), COLUMNS)


def test_the_first_rows_depend_on_their_place_alone() -> None:
    owned = _part()
    part = owned.shard.part
    assert part.parts > 1
    expected = first_rows(9, "users", np.arange(part.part, 2 * ROWS, part.parts), COLUMNS)
    assert np.array_equal(owned.master.numpy(), expected)
    many = first_rows(9, "users", np.arange(40_000), COLUMNS)
    assert abs(float(many.mean())) < 0.01
    assert abs(float(many.std()) - 1) < 0.01
    assert not np.array_equal(first_rows(9, "items", np.arange(5), 3), first_rows(9, "users", np.arange(5), 3))


def test_a_version_before_is_told_exactly_while_it_is_kept() -> None:
    owned = _part()
    everything = list(range(owned.master.shape[0]))
    seen = {0: owned.master.clone()}
    for version, chosen in enumerate([[1, 2, 5], [2], [], [0, 1, 4], [1]], start=1):
        _step(owned, version, chosen, skip=version == 4)
        seen[version] = owned.master.clone()
        for kept in (version, version - 1):
            assert owned.keeps(kept)
            assert torch.equal(_read(owned, kept, everything), seen[kept])
            assert torch.equal(_read(owned, kept, [0, 2, 3]), seen[kept][[0, 2, 3]])
        assert not owned.keeps(version + 1)
        assert version < 2 or not owned.keeps(version - 2)
    assert torch.equal(seen[3], seen[4]), "a step that is skipped changes no row"


@pytest.mark.parametrize(
    "optimizer", [rp.AdamW(lr=0.1), rp.SGD(lr=0.1), rp.Adagrad(lr=0.1, lr_decay=0.1)], ids=["adamw", "sgd", "adagrad"]
)
def test_a_backup_that_is_filled_and_kept_up_holds_the_primarys_rows_and_versions(optimizer: Any) -> None:
    primary, backup = _part(optimizer), _part(optimizer)
    for version in (1, 2):
        _step(primary, version, [version, 4])
    record = decode_record(encode_record(primary.state(2, (), wires=True), "none"))
    assert fits_rows(record, primary.shard, primary._config)
    backup.load(record)
    for version in (3, 4):
        buffer, _ = _step(primary, version, [2, 4], replicate=True)
        backup.take(buffer, 1.0)
        backup.apply(Apply(version, version - 1, 1.0, version - 1))
        for kept in (version, version - 1):
            everything = list(range(primary.master.shape[0]))
            assert torch.equal(_read(backup, kept, everything), _read(primary, kept, everything))


def test_a_state_that_does_not_fit_is_refused() -> None:
    owned = _part()
    _step(owned, 1, [2, 4])
    for spoil in (
        {"master": np.zeros(3, np.float32)}, {"changed-0": np.array([4, 2])}, {"changed-0": np.array([4, 1000])},
        {"before-0": np.zeros(1, np.float32)}, {"changed-7": np.array([1])}, {"another": np.zeros(3, np.float32)},
        {"changed-1": np.array([1]), "before-1": np.zeros(COLUMNS, np.float32)},
        {f"changed-{'9' * 5000}": np.array([1]), f"before-{'9' * 5000}": np.zeros(COLUMNS, np.float32)},
    ):
        record = owned.state(1, (), wires=True)
        record.arrays.update(spoil)  # type: ignore[arg-type]
        assert not fits_rows(record, owned.shard, owned._config), spoil


# ---- Tables in the layout: every row has one place, and the flat vector knows nothing of them ----


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


# ---- What cannot be a table is refused before anything begins, with a sentence that says what to do ----


DATA = torch.utils.data.TensorDataset(torch.arange(12) % 9, torch.randn(12))


def _table(**options: Any) -> torch.nn.Embedding:
    return torch.nn.Embedding(9, 2, sparse=True, **{"device": "meta", **options})


def _tied_frozen() -> torch.nn.Embedding:
    table = _table()
    table.weight.requires_grad_(False)
    return table


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (_table(device="cpu"), "it has weights here; declare it with device='meta'"),
        (torch.nn.EmbeddingBag(9, 2, sparse=True, device="meta"), r"only; use one and reduce its rows"),
        (_table(padding_idx=0), "padding_idx, max_norm and scale_grad_by_freq"),
        (_table(max_norm=1.0), "padding_idx, max_norm and scale_grad_by_freq"),
        (_table(dtype=torch.float16), "it must be fp32, trainable and not empty"),
        (_tied_frozen(), "it must be fp32, trainable and not empty"),
    ],
    ids=["materialised", "bag", "padding", "max_norm", "half", "frozen"],
)
def test_an_embedding_that_cannot_be_a_table_is_refused_by_name(model: torch.nn.Module, sentence: str) -> None:
    with pytest.raises(ModelError, match=f"^weight cannot be a table: .*{sentence}"):
        ModelTensors(model, resolve({}))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sync": rp.LocalSteps(steps=4)}, "under rp.LocalSteps the worker would have to hold it"),
        ({"sync": rp.AllReduce()}, "under rp.AllReduce the worker would have to hold it"),
        ({"sync": rp.Async(delay_compensation=0.1)}, "delay compensation is not supported"),
        ({"sync": rp.Async(), "clip": 1.0}, "its gradient cannot be clipped"),
        ({"optimizer": rp.SGD(lr=0.1, momentum=0.9)}, "momentum would move every row at every step"),
        ({"optimizer": rp.AdamW(eps=0.0)}, "needs a positive one"),
    ],
    ids=["local steps", "all-reduce", "delay compensation", "clip", "momentum", "eps"],
)
def test_settings_that_tables_cannot_follow_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        ModelTensors(_table(), resolve(settings))
    ModelTensors(torch.nn.Embedding(9, 2), resolve(settings))


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_impossible_first_values_are_refused(std: float) -> None:
    with pytest.raises(ConfigError, match="table_std"):
        resolve({"table_std": std})


def test_a_row_that_the_table_does_not_have_is_named() -> None:
    with pytest.raises(ModelError, match="there is no row 9 of weight, which has 9: they count from 0"):
        _train(_table(), offset=1)


def test_a_table_before_the_loop_says_where_it_can_be_used() -> None:
    model = _table()
    with pytest.raises(RallypointError, match="use it inside the run's loop"):
        _use_early(model)


def _use_early(model: torch.nn.Module) -> None:
    with EmbeddedJob() as job:
        job.train(model, DATA, batch=4, steps=1)
        model(torch.tensor([1]))


def test_a_model_of_nothing_but_tables_is_trained_and_gets_its_forward_back() -> None:
    model = _table()
    losses = _train(model, steps=60)
    assert losses[-1] < 0.5 * losses[0]
    assert "forward" not in vars(model)


def _train(model: torch.nn.Embedding, offset: int = 0, steps: int = 4) -> list[float]:
    losses = []
    with EmbeddedJob() as job:
        for micro in job.train(model, DATA, batch=12, steps=steps, seed=1, optimizer=rp.Adam(lr=0.1)):
            with micro:
                row, _ = micro.batch
                loss = (model(torch.where(row == 8, row + offset, row)).sum(1) - 1).pow(2).mean()
                losses.append(float(loss.detach()))
                micro.backward(loss)
    return losses
