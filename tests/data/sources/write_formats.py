"""Writes small data sets with the real mosaicml-streaming and litdata: ``python write_formats.py FOLDER``.

Both import much that their writers do not use (cloud SDKs, transformers): what is not installed is replaced by
something empty while they are imported. Made with ``pip install --no-deps mosaicml-streaming==0.13.0
litdata==0.2.76`` and what these import at once (zstd, python-snappy, cramjam, brotli, catalogue, lightning-utilities).
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import torch

COUNT = 50
NOT_USED = {"transformers", "oci", "boto3", "botocore", "google", "azure", "paramiko", "datasets", "torchvision",
            "databricks", "huggingface_hub", "alipcs_py", "pyspark", "obstore", "tifffile"}  # fmt: skip


class _Empty(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock if name[0].isupper() else MagicMock()


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in NOT_USED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _without_what_is_not_used() -> Iterator[None]:
    before, finder = set(sys.modules), _Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in NOT_USED:
                del sys.modules[name]


def mds_writer() -> Any:
    """Return streaming's MDSWriter. ImportError if it is not installed."""
    with _without_what_is_not_used():
        from streaming.base.format.mds.writer import MDSWriter
    return MDSWriter


def litdata_writer() -> Any:
    """Return litdata's BinaryWriter. ImportError if it is not installed."""
    with _without_what_is_not_used():
        from litdata.streaming.writer import BinaryWriter
    return BinaryWriter


MDS_COLUMNS = {
    "id": "int", "text": "str", "raw": "bytes", "small": "uint8", "half": "float16", "double": "float64",
    "label": "int32", "digits": "str_int", "number": "str_float", "decimal": "str_decimal", "about": "json",
    "any": "ndarray", "floats": "ndarray:float32", "fixed": "ndarray:int16:2,3",
}  # fmt: skip


def mds_sample(i: int) -> dict[str, Any]:
    from decimal import Decimal

    return {
        "id": i - 3, "text": "é" * (i % 7), "raw": bytes([i]) * (i % 5), "small": np.uint8(i),
        "half": np.float16(i / 3), "double": np.float64(i / 7), "label": np.int32(-i), "digits": 10**20 + i,
        "number": i / 3, "decimal": Decimal(i) / 4, "about": {"i": i, "list": [1, None, "x"]},
        "any": np.arange(i + 1, dtype=np.int64).reshape(1, -1), "floats": np.full((2, i % 3 + 1), i, np.float32),
        "fixed": np.full((2, 3), i, np.int16),
    }  # fmt: skip


def write_mds(folder: Path, compression: str | None = None, hashes: tuple[str, ...] = ("sha1", "xxh3_64")) -> None:
    with mds_writer()(
        out=str(folder), columns=MDS_COLUMNS, compression=compression, hashes=list(hashes), size_limit=4000
    ) as writer:
        for i in range(COUNT):
            writer.write(mds_sample(i))


def litdata_sample(i: int) -> dict[str, Any]:
    return {
        "id": i, "text": "é" * (i % 7), "raw": bytes([i]) * (i % 5), "yes": i % 2 == 0, "number": i / 3,
        "nested": [torch.full((2, i % 3 + 1), i), {"row": torch.arange(i % 4), "np": np.full((2, 2), i, np.int16)}],
        "pair": (np.arange(i % 3, dtype=np.float32), torch.tensor(i, dtype=torch.uint8)),
    }  # fmt: skip


def write_litdata(folder: Path, compression: str | None = None, sample: Any = litdata_sample) -> None:
    folder.mkdir(parents=True)
    level = {} if compression is None else {"compression_level": "chunk"}
    writer = litdata_writer()(str(folder), chunk_bytes=3000, compression=compression, **level)
    for i in range(COUNT):
        writer[i] = sample(i)
    writer.done()
    writer.merge(1)


def main(folder: Path) -> None:
    write_mds(folder / "mds")
    write_mds(folder / "mds-zstd", "zstd:7")
    write_litdata(folder / "litdata")
    write_litdata(folder / "litdata-zstd", "zstd")
    write_litdata(folder / "litdata-list", sample=lambda i: [i, f"text {i}"])
    write_litdata(folder / "litdata-pickle", sample=lambda i: {"id": i, "set": {i}})
    for path in sorted(folder.rglob("index.json")):
        print(path, path.stat().st_size, json.dumps(json.loads(path.read_text()))[:1500])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
