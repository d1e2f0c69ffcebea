"""The files that a path means: one file, those that match a pattern, those of a folder with one ending.

A folder is listed by `ls`, each one by itself and again where that fails. fsspec's own `find` and `glob` leave a folder
out whose listing fails, and `isdir` says then that it is none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from rallypoint.errors import DataError

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
class Listed:
    """A file or a folder, as a store tells of it.

    Attributes:
        path: its path in the store.
        name: its path below the folder, or below the pattern's first folder, that was given; a file's own name.
        kind: "file", "directory", or what else it is.
        size: its bytes; None if the store does not say.
        mark: another text when the file is written again; "" if the store does not say.
    """

    path: str
    name: str
    kind: str
    size: int | None
    mark: str


def meant(system: Any, path: str, suffix: str) -> list[Listed]:
    """Return the files that `path` means on an fsspec filesystem, in the order of their paths.

    In a folder, and below a folder that matches a pattern, those with this suffix; of a pattern's own matches all
    files. Names that begin with a dot or an underscore are left out below a folder and where a wildcard begins, but for
    ``_name=value``, as Spark does it: jobs leave ``_SUCCESS`` and ``_temporary/`` behind.

    Raises DataError as `patiently`.
    """
    first = _first_wildcard(system, path)
    if first is None:
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
    return sorted(_Walk(system, pattern).files(root), key=lambda file: file.path)


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


class _Walk:
    """Lists folder after folder, those of one depth at once."""

    def __init__(self, system: Any, pattern: _Pattern) -> None:
        self._system, self._pattern = system, pattern

    def files(self, root: str) -> Iterator[Listed]:
        folders = [(Listed(root, "", _FOLDER, None, ""), self._pattern.begin())]
        with ThreadPoolExecutor(AT_ONCE, "listing") as pool:
            while folders:
                deeper = []
                inside = pool.map(self._list, [folder for folder, _ in folders])
                for (_, places), listed in zip(folders, inside, strict=True):
                    for one in listed:
                        last = _last(one.name)
                        taken, further = self._pattern.takes(places, last), self._pattern.after(places, last)
                        found = self._behind(one, wanted=taken) if taken or further else one
                        if found.kind == _FILE and taken:
                            yield found
                        elif found.kind == _FOLDER and further:
                            deeper.append((found, further))
                folders = deeper

    def _list(self, folder: Listed) -> list[Listed]:
        try:
            inside = patiently(lambda: list(self._system.ls(folder.path, detail=True)), folder.path)
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

    def _behind(self, listed: Listed, *, wanted: bool) -> Listed:
        """The file behind a link. A link to a folder, and one that leads nowhere where no file is wanted, stays."""
        if listed.kind in (_FILE, _FOLDER):
            return listed
        try:
            found = _listed(patiently(lambda: self._system.info(listed.path), listed.path), listed.path, listed.name)
        except DataError:
            if wanted:
                raise
            return listed
        if found.kind != _FOLDER:
            return found
        log.warning("%s is a link to a folder, and its files are not read: give that folder by itself", listed.path)
        return listed


def _listed(about: Mapping[str, Any], path: str, name: str) -> Listed:
    size = about.get("size")
    kind = _FOLDER if str(about["name"]).endswith("/") else str(about["type"])
    return Listed(path, name, kind, None if size is None else int(size), mark_of(about))


def mark_of(about: Mapping[str, Any]) -> str:
    """Return a text that is another one when the file is written again; "" if the store does not say."""
    return next((f"{key} {about[key]}" for key in _MARKS if about.get(key)), "")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _first_wildcard(system: Any, path: str) -> int | None:
    return min((at for at in map(_plain(system, path).find, "*[?") if at >= 0), default=None)


def _plain(system: Any, path: str) -> str:
    """On the web without what follows a question mark: it is no wildcard there, and may sign a URL for a while."""
    return path.partition("?")[0] if _is_web(system) else path


def _is_web(system: Any) -> bool:
    """True for HTTP."""
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
    for pause in PAUSES_S:
        try:
            return call()
        except Exception as error:  # stores raise exceptions of any type
            if _lasts(error):
                raise DataError(f"{what} cannot be read: {error or type(error).__name__}") from error
            log.info("%s: %s: %s; trying again in %g s", what, type(error).__name__, error, pause)
        time.sleep(pause)
    try:
        return call()
    except Exception as error:
        raise DataError(
            f"{what} cannot be read: {type(error).__name__}: {error} ({len(PAUSES_S) + 1} tries)"
        ) from error


def _lasts(error: Exception) -> bool:
    """True if a second try cannot help. fsspec says of any failure of an HTTP server that the file is not there: its
    cause tells more."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and type(cause).__module__.partition(".")[0] in ("aiohttp", "asyncio"):
        status = getattr(cause, "status", None)
        return status is not None and status < 500 and status != _BUSY
    return isinstance(error, LASTING) and not isinstance(cause, TimeoutError | ConnectionError)
