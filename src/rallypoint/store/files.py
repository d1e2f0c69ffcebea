"""Whole files on any fsspec filesystem: a file exists completely or not at all, and on disk it survives a power cut."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from rallypoint.errors import ConfigError
from rallypoint.store.direct import DirectFile, new_buffer

_PARTIAL = ".partial"

Chunk = bytes | memoryview


class Files:
    """The files below one URL or local path. Paths are relative to it, with parts joined by `/`.

    On a local filesystem a file is written under another name, flushed to the disk and then renamed. On a remote one it
    is one put, which object stores make atomic. All methods raise OSError like the filesystem.
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{url} is no place for snapshots: {error}") from None
        self._root: str = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        # Of closed files, to use again: the system would clear fresh memory, which costs more than a copy
        self._buffers: list[mmap] = []

    def where(self, path: str = "") -> str:
        """The full name, for messages: a plain path for a local filesystem, a URL for others."""
        full = self._full(path)
        return full if self._local else str(self._fs.unstrip_protocol(full))

    @contextmanager
    def writing(self, path: str) -> Iterator[Callable[[Chunk], object]]:
        """Write a whole file, replacing any of that name. Yields a function that takes the next piece.

        Only a remote filesystem keeps the pieces in memory. A failure removes what was written.
        """
        folder = path.rpartition("/")[0]
        self._make_folder(self._full(folder))
        if self._local:
            with self._writing_locally(path) as write:
                yield write
            return
        chunks: list[bytes] = []
        yield lambda chunk: chunks.append(bytes(chunk))
        self._fs.pipe_file(self._full(path), b"".join(chunks))

    @contextmanager
    def _writing_locally(self, path: str) -> Iterator[Callable[[Chunk], object]]:
        folder, _, name = path.rpartition("/")
        # Each writer has a name of its own: a writer that was paused and replaced must not write into our file.
        partial = self._full(f"{folder}/.{name}.{uuid.uuid4().hex}{_PARTIAL}".lstrip("/"))
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = new_buffer()
        try:
            with DirectFile(partial, buffer) as file:
                yield file.write
                file.sync()
            os.replace(partial, self._full(path))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        finally:
            self._buffers.append(buffer)
        _sync_folder(self._full(folder))

    def get(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes `start..stop` of a file, or all of it; fewer where the file ends earlier.

        What is there and no regular file (a pipe, say) has no bytes.
        """
        full = self._full(path)
        if self._local and Path(full).exists() and not Path(full).is_file():
            return b""  # opening a pipe would wait for somebody who writes into it
        return bytes(self._fs.cat_file(full, start=start, end=stop))

    def size(self, path: str) -> int:
        """Return a file's size in bytes."""
        return int(self._fs.info(self._full(path))["size"])

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(self._full(path)))

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in `folder`; none when it does not exist."""
        full = self._full(folder)
        self._fs.invalidate_cache()  # other processes write here too
        try:
            found = self._fs.ls(full, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in (path.rstrip("/").rpartition("/")[2] for path in found) if name)

    def remove(self, path: str) -> None:
        """Remove a file, also across a power cut. Does nothing when there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))
            if self._local:
                _sync_folder(self._full(path).rpartition("/")[0])

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with everything in it. Does nothing when there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._full(folder), recursive=True)

    def sweep(self, name: str) -> None:
        """Remove the partial files that killed writers of `name`, directly below the root, have left."""
        for found in self.names():
            if found.startswith(f".{name}.") and found.endswith(_PARTIAL):
                self.remove(found)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _make_folder(self, full: str) -> None:
        if not self._local:
            self._fs.makedirs(full, exist_ok=True)
            return
        folder = Path(full)
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(new):
            path.mkdir(mode=0o700, exist_ok=True)  # a model's weights are their owner's
        for path in new:
            _sync_folder(str(path.parent))


def _sync_folder(full: str) -> None:
    """Flush a folder to the disk: it holds the names of its files."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows: folders cannot be opened, and renames need no flush
    descriptor = os.open(full, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
