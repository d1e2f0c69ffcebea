"""A real S3 client reads data sets of an S3 server (moto's) on this machine: `pip install s3fs 'moto[server]'`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

import rallypoint as rp
from rallypoint.errors import DataError

pytestmark = pytest.mark.slow  # starts a web server, and imports botocore

FILES, ROWS, GROUP = 3, 200, 50


@pytest.fixture
def options(monkeypatch: Any) -> Iterator[dict[str, Any]]:
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    pytest.importorskip("s3fs", reason="no s3fs: pip install s3fs")
    moto_server = pytest.importorskip("moto.server", reason="no moto: pip install 'moto[server]'")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {"endpoint_url": f"http://{host}:{port}"}
    finally:
        server.stop()


def test_parquet_is_read_from_s3_with_and_without_a_cache(options: dict[str, Any], tmp_path: Path) -> None:
    # In a process of its own: fsspec keeps a thread, and its connections, for as long as a process lives
    process = multiprocessing.get_context("spawn").Process(target=write_and_read, args=(options, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0


def write_and_read(options: dict[str, Any], tmp_path: Path) -> None:
    import s3fs

    store = s3fs.S3FileSystem(**options)
    store.mkdir("bucket")
    for number in range(FILES):
        table = pa.table({"x": list(range(number * ROWS, (number + 1) * ROWS))})
        pyarrow.parquet.write_table(table, tmp_path / "part.parquet", row_group_size=GROUP)
        store.put_file(str(tmp_path / "part.parquet"), f"bucket/rows/{number}.parquet")
    store.put_file(str(tmp_path / "part.parquet"), "bucket/rows/_temporary/0.parquet")  # not meant
    everything = list(range(FILES * ROWS))
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        for urls in ("s3://bucket/rows", "s3://bucket/rows/*.parquet"):
            data = rp.Parquet(urls, storage_options=options, cache=cache)
            assert list(data.shard_lengths()) == [GROUP] * (FILES * ROWS // GROUP)
            assert [int(row["x"]) for row in data.__getitems__(everything)] == everything
    store.rm("bucket/rows/1.parquet")
    with pytest.raises(DataError, match=r"bucket/rows/1\.parquet cannot be read"):
        rp.Parquet([f"s3://bucket/rows/{number}.parquet" for number in range(FILES)], storage_options=options)
