"""A job of several hosts, whole: what leaves the store, and what happens when a host dies."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import rallypoint as rp
from rallypoint.testing.processes import ProcessCluster
from rallypoint.worker.loop.session import Job

FILES, ROWS = 6, 400
BATCH = 20


class NotedStore(LocalFileSystem):
    """`noted://`: files of this machine, as a store that writes down what is read of it."""

    protocol = "noted"
    log: ClassVar[str] = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("noted://")))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        data = bytes(super().cat_file(path, start, end, **kwargs))
        with Path(self.log).open("a") as log:
            log.write(f"{os.path.basename(path)} {start} {end}\n")
        return data


def train(job: Job, folder: str, shared: bool) -> str:
    fsspec.register_implementation("noted", NotedStore, clobber=True)
    NotedStore.log = f"{folder}/log-{job.id}"
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    cache = rp.Cache(f"{folder}/cache-{job.id}", peers=shared)
    data = rp.Parquet(f"noted://{folder}/rows", transform=lambda row: torch.from_numpy(row["x"]), cache=cache)
    steps = len(data) // (2 * BATCH)
    settings: dict[str, Any] = {"replicas": 2, "batch": BATCH, "steps": steps}
    for micro in job.train(model, data, optimizer=rp.SGD(lr=0.1), **settings):
        with micro:
            micro.backward(model(micro.batch).pow(2).mean())
    return str(model.weight.tolist())


def read(folder: Path) -> Counter[str]:
    """How often each range of a row group was read. (The end of a file tells of it, before the job begins.)"""
    lines = [line for log in folder.glob("log-*") for line in log.read_text().splitlines()]
    sizes = {path.name: path.stat().st_size for path in (folder / "rows").iterdir()}
    return Counter(line for line in lines if int(line.split()[2]) < sizes[line.split()[0]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    generator = np.random.default_rng(0)
    for number in range(FILES):
        values = generator.standard_normal((ROWS, 4)).astype(np.float32)
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 4)})
        pyarrow.parquet.write_table(table, tmp_path / "rows" / f"{number}.parquet", row_group_size=100)
    return tmp_path


@pytest.mark.slow
@pytest.mark.programs
def test_two_hosts_read_the_store_about_once_and_end_with_the_same_bytes(folder: Path) -> None:
    with ProcessCluster(workers=2, servers=1) as cluster:
        alone = cluster.run(train, str(folder), False)
    plain = read(folder)
    for log in folder.glob("log-*"):
        log.unlink()
    for path in sorted(folder.glob("cache-*")):
        path.rename(folder / f"old-{path.name}")
    with ProcessCluster(workers=2, servers=1) as cluster:
        together = cluster.run(train, str(folder), True)
    assert together == alone
    shared = read(folder)
    assert set(shared) == set(plain)
    # A piece may be read twice, when it is compared by chance
    assert sum(shared.values()) <= len(shared) + 2
    assert set(plain.values()) == {2}  # a full shuffle: each host needs all
