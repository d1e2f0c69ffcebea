"""Token files: windows as nanoGPT cuts them, several files as one data set, errors that name the file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rallypoint as rp
from rallypoint.config import JobConfig
from rallypoint.data import tokens
from rallypoint.data.dataset import fetch
from rallypoint.data.loader import MicroBatches
from rallypoint.errors import DataError, RallypointError


def write(path: Path, tokens: Any, dtype: str = "uint16") -> Path:
    np.asarray(tokens, dtype).tofile(path)
    return path


def test_samples_are_windows_and_their_targets(tmp_path: Path) -> None:
    data = rp.TokenFiles(write(tmp_path / "train.bin", range(60_000, 60_023)), context=5)
    assert len(data) == 4, "22 targets, 5 a window; the rest is left out"
    x, y = data[3]
    assert x.dtype == y.dtype == torch.int64
    assert x.tolist() == [60_015, 60_016, 60_017, 60_018, 60_019]
    assert y.tolist() == [60_016, 60_017, 60_018, 60_019, 60_020]
    with pytest.raises(IndexError):
        data[4]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5).filter(lambda sizes: max(sizes) > 9),
    st.integers(1, 9), st.integers(1, 12), st.sampled_from([0, 6]),
)  # fmt: skip
def test_several_files_are_one_data_set(
    tmp_path_factory: Any, sizes: list[int], context: int, stride: int, skip: int
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    expected = []
    for number, size in enumerate(sizes):
        tokens = list(range(100 * number, 100 * number + size))
        (folder / f"{number}.bin").write_bytes(b"h" * skip + np.asarray(tokens, "<u4").tobytes())
        expected += [tokens[i : i + context] for i in range(0, size, stride) if i + context + 1 <= size]
    data = rp.TokenFiles(str(folder / "*.bin"), context, "uint32", stride, skip)
    assert [x.tolist() for x, _ in fetch(data, range(len(data)))] == expected
    assert sum(data.shard_lengths()) == len(data) == len(expected)


def test_it_pickles_without_its_tokens_and_keeps_few_files_open(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokens, "MOST_OPEN", 2)
    files = [write(tmp_path / f"{n}.bin", np.full(50_000, n)) for n in range(4)]
    data = rp.TokenFiles(files, context=8)
    firsts = [int(data[i][0][0]) for i in range(0, len(data), len(data) // 4)]
    assert firsts == [0, 1, 2, 3]
    assert len(data._mapped) == 2
    packed = pickle.dumps(data)
    assert len(packed) < 2_000
    assert int(pickle.loads(packed)[len(data) - 1][0][0]) == 3


@pytest.mark.parametrize("order", ["shuffled", "windowed"])
def test_a_job_reads_every_window_once_in_a_pass(tmp_path: Path, monkeypatch: Any, order: Any) -> None:
    monkeypatch.setattr(tokens, "SHARD_BYTES", 64)
    data = rp.TokenFiles([write(tmp_path / f"{n}.bin", range(1000 * n, 1000 * n + 161)) for n in range(3)], context=4)
    config = JobConfig(replicas=2, batch=6, steps=10, reading=rp.Reading(order=order, mixed_shards=6))
    batches = MicroBatches(data, config, torch.device("cpu"))
    read = [int(x[0]) for step in range(10) for replica in range(2) for x in batches.load(step, replica, 0)[0]]
    assert sorted(read) == [int(x[0]) for x, _ in fetch(data, range(120))]
    if order == "windowed":
        pieces = [{token // 32 for token in read[12 * step : 12 * step + 6]} for step in range(10)]
        assert max(map(len, pieces)) <= 2 * 4, "three shards for each replica, of two windows at most"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"files": "none_*.bin"}, r"there is no file none_\*\.bin"), ({"files": []}, "empty list of files"),
        ({"files": 3}, "got a int: give a file"), ({"files": "s3://bucket/train.bin"}, "copy them here first"),
        ({"context": 0}, "give a context and a stride of 1 or more"), ({"dtype": "float32"}, "whole numbers"),
        ({"context": 10}, r"train\.bin has 10 tokens, and a window needs context \+ 1 = 11"),
        ({"skip": 3}, r"train\.bin has 17 bytes of tokens, which is no multiple of 2"),
        ({"skip": 20}, r"train\.bin is empty \(20 bytes\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_with_a_sentence(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    arguments = {"files": write(tmp_path / "train.bin", range(10)), "context": 4} | settings
    with pytest.raises(RallypointError, match=sentence):
        rp.TokenFiles(**arguments)


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train.bin", range(100))
    data = rp.TokenFiles(path, context=4)
    write(path, range(10))
    with pytest.raises(DataError, match=r"train\.bin had 100 tokens when the job began"):
        data[0]
