"""MDS and LitData: what their own libraries wrote is read, by position; what cannot be read is refused.

``written/`` was made by ``python tests/data/sources/write_formats.py tests/data/sources/written``.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rallypoint as rp
from rallypoint.config import JobConfig
from rallypoint.data.dataset import fetch
from rallypoint.data.identity import identity_of
from rallypoint.data.loader import MicroBatches
from rallypoint.data.sources import mds
from rallypoint.data.sources.chunks import Chunk, ChunkRows
from rallypoint.data.sources.remote import File
from rallypoint.errors import DataError

from failing_store import FailingStore, failing_store  # isort: skip
import write_formats  # isort: skip

WRITTEN = Path(__file__).parent / "written"
READERS: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "mds": (rp.MDS, write_formats.mds_sample), "mds-zstd": (rp.MDS, write_formats.mds_sample),
    "litdata": (rp.LitData, write_formats.litdata_sample), "litdata-zstd": (rp.LitData, write_formats.litdata_sample),
    "litdata-list": (rp.LitData, lambda i: [i, f"text {i}"]),
}  # fmt: skip


def same(found: Any, wanted: Any) -> bool:
    """The same values of the same types."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, (np.ndarray, torch.Tensor)):
        return found.dtype == wanted.dtype and found.shape == wanted.shape and bool((found == wanted).all())
    if isinstance(wanted, np.generic):
        return bool(found.dtype == wanted.dtype and found == wanted)
    return bool(found == wanted)


@pytest.fixture
def store(monkeypatch: Any) -> Iterator[type[FailingStore]]:
    """What was written, in a store."""
    with failing_store(monkeypatch) as made:
        for path in WRITTEN.rglob("*.*"):
            FailingStore().pipe_file(f"/{path.relative_to(WRITTEN)}", path.read_bytes())
        yield made


@pytest.mark.parametrize("name", READERS)
def test_samples_are_what_was_written(name: str) -> None:
    reader, sample = READERS[name]
    data = reader(WRITTEN / name)
    assert len(data) == write_formats.COUNT == sum(data.shard_lengths())
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    for index, found in zip(order, fetch(data, order), strict=True):
        assert same(found, sample(index)), (index, found)


@pytest.mark.parametrize("name", READERS)
def test_a_store_that_fails_one_request_in_three_costs_no_sample(name: str, store: Any, tmp_path: Path) -> None:
    store.every = 3
    reader, sample = READERS[name]
    data = pickle.loads(pickle.dumps(reader(f"failing://{name}", cache=tmp_path)))
    assert all(map(same, fetch(data, range(50)), map(sample, range(50))))
    store.requests = 0
    assert all(map(same, fetch(pickle.loads(pickle.dumps(data)), range(50)), map(sample, range(50))))
    assert store.requests == 0  # all of it is in the cache


@pytest.mark.parametrize("name", ["mds-zstd", "litdata"])
def test_windows_read_each_file_about_once_and_a_copy_elsewhere_is_the_same_data(name: str, store: Any) -> None:
    reader, sample = READERS[name]
    data = reader(f"failing://{name}", transform=lambda row: row["id"], cache_bytes=12000)
    assert identity_of(data) == identity_of(reader(WRITTEN / name))
    store.sent = 0
    config = JobConfig(replicas=1, batch=10, steps=5, order="windowed", mixed_shards=2)
    batches = MicroBatches(data, config, torch.device("cpu"))
    read = [int(i) for step in range(5) for i in batches.load(step, 0, 0)]
    assert sorted(read) == [sample(i)["id"] for i in range(50)]
    assert store.sent == sum(path.stat().st_size for path in (WRITTEN / name).iterdir() if path.name != "index.json")


def test_several_folders_follow_each_other() -> None:
    data = rp.MDS([WRITTEN / "mds", WRITTEN / "mds-zstd"])
    assert [row["id"] for row in fetch(data, [0, 49, 50, 99])] == [-3, 46, -3, 46]
    assert identity_of(data) != identity_of(rp.MDS([WRITTEN / "mds-zstd", WRITTEN / "mds"]))


# ---- what is refused ----


