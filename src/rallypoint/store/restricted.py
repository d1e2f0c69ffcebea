"""Reads what is pickled in a folder of torch.distributed.checkpoint, with only the classes that the format needs."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from rallypoint.errors import DataError

_OF_METADATA = "torch.distributed.checkpoint.metadata"
_NEEDED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    (_OF_METADATA, "BytesStorageMetadata"),
    (_OF_METADATA, "ChunkStorageMetadata"),
    (_OF_METADATA, "Metadata"),
    (_OF_METADATA, "MetadataIndex"),
    (_OF_METADATA, "StorageMeta"),
    (_OF_METADATA, "TensorProperties"),
    (_OF_METADATA, "TensorStorageMetadata"),
    (_OF_METADATA, "_MEM_FORMAT_ENCODING"),
}


class _OnlyMetadata(pickle.Unpickler):
    """An unpickler that knows the classes of the format's list of tensors, and no others."""

    def find_class(self, module: str, name: str, /) -> Any:
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if of_torch or (module, name) in _NEEDED:
            return super().find_class(module, name)
        raise DataError(f"its list of tensors names {module}.{name}, which no such list needs: it is not read")


class MetadataReader(FileSystemReader):
    """Reads a folder. torch asks it for the list of tensors, so torch never unpickles that list itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self._folder / ".metadata", "rb") as file:
            metadata = _OnlyMetadata(file).load()
        if not isinstance(metadata, Metadata):
            raise DataError(f"its list of tensors is a {type(metadata).__name__}")
        for about in metadata.storage_data.values():
            if Path(about.relative_path).name != about.relative_path:
                raise DataError("its list of tensors names files outside of its folder")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def whole_number(self, metadata: Metadata, key: str) -> int:
        """Return a Python int of the checkpoint. Raises DataError for anything else."""
        about = metadata.storage_data[MetadataIndex(key)]
        if not getattr(about, "transform_descriptors", None):
            with open(self._folder / about.relative_path, "rb") as file:
                file.seek(about.offset)
                value = torch.load(io.BytesIO(file.read(about.length)), weights_only=True)
            if type(value) is int:
                return value
        raise DataError(f"its {key} is neither a tensor nor a whole number")
