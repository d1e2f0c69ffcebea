"""Streaming data sets of Hugging Face's own library: split, shuffled, read again and stopped as any stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.data.identity import identity_of
from rallypoint.data.loader import MicroBatches
from rallypoint.data.spec import given

FILES, ROWS = 4, 12


@pytest.fixture(autouse=True)
def datasets() -> Any:
    """The library: imported by the first test, since it takes a second."""
    return pytest.importorskip("datasets", reason="Hugging Face's streams need `pip install datasets`")


@pytest.fixture
def folder(datasets: Any, tmp_path: Path) -> Path:
    """Four files of JSON lines, and the same rows as Parquet."""
    for file in range(FILES):
        rows = [{"n": file * ROWS + row, "text": f"row {row}"} for row in range(ROWS)]
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / f"{file}.parquet"))
    return tmp_path


def opened(kind: str, folder: Path) -> Any:
    import datasets

    ends = {"json": "jsonl", "parquet": "parquet"}[kind]
    files = [str(folder / f"{file}.{ends}") for file in range(FILES)]
    return datasets.load_dataset(kind, data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache"))


def generated(shards: list[int]) -> Any:
    for shard in shards:
        for row in range(ROWS):
            yield {"n": shard * ROWS + row}


def batches_of(stream: rp.Stream, **settings: Any) -> MicroBatches:
    return MicroBatches(
        stream, resolve({"replicas": 2, "batch": 4, **stream.settings, **settings}), torch.device("cpu")
    )


def all_of(stream: rp.Stream, steps: int) -> dict[tuple[int, int], list[int]]:
    batches = batches_of(stream)
    return {(t, r): batches.loaded(t, r, 0)[0]["n"].tolist() for t in range(steps) for r in range(2)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_files_are_split_over_the_parts_and_each_row_is_read_once_in_a_pass(kind: str, folder: Path) -> None:
    data = opened(kind, folder)
    assert data.num_shards == FILES
    read = all_of(rp.Stream(data, parts=2), FILES * ROWS // 8)
    assert sorted(n for numbers in read.values() for n in numbers) == list(range(FILES * ROWS))


def test_its_shuffle_is_another_one_in_each_pass_and_the_same_whoever_reads(folder: Path) -> None:
    def stream() -> rp.Stream:
        return rp.Stream(opened("json", folder).shuffle(seed=5, buffer_size=8), parts=2)

    steps = FILES * ROWS // 8  # of a pass
    read = all_of(stream(), 2 * steps)
    assert read == all_of(stream(), 2 * steps)
    passes = [[n for (t, _), numbers in read.items() if t // steps == p for n in numbers] for p in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(FILES * ROWS))
    assert passes[0] != passes[1]
    late = batches_of(stream())  # takes replica 1 over in the second pass
    assert late.loaded(2 * steps - 2, 1, 0)[0]["n"].tolist() == read[2 * steps - 2, 1]


def test_a_generated_one_that_is_mapped_and_filtered_is_taken_as_it_is() -> None:
    import datasets

    data = datasets.IterableDataset.from_generator(generated, gen_kwargs={"shards": list(range(FILES))})
    data = data.map(lambda row: {"twice": 2 * row["n"]}).filter(lambda row: row["n"] % 3 == 0)
    taken = given(data)
    assert isinstance(taken.dataset, rp.Stream)
    assert identity_of(taken.dataset) == identity_of(rp.Stream(data))
    batch, _ = batches_of(rp.Stream(data, parts=2)).loaded(0, 1, 0)
    assert [batch["n"].tolist(), batch["twice"].tolist()] == [[24, 27, 30, 33], [48, 54, 60, 66]]