def changed(tmp_path: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A copy, with another index."""
    folder = shutil.copytree(WRITTEN / name, tmp_path / name)
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is unpickled"):
        rp.LitData(WRITTEN / "litdata-pickle")
    folder = changed(tmp_path, "mds", lambda index: index["shards"][0]["column_encodings"].__setitem__(0, "pkl"))
    with pytest.raises(DataError, match="column about holds pickled objects, and nothing is unpickled"):
        rp.MDS(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda index: index["shards"][0].update(version=3), "version 3: MDS, version 2, is read"),
        (lambda index: index["shards"][0].update(compression="br:11"), "compressed with br: write them with zstd"),
        (lambda index: index["shards"][0]["column_encodings"].__setitem__(0, "pil"), "encoded as pil, which is not"),
        (lambda index: index["shards"][0]["column_names"].pop(), "an encoding and a size for each column"),
        (lambda index: index["shards"][0]["zip_data"].update(basename="../secret"), "must be in the folder"),
        (lambda index: index["shards"][0]["zip_data"].update(basename="/etc/passwd"), "must be in the folder"),
        (lambda index: index.pop("shards"), "is no index of such files"),
    ],
)
def test_an_index_of_mds_that_cannot_be_read_is_refused(change: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        rp.MDS(changed(tmp_path, "mds-zstd", change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda config: config.update(encryption={"level": "chunk"}), "chunks that are encrypted"),
        (lambda config: config.update(item_loader="TokensLoader"), "chunks that are written for TokensLoader"),
        (lambda config: config.update(compression_level="batch"), "chunks that are compressed by batch"),
        (lambda config: config.update(ipc_compression="zstd"), "chunks that are kept as Arrow tables"),
        (lambda config: config["data_format"].__setitem__(0, "pil"), "with a pil, which is not read"),
        (lambda config: config["data_format"].__setitem__(0, "no_header_tensor:99"), "whose type of numbers is not"),
        (lambda config: config["data_format"].pop(), "tells 9 types for 10 values"),
        (lambda config: config.update(data_spec=config["data_spec"].replace("builtins.tuple", "os.system")),
         "with a os.system: dicts, lists and tuples are read"),
    ],
)  # fmt: skip
def test_an_index_of_litdata_that_cannot_be_read_is_refused(change: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        rp.LitData(changed(tmp_path, "litdata", lambda index: change(index["config"])))


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index\.json"):
        rp.MDS(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_an_error_and_never_other_samples(name: str, tmp_path: Path) -> None:
    reader, sample = READERS[name]
    folder = shutil.copytree(WRITTEN / name, tmp_path / name)
    path = next(path for path in sorted(folder.iterdir()) if path.name != "index.json")
    whole = path.read_bytes()
    checked = name.startswith("mds")  # its index has a hash of each file
    for at in range(0, len(whole), 61):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            found = fetch(reader(folder), range(10))
        except DataError:
            continue
        assert not checked, at
        assert len(found) == 10
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError):
        fetch(reader(folder), range(len(reader(folder))))
    path.write_bytes(whole)
    assert same(reader(folder)[0], sample(0))


# ---- the libraries themselves ----


@pytest.mark.slow
def test_what_the_installed_streaming_writes_is_read(tmp_path: Path) -> None:
    try:
        write_formats.write_mds(tmp_path / "mds", "zstd")
    except ImportError as error:
        pytest.skip(f"mosaicml-streaming is not installed ({error})")
    assert all(map(same, fetch(rp.MDS(tmp_path / "mds"), range(50)), map(write_formats.mds_sample, range(50))))


@pytest.mark.slow
def test_what_the_installed_litdata_writes_is_read(tmp_path: Path) -> None:
    try:
        write_formats.write_litdata(tmp_path / "lit", "zstd")
    except ImportError as error:
        pytest.skip(f"litdata is not installed ({error})")
    assert all(map(same, fetch(rp.LitData(tmp_path / "lit"), range(50)), map(write_formats.litdata_sample, range(50))))


@pytest.mark.parametrize("number", [-1, 10**30, 2**62])
def test_an_index_that_tells_impossible_numbers_of_samples_is_refused(number: int, tmp_path: Path) -> None:
    folder = changed(tmp_path, "litdata", lambda index: index["chunks"][0].update(chunk_size=number))
    with pytest.raises(DataError):
        rp.LitData(folder)


def test_a_sample_without_its_sizes_and_a_file_cut_anywhere_are_data_errors() -> None:
    def ends(data: memoryview) -> Any:
        return mds._sample(["a", "b"], [0, 0], [bytes, bytes], data)

    file = File("", "x", "x", 20, "")
    whole = np.array([1, 12, 16, 0], "<u4").tobytes()
    with pytest.raises(DataError, match="sample 0"):
        ChunkRows(Chunk(file, 1, 16, "", ends), whole).row(0)
    for length in range(12):
        with pytest.raises(DataError, match="damaged"):
            ChunkRows(Chunk(file, 1, 16, "", ends), whole[:length])
    with pytest.raises(DataError, match="sample 0"):
        ChunkRows(Chunk(file, 1, 16, "", mds._decimal), whole).row(0)
