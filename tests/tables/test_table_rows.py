"""Sparse payloads, sums and updates of a table's part: what is touched changes, and exactly as torch would have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rallypoint as rp
from rallypoint.codec import base
from rallypoint.codec.base import RowSum, check_gradient, decode_ids, encode_gradient, encode_ids, gradient_bytes
from rallypoint.config import resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.schedule import rate_at
from rallypoint.core.shard.effects import Apply
from rallypoint.errors import ProtocolError
from rallypoint.net.pool import Buffer, BufferPools
from rallypoint.optim import RowsOptimizer
from rallypoint.server.rows import OwnedRows, first_rows, fits_rows
from rallypoint.store.record import decode_record, encode_record

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
    assert part is not None
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
