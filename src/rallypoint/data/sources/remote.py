"""Ranges of files on any fsspec filesystem, asked for again where the store fails."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from rallypoint.data.cache.cache import Cache, Piece
from rallypoint.data.sources.listing import AT_ONCE, Listed, mark_of, meant, patiently
from rallypoint.errors import DataError, UsageError

PART_BYTES = 32 << 20  # a longer range is kept in parts


@dataclass(frozen=True, slots=True)
class File:
    """A file of a store.

    Attributes:
        url: the URL that led to it.
        path: its path in the store.
        name: its path below the folder (or the pattern's first folder) of that URL; a file's own name.
        size: its bytes.
        mark: another text when it is written again; "" if the store does not say.
    """

    url: str
    path: str
    name: str
    size: int
    mark: str

    def __str__(self) -> str:
        protocol, separator, _ = self.url.partition("://")
        whole = not separator or "://" in self.path  # HTTP's paths are whole URLs
        return self.path if whole else f"{protocol}{separator}{self.path.lstrip('/')}"

    @property
    def digest(self) -> bytes:
        """What its name in the store, its size and its mark are: 16 bytes."""
        about = f"{self}\0{self.size}\0{self.mark}".encode(errors="surrogateescape")
        return hashlib.blake2b(about, digest_size=16).digest()


class Files:
    """Reads files of stores. `options` go to fsspec (keys, endpoints). Raises DataError after several failures.

    With `cache`, what is read of files that are not on this machine's own disks is kept there; with `block`, in blocks
    of so many bytes of a file, for readers whose ranges overlap: else each range as it is read.

    It may be pickled, and used after a fork: connections are made in the process that needs them.
    """

    def __init__(
        self, options: Mapping[str, Any] | None = None, *, cache: Cache | None = None, block: int = 0
    ) -> None:
        self._options, self.cache, self._block = dict(options or {}), cache, block
        self._made: tuple[int, dict[str, Any]] = 0, {}  # the process, its filesystem of each URL

    def found(self, urls: str | Path | Sequence[str | Path], suffix: str) -> list[File]:
        """Return the files that are meant: files, patterns (`*`), and folders with all their files of this suffix.

        The files of a pattern or a folder are in the order of their names; see `listing.meant` for those left out.
        Raises DataError when there are none, and when a store fails several times.
        """
        if isinstance(urls, Mapping) or not isinstance(urls, (str, Path, Sequence)):
            raise UsageError(
                f"a {type(urls).__name__} was given as the files: give a URL, a pattern, or a list of them"
            )
        given = [str(url) for url in ([urls] if isinstance(urls, (str, Path)) else urls)]
        for system in {id(system): system for system in map(self._system, given)}.values():
            system.invalidate_cache()  # what this process had listed before
        with ThreadPoolExecutor(AT_ONCE, "listing files") as pool:
            found = [file for of in pool.map(lambda url: self._meant(url, suffix), given) for file in of]
        if not found:
            raise DataError(f"there are no files {suffix} in {', '.join(given) or 'an empty list'}")
        return found

    def read(self, file: File, start: int, stop: int) -> bytes:
        """Return the bytes `start..stop` of a file: one request, or none if they are in the cache. For any thread."""
        if self.cache is None or stop <= start or self.here(file) is not None:
            return self.fetch(file, start, stop)
        parts = [self._kept(file, *part) for part in self._parts(file, start, stop)]
        whole = parts[0] if len(parts) == 1 else b"".join(parts)
        first = start - start % self._block if self._block else start
        return whole if len(whole) == stop - start else whole[start - first : stop - first]

    def _parts(self, file: File, start: int, stop: int) -> list[tuple[int, int]]:
        """The pieces of a file in which these bytes are kept."""
        first, size, end = start, PART_BYTES, stop
        if self._block:
            first, size, end = start - start % self._block, self._block, file.size
        return [(begin, min(begin + size, end)) for begin in range(first, stop, size)]

    def _kept(self, file: File, start: int, stop: int) -> bytes:
        assert self.cache is not None
        return self.cache.get(Piece(file.digest, start, stop), lambda: self.fetch(file, start, stop))

    def fill(self, file: File, start: int, stop: int) -> bool:
        """Get the bytes `start..stop` of a file into the cache, if they are not there. For any thread.

        Returns False if the cache does not keep them. Each request is made once; DataError if it fails.
        """
        if self.cache is None or self.here(file) is not None:
            return False
        for first, last in self._parts(file, start, stop):
            piece = Piece(file.digest, first, last)
            if not self.cache.has(piece):
                self.cache.get(piece, partial(self._once_for_cache, file, first, last))
                if not self.cache.has(piece):
                    return False
        return True

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """Return the bytes `start..stop` of a file from its store: one request. For any thread."""
        return patiently(partial(self._once, file, start, stop), str(file)) if stop > start else b""

    def _once_for_cache(self, file: File, start: int, stop: int) -> bytes:
        """For a cache, to which an OSError is its own disk's."""
        try:
            return self._once(file, start, stop)
        except OSError as error:
            raise DataError(f"{file}: {error}") from error

    def _once(self, file: File, start: int, stop: int) -> bytes:
        data = bytes(self._system(file.url).cat_file(file.path, start=start, end=stop))
        if len(data) != stop - start:
            raise OSError(f"{len(data)} bytes came of {stop - start} at {start}")
        return data

    def here(self, file: File) -> str | None:
        """Return the path of a file on this machine's own disks; None for one of a store."""
        return file.path if type(self._system(file.url)) is LocalFileSystem else None

    def open(self, file: File) -> RangedFile:
        """Return the file as one to seek and read in."""
        return RangedFile(lambda start, stop: self.read(file, start, stop), file.size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": (0, {})}

    def _meant(self, url: str, suffix: str) -> list[File]:
        path = str(fsspec.core.url_to_fs(url, **self._options)[1])
        found = meant(self._system(url), path, suffix)
        if len(found) == 1 or all(listed.size is not None for listed in found):
            return [self._sized(url, listed) for listed in found]
        with ThreadPoolExecutor(AT_ONCE, "asking for sizes") as pool:
            return list(pool.map(lambda listed: self._sized(url, listed), found))

    def _sized(self, url: str, listed: Listed) -> File:
        """The file, with its size from the store if its listing (a web server's page) does not tell it."""
        file = File(url, listed.path, listed.name, listed.size or 0, listed.mark)
        if listed.size is not None:
            return file
        system = self._system(url)
        about = patiently(lambda: system.info(file.path), str(file))
        if about.get("size") is None:
            raise DataError(f"{file} cannot be read: its server does not tell its size")
        return File(url, listed.path, listed.name, int(about["size"]), mark_of(about))

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
