"""Ranges of files on any fsspec filesystem, asked for again where the store fails."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from rallypoint.errors import DataError, UsageError

log = logging.getLogger("rallypoint")

PAUSES_S = (0.1, 0.4, 1.6, 6.4)  # before each further try
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class File:
    """A file of a store: its path there, and the URL that led to it."""

    url: str
    path: str

    def __str__(self) -> str:
        protocol, separator, _ = self.url.rpartition("://")
        return f"{protocol}{separator}{self.path.lstrip('/')}" if separator else self.path


class Files:
    """Reads files of stores. `options` go to fsspec (keys, endpoints). Raises DataError after several failures.

    It may be pickled, and used after a fork: connections are made in the process that needs them.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        self._made: tuple[int, dict[str, Any]] = 0, {}  # the process, its filesystem of each URL

    def found(self, urls: str | Path | Sequence[str | Path], suffix: str) -> list[File]:
        """Return the files that are meant: files, patterns (`*`), and folders with all their files of this suffix.

        The files of a pattern or a folder are in the order of their names.
        """
        if isinstance(urls, Mapping) or not isinstance(urls, (str, Path, Sequence)):
            raise UsageError(
                f"a {type(urls).__name__} was given as the files: give a URL, a pattern, or a list of them"
            )
        given = [str(url) for url in ([urls] if isinstance(urls, (str, Path)) else urls)]
        found = [file for url in given for file in self._meant(url, suffix)]
        if not found:
            raise DataError(f"there are no files {suffix} in {', '.join(given) or 'an empty list'}")
        return found

    def size(self, file: File) -> int:
        """Return how many bytes a file has."""
        system = self._system(file.url)
        return int(patiently(lambda: system.info(file.path)["size"], str(file)))

    def read(self, file: File, start: int, stop: int) -> bytes:
        """Return the bytes `start..stop` of a file: one request. For any thread."""
        system = self._system(file.url)

        def once() -> bytes:
            data = bytes(system.cat_file(file.path, start=start, end=stop))
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes came of {stop - start} at {start}")
            return data

        return patiently(once, str(file)) if stop > start else b""

    def here(self, file: File) -> str | None:
        """Return the path of a file on this machine's own disks; None for one of a store."""
        return file.path if type(self._system(file.url)) is LocalFileSystem else None

    def open(self, file: File, size: int) -> RangedFile:
        """Return the file as one to seek and read in; `size` is its length in bytes."""
        return RangedFile(lambda start, stop: self.read(file, start, stop), size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": (0, {})}

    def _meant(self, url: str, suffix: str) -> list[File]:
        system = self._system(url)
        path = str(fsspec.core.url_to_fs(url, **self._options)[1])
        if any(sign in path for sign in "*?["):
            matching = patiently(lambda: system.glob(path), url)
            return [File(url, str(name)) for name in sorted(matching)]
        if path.endswith(suffix) or not patiently(lambda: system.isdir(path), url):
            return [File(url, path)]
        inside = patiently(lambda: system.find(path), url)
        return [File(url, str(name)) for name in sorted(inside) if str(name).endswith(suffix)]

    def _system(self, url: str) -> Any:
        process, systems = self._made
        if process != os.getpid():  # after a fork, the connections are the parent's. Two threads may do this: no harm
            self._made = _, systems = os.getpid(), dict[str, Any]()
        if url not in systems:
            try:
                systems[url] = fsspec.core.url_to_fs(url, **self._options)[0]
            except (ValueError, ImportError) as error:
                raise DataError(f"{url} cannot be read: {error}") from None
        return systems[url]


def patiently(call: Callable[[], _T], what: str) -> _T:
    """Return `call()`, repeated with growing pauses where a store fails; not where a file is missing or forbidden.

    Raises DataError, which names `what`, after as many pauses as there are.
    """
    for pause in PAUSES_S:
        try:
            return call()
        except LASTING as error:
            raise DataError(f"{what} cannot be read: {error or type(error).__name__}") from error
        except Exception as error:  # stores raise exceptions of any type
            log.info("%s: %s: %s; trying again in %g s", what, type(error).__name__, error, pause)
        time.sleep(pause)
    try:
        return call()
    except Exception as error:
        raise DataError(
            f"{what} cannot be read: {type(error).__name__}: {error} ({len(PAUSES_S) + 1} tries)"
        ) from error


class RangedFile(io.RawIOBase):
    """A file of a store, of which each read is one request, asked for again by itself where it fails."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._read, self._size, self._at = read, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        stop = self._at + (left if size is None or size < 0 else min(size, left))
        data = self._read(self._at, stop)
        self._at = stop
        return data

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)
