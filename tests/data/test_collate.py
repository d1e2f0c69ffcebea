"""Batches are those of torch's ``default_collate``, however they are made: values, types, shapes and strides."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from rallypoint.config import JobConfig
from rallypoint.data import collate
from rallypoint.data.collate import collated, gathered
from rallypoint.data.loader import MicroBatches

Point = namedtuple("Point", "x y")
KINDS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "f2", "f4", "f8", "c8", "c16")


def same(ours: Any, torchs: Any) -> bool:
    if isinstance(torchs, torch.Tensor):
        if not isinstance(ours, torch.Tensor) or (ours.dtype, ours.shape) != (torchs.dtype, torchs.shape):
            return False
        return ours.stride() == torchs.stride() and ours.numpy().tobytes() == torchs.numpy().tobytes()
    if isinstance(torchs, dict):
        alike = type(ours) is type(torchs) and ours.keys() == torchs.keys()
        return alike and all(same(ours[key], torchs[key]) for key in ours)
    if isinstance(torchs, (list, tuple)):
        pairs = zip(ours, torchs, strict=True)
        return type(ours) is type(torchs) and all(same(one, other) for one, other in pairs)
    return type(ours) is type(torchs) and bool(ours == torchs)


def arrays(kind: str, *shape: int, count: int = 5) -> list[Any]:
    generator = np.random.default_rng(7)
    return [(generator.standard_normal(shape) * 50).astype(kind) for _ in range(count)]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (33,), (3, 5), (3, 4, 5), (1, 1, 1), (2, 3, 4, 5)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_rows_and_images_are_batches_as_torch_makes_them(kind: str, shape: tuple[int, ...]) -> None:
    for rows in (arrays(kind, *shape), arrays(kind, *shape, count=1)):
        assert same(collated(rows), default_collate(rows))


@pytest.mark.parametrize("kind", ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "f2", "f4", "f8"])
def test_numpys_numbers_are_batches_as_torch_makes_them(kind: str) -> None:
    numbers = [np.dtype(kind).type(value) for value in (0, 1, 100, 1)]
    assert same(collated(numbers), default_collate(numbers))


@pytest.mark.parametrize(
    "samples",
    [
        [1, -2, 2**62], [1, True], [True, False], [1, 2.5], [2.5, float("nan"), -0.0], ["a", "b"], [b"a", b"b"],
        [np.float32(1), np.float64(2)], [np.float64(1), 2.0], [np.float32("nan"), np.float32(-0.0)],
        [(np.ones(3, "f4"), 1), (np.zeros(3, "f4"), 2)], [[np.ones(3), "x"], [np.zeros(3), "y"]],
        [{"x": np.ones(2), "y": {"z": 3}}, {"x": np.zeros(2), "y": {"z": 4}}],
        [Point(np.ones(2), 1), Point(np.zeros(2), 2)],
        [torch.ones(3), torch.zeros(3)], [np.ones(3, "f4"), np.ones(3, "f8")],
        [np.ones(2), np.ones(2).view(np.recarray)],
        [np.arange(12.0).reshape(4, 3).T, np.ones((3, 4))], [np.arange(6.0)[::2], np.ones(3)],
        [np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)] * 3, [np.broadcast_to(np.float32(3), (4,))] * 2,
        [np.asfortranarray(np.arange(6.0).reshape(2, 3))] * 2, [np.ones(2), [0.0, 1.0]],
    ],
    ids=lambda samples: repr(samples)[:40],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_samples_of_any_structure_are_batches_as_torch_makes_them(samples: list[Any]) -> None:
    assert same(collated(samples), default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [2**63, 1], [np.ones(3), np.ones(4)], [np.ones((2, 3)), np.ones((4, 3))], [np.arange(4)[::-1]] * 2,
        [np.array(["a"])] * 2, [np.ones(2, ">f4")] * 2, [None], [(1, 2), (1,)],
        [np.ones(2), 1.0], [np.ones(2), None], [np.zeros(4, [("a", "u1"), ("b", "f4")])["b"]] * 2,
    ],
    ids=lambda samples: repr(samples)[:40],
)  # fmt: skip
def test_what_torch_refuses_is_refused_with_the_same_error(samples: list[Any]) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as torchs:
        default_collate(samples)
    with pytest.raises(torchs.type) as ours:
        collated(samples)
    assert str(ours.value) == str(torchs.value)


def test_a_program_that_changes_torchs_table_has_its_own_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, np.ndarray, lambda batch, **_: "its own")
    assert collated(arrays("f4", 3)) == "its own"
    assert gathered(TensorDataset(torch.ones(3)), [0]) is None


def test_a_batch_is_the_samples_own_bytes_no_longer() -> None:
    rows = arrays("f4", 3)
    batch = collated(rows)
    rows[0][:] = 9
    assert not (batch[0] == 9).any()


def test_in_a_loader_process_rows_are_written_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, dataset = arrays("f4", 3), TensorDataset(torch.arange(6))
    expected = default_collate(rows)
    monkeypatch.setattr(collate, "get_worker_info", object)
    assert collated(rows).is_shared()
    assert same(collated(rows), expected)
    of_tensors = gathered(dataset, [4, 1])
    assert of_tensors[0].is_shared()
    assert of_tensors[0].tolist() == [4, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int64])
@pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 2, 3, 4)])
def test_a_tensor_datasets_batch_is_that_of_its_samples(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    dataset = TensorDataset((torch.rand(shape) * 50).to(dtype), torch.arange(8))
    for one, positions in ((dataset, [3, 7, 0, 3]), (Subset(Subset(dataset, [5, 1, 4]), [2, 0]), [1, 0, 1])):
        ours = gathered(one, positions)
        torchs = default_collate([one[position] for position in positions])
        assert ours is not None
        assert isinstance(torchs, list)
        for own, other in zip(ours, torchs, strict=True):
            assert (own.dtype, own.shape, own.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(own, other)


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * one for one in super().__getitem__(index))


@pytest.mark.parametrize(
    "dataset",
    [
        Doubled(torch.arange(4)), [1, 2, 3], TensorDataset(torch.ones(4, requires_grad=True)),
        TensorDataset(torch.ones(3, 4).T), TensorDataset(torch.ones(4, 0)),
        TensorDataset(torch.ones(4), torch.ones(4, dtype=torch.uint16)),
        Subset(TensorDataset(torch.ones(4)), [[0, 1], [1, 2]]),  # type: ignore[list-item]
        Subset(TensorDataset(torch.ones(4)), [True, False]),
    ],
    ids=["a class of its own", "a list", "gradients", "not contiguous", "empty rows", "numbers torch cannot select",
         "a subset of slices of rows", "a subset by truth values"],
)  # fmt: skip
def test_samples_of_other_data_sets_are_read_one_by_one(dataset: Any) -> None:
    assert gathered(dataset, [0, 1]) is None


def test_a_tensor_datasets_micro_batch_leaves_the_generators_as_any_others_does() -> None:
    x, y = torch.rand(16, 3), torch.arange(16)
    config, seen = JobConfig(replicas=2, batch=4, steps=3), list[Any]()
    for dataset in (TensorDataset(x, y), list(zip(x, y, strict=True))):
        batches = MicroBatches(dataset, config, torch.device("cpu"))
        seen.append([(*batches.load(step, 1, 0), torch.rand(2), np.random.rand()) for step in range(3)])
    for ours, other in zip(*seen, strict=True):
        for one, two in zip(ours, other, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))
