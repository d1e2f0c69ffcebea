"""Ranges of files on any fsspec filesystem, asked for again where the store fails."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from rallypoint.data.cache import Cache, FilePiece
from rallypoint.errors import DataError, Explained, UsageError

log = logging.getLogger("rallypoint")

AT_ONCE = 8  # folders that are listed, or files that are asked for, at a time

# What tells that a file was written again, as stores call it; the first that there is counts.
_MARKS = (
    "ETag", "etag", "e_tag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "Last-Modified",
    "updated", "modified", "timeModified", "created",
)  # fmt: skip
_ANY_DEPTH = "**"
_FILE, _FOLDER = "file", "directory"  # fsspec's words


@dataclass(frozen=True, slots=True)
class File:
    """A file of a store, or while folders are listed what else is in them."""

    path: str  # its path in the store
    name: str  # its path below the folder, or below the pattern's first folder, that was given; a file's own name
    size: int  # its bytes; -1, while folders are listed: the store does not say
    mark: str  # another text when it is written again; "" if the store does not say
    kind: str = _FILE  # "file", "directory", or what else it is
    url: str = ""  # the URL that led to it

    def __str__(self) -> str:
        protocol, separator, _ = self.url.partition("://")
        whole = not separator or "://" in self.path  # HTTP's paths are whole URLs
        return self.path if whole else f"{protocol}{separator}{self.path.lstrip('/')}"

    @property
    def digest(self) -> bytes:
        """What its name in the store, its size and its mark are: 16 bytes."""
        about = f"{self}\0{self.size}\0{self.mark}".encode(errors="surrogateescape")
        return hashlib.blake2b(about, digest_size=16).digest()


def meant(system: Any, path: str, suffix: str) -> list[File]:
    """Return the files that `path` means on an fsspec filesystem, in the order of their paths.

    In a folder, and below a folder that matches a pattern, those with this suffix; of a pattern's own matches all
    files. Names that begin with a dot or an underscore are left out below a folder and where a wildcard begins, but for
    ``_name=value``, as Spark does it: jobs leave ``_SUCCESS`` and ``_temporary/`` behind.

    Raises DataError as `patiently`.
    """
    first = min((at for at in map(_plain(system, path).find, "*[?") if at >= 0), default=None)
    if first is None or (type(system) is LocalFileSystem and os.path.exists(path)):  # a name may have brackets in it
        about = patiently(lambda: system.info(path), path)
        found = _listed(about, path, _last(_plain(system, path)))
        page = about.get("mimetype") == "text/html" and not path.endswith(suffix)  # with links, as a web server lists
        if found.kind != _FOLDER and not page:
            return [found]
        root, parts = path, list[str]()
    else:
        cut = path.rfind("/", 0, first) + 1
        root, parts = path[:cut].rstrip("/") or path[:cut], [part for part in path[cut:].split("/") if part]
    pattern = _Pattern(parts, suffix, literal="?" if _is_web(system) else "")
    return sorted(_below(system, pattern, root), key=lambda file: file.path)


class _Pattern:
    """Which paths below a folder are meant. A *place* is how many of its parts a path has passed.

    Who has passed all of them is in a folder that is meant as a whole.
    """

    def __init__(self, parts: list[str], suffix: str, literal: str) -> None:
        self._parts = [part.replace(literal, f"[{literal}]") if literal else part for part in parts]
        self._suffix = suffix

    def begin(self) -> frozenset[int]:
        return self._further({0})

    def after(self, places: frozenset[int], name: str) -> frozenset[int]:
        """The places after one more folder; empty: nothing in it is meant."""
        kept = {place for place in places if not _is_hidden(name) and self._any_depth(place)}
        return self._further(kept | {place + 1 for place in places if self._matches(place, name)})

    def takes(self, places: frozenset[int], name: str) -> bool:
        """True if a file in a folder with these places is meant."""
        if any(place + 1 == len(self._parts) and self._matches(place, name) for place in places):
            return True
        inside = len(self._parts) in places
        return inside and name.endswith(self._suffix) and not _is_hidden(name)

    def _any_depth(self, place: int) -> bool:
        return place == len(self._parts) or self._parts[place] == _ANY_DEPTH

    def _matches(self, place: int, name: str) -> bool:
        if self._any_depth(place):
            return False
        part = self._parts[place]
        return fnmatchcase(name, part) and (not _is_hidden(name) or part[0] == name[0])

    def _further(self, places: set[int]) -> frozenset[int]:
        """With the places behind each ``**``, which may be no folder at all."""
        for place in range(len(self._parts)):
            if place in places and self._parts[place] == _ANY_DEPTH:
                places.add(place + 1)
        return frozenset(places)


def _below(system: Any, pattern: _Pattern, root: str) -> Iterator[File]:
    """List folder after folder, those of one depth at once."""
    folders = [(File(root, "", -1, "", _FOLDER), pattern.begin())]
    with ThreadPoolExecutor(AT_ONCE, "listing") as pool:
        while folders:
            deeper = []
            inside = pool.map(partial(_inside, system), [folder for folder, _ in folders])
            for (_, places), listed in zip(folders, inside, strict=True):
                for one in listed:
                    last = _last(one.name)
                    taken, further = pattern.takes(places, last), pattern.after(places, last)
                    found = _behind(system, one, wanted=taken) if taken or further else one
                    if found.kind == _FILE and taken:
                        yield found
                    elif found.kind == _FOLDER and further:
                        deeper.append((found, further))
            folders = deeper


def _inside(system: Any, folder: File) -> list[File]:
    try:
        inside = patiently(lambda: list(system.ls(folder.path, detail=True)), folder.path)
    except DataError as error:
        if not folder.name or not isinstance(error.__cause__, FileNotFoundError):
            raise
        log.warning("%s is not there, though its folder has it: it is empty, or was deleted just now", folder.path)
        return []
    return [
        _listed(about, path, f"{folder.name}/{_last(path)}".lstrip("/"))
        for about in inside
        if (path := str(about["name"])).rstrip("/") != folder.path.rstrip("/")  # an object that stands for it
    ]


def _behind(system: Any, listed: File, *, wanted: bool) -> File:
    """The file behind a link. A link to a folder, and one that leads nowhere where no file is wanted, stays."""
    if listed.kind in (_FILE, _FOLDER):
        return listed
    try:
        found = _listed(patiently(lambda: system.info(listed.path), listed.path), listed.path, listed.name)
    except DataError:
        if wanted:
            raise
        return listed
    if found.kind != _FOLDER:
        return found
    log.warning("%s is a link to a folder, and its files are not read: give that folder by itself", listed.path)
    return listed


def _listed(about: Mapping[str, Any], path: str, name: str) -> File:
    size = about.get("size")
    kind = _FOLDER if str(about["name"]).endswith("/") else str(about["type"])
    return File(path, name, -1 if size is None else int(size), _mark_of(about), kind)


def _mark_of(about: Mapping[str, Any]) -> str:
    """Return a text that is another one when the file is written again; "" if the store does not say."""
    return next((f"{key} {about[key]}" for key in _MARKS if about.get(key)), "")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _plain(system: Any, path: str) -> str:
    """On the web without what follows a question mark: it is no wildcard there, and may sign a URL for a while."""
    return path.partition("?")[0] if _is_web(system) else path


def _is_web(system: Any) -> bool:
    protocols = (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)
    return bool({"http", "https"}.intersection(protocols))


PAUSES_S = (0.1, 0.4, 1.6, 6.4)  # before each further try
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError)

_BUSY = 429  # the status of HTTP for it; from 500 on a server has failed

_T = TypeVar("_T")


def patiently(call: Callable[[], _T], what: str) -> _T:
    """Return `call()`, repeated with growing pauses where a store fails; not where a file is missing or forbidden.

    Raises DataError, which names `what`, after as many pauses as there are.
    """
    for pause in (*PAUSES_S, None):
        try:
            return call()
        except Exception as error:  # stores raise exceptions of any type
            name = type(error).__name__
            if _lasts(error):
                raise DataError(f"{what} cannot be read: {error or name}") from error
            if pause is None:
                raise DataError(f"{what} cannot be read: {name}: {error} ({len(PAUSES_S) + 1} tries)") from error
            log.info("%s: %s: %s; trying again in %g s", what, name, error, pause)
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _lasts(error: Exception) -> bool:
    """True if a second try cannot help. fsspec says of any failure of an HTTP server that the file is not there: its
    cause tells more."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and type(cause).__module__.partition(".")[0] in ("aiohttp", "asyncio"):
        status = getattr(cause, "status", None)
        return status is not None and status < 500 and status != _BUSY
    return isinstance(error, LASTING) and not isinstance(cause, TimeoutError | ConnectionError)


PART_BYTES = 32 << 20  # a longer range is kept in parts


class StoredFiles:
    """Reads files of stores. `options` go to fsspec (keys, endpoints). Raises DataError after several failures.

    With `cache`, what is read of files that are not on this machine's own disks is kept there; with `block`, in blocks
    of so many bytes of a file, for readers whose ranges overlap: else each range as it is read.

    It may be pickled, and used after a fork: connections are made in the process that needs them.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, *, cache: Cache | None = None, block: int = 0) -> None:
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
        parts = [
            self.cache.get(FilePiece(file.digest, *part), partial(self.fetch, file, *part))
            for part in self._parts(file, start, stop)
        ]
        whole = parts[0] if len(parts) == 1 else b"".join(parts)
        first = start - start % self._block if self._block else start
        return whole if len(whole) == stop - start else whole[start - first : stop - first]

    def _parts(self, file: File, start: int, stop: int) -> list[tuple[int, int]]:
        """The pieces of a file in which these bytes are kept."""
        first, size, end = start, PART_BYTES, stop
        if self._block:
            first, size, end = start - start % self._block, self._block, file.size
        return [(begin, min(begin + size, end)) for begin in range(first, stop, size)]

    def fill(self, file: File, start: int, stop: int) -> bool:
        """Get the bytes `start..stop` of a file into the cache, if they are not there. For any thread.

        Returns False if the cache does not keep them. Each request is made once; DataError if it fails.
        """
        if self.cache is None or self.here(file) is not None:
            return False
        for first, last in self._parts(file, start, stop):
            piece = FilePiece(file.digest, first, last)
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
        return RangedFile(partial(self.read, file), file.size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": (0, {})}

    def _meant(self, url: str, suffix: str) -> list[File]:
        path = str(fsspec.core.url_to_fs(url, **self._options)[1])
        found = [replace(file, url=url) for file in meant(self._system(url), path, suffix)]
        if len(found) == 1 or all(file.size >= 0 for file in found):
            return [self._sized(file) for file in found]
        with ThreadPoolExecutor(AT_ONCE, "asking for sizes") as pool:
            return list(pool.map(self._sized, found))

    def _sized(self, file: File) -> File:
        """The file, with its size from the store if its listing (a web server's page) does not tell it."""
        if file.size >= 0:
            return file
        system = self._system(file.url)
        about = patiently(lambda: system.info(file.path), str(file))
        if about.get("size") is None:
            raise DataError(f"{file} cannot be read: its server does not tell its size")
        return replace(file, size=int(about["size"]), mark=_mark_of(about))

    def _system(self, url: str) -> Any:
        process, systems = self._made
        if process != os.getpid():  # after a fork, the connections are the parent's. Two threads may do this: no harm
            self._made = _, systems = os.getpid(), dict[str, Any]()
        if url not in systems:
            with Explained(DataError, f"{url} cannot be read", of=(ValueError, ImportError)):
                systems[url] = fsspec.core.url_to_fs(url, **self._options)[0]
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
