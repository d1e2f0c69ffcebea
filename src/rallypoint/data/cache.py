"""A cache on this machine's disk, for what is read from stores: one for all processes of the machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rallypoint.errors import UsageError
from rallypoint.own_files import OpenFolder, lock_within, opened

log = logging.getLogger("rallypoint")

LIMIT = 64 << 30
WAIT_S = 60.0  # for another process that fetches the same bytes


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Some bytes of one file of a store."""

    file: bytes  # a digest of the file's URL, size and mark: that of a file that was written again is another one
    start: int  # the first byte
    stop: int  # the byte after the last one

    @property
    def name(self) -> str:
        """A name that no other piece has."""
        range_ = self.start.to_bytes(8, "little") + self.stop.to_bytes(8, "little")
        return hashlib.blake2b(self.file + range_, digest_size=16).hexdigest()


class Cache:
    """Keeps what is read from a store: ``rp.Parquet("s3://...", cache=rp.Cache("/scratch/data", limit=500 << 30))``.

    All processes of the machine that name the same folder share it: workers, their loader processes, later runs. A
    range that two of them need is fetched once. A file that was written again in the store, as its size, its time or
    its ETag shows, is another one. Damaged bytes on the disk are noticed, and fetched again. A disk that is full
    or fails costs the cache, and no sample. The system keeps what was read last in memory, once for all processes.

    Arguments:
        folder: on a disk of this machine. Who may write into it decides what is read.
        limit: bytes that are kept; what was used longest ago goes first.

    It may be pickled, and used after a fork.
    """

    def __init__(self, folder: str | Path, *, limit: int = LIMIT, **gone: object) -> None:
        if gone:
            raise UsageError(
                f"rp.Cache has no {', '.join(gone)}=, only limit=: hosts no longer ask each other for what they have "
                "read (peers=); where the store is to be read once, keep the data in a folder that all hosts share"
            )
        if "://" in str(folder):
            raise UsageError(f"rp.Cache({str(folder)!r}): give a folder on a disk of this machine")
        if not isinstance(limit, int | float) or not 1 <= limit < math.inf:
            raise UsageError(f"rp.Cache(limit={limit!r}): give a number of bytes, 1 or more, as 500 << 30 for 500 GiB")
        self._entries = CacheEntries(Path(folder).expanduser().absolute(), limit)
        self._failed = False
        try:
            self._entries.prepare()
        except OSError as error:
            raise UsageError(f"rp.Cache({str(folder)!r}): {error}") from error

    def __repr__(self) -> str:
        return f"Cache({str(self._entries.folder)!r}, limit={self._entries.limit})"

    @property
    def limit(self) -> int:
        """How many bytes of the disk it takes at most."""
        return int(self._entries.limit)

    @property
    def total(self) -> int:
        """How many bytes of the disk it takes now."""
        return self._entries.total

    def has(self, piece: FilePiece) -> bool:
        """True if a piece is kept now. It may be damaged, or gone when it is needed."""
        return self._entries.has(piece.name)

    def get(self, piece: FilePiece, fetch: Callable[[], bytes]) -> bytes:
        """Return the bytes of a piece: the kept ones, or what `fetch` returns from the store."""
        name = piece.name
        if (found := self._read(name)) is not None:
            return found
        fetched: bytes | None = None
        try:
            with self._entries.locked(name, WAIT_S) as alone:
                if (found := self._read(name)) is not None:
                    return found
                if not alone:
                    log.warning("another process has fetched a piece for %g s: it is fetched here too", WAIT_S)
                fetched = fetch()
                if alone and not self._failed:
                    self._entries.keep(name, fetched)
        except OSError as error:  # of the disk: stores' errors are DataErrors
            self._fail(error)
        return fetch() if fetched is None else fetched

    def _read(self, name: str) -> bytes | None:
        try:
            return self._entries.read(name)
        except OSError as error:
            self._fail(error)
            return None

    def _fail(self, error: OSError) -> None:
        """Say it once in each process. What is kept is still read; nothing more is kept by this process."""
        if not self._failed:
            self._failed = True
            folder = self._entries.folder
            log.warning("process %d keeps nothing more in the cache %s: %s", os.getpid(), folder, error)


def cache_of(given: Cache | str | Path | None) -> Cache | None:
    """Return the cache that `cache=` of a data set means: a folder is one with the defaults."""
    return Cache(given) if isinstance(given, (str, Path)) else given


_MAGIC = b"RPC1"
_HEAD = struct.Struct("<4sQ16s")  # the magic, how many bytes follow, their checksum
_ENTRIES, _LOCKS, _SIZE = "entries", "locks", "size"
_STRIPES = 1024  # locks of entries: a file for each entry would never go away
_LOWERED = 0.9  # of the limit: what is left when something has to go
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SIZE_LOCK_S = 10.0
_POLL_S = 0.01


class CacheEntries:
    """The entries in `folder`, at most `limit` bytes of them. Names are hexadecimal. For any thread and process.

    An entry is written beside its place, under the lock of its name, and renamed: a process that is killed leaves
    nothing that another one would take for an entry. No link in the folder is followed, so nobody who may write into it
    has other files overwritten or deleted. All methods raise OSError as the folder's disk does.

        folder/size            how many bytes the entries are, at least
        folder/entries/3f/...  entries; `.partial`: one that is being written, or whose writer was killed
        folder/locks/...
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def prepare(self) -> None:
        """Make the folder, if there is none yet."""
        with opened(self.folder, make=True) as own, own.folder(_ENTRIES, make=True), own.folder(_LOCKS, make=True):
            pass

    def read(self, name: str) -> bytes | None:
        """Return the bytes of an entry, which counts as used now; None if there is none. A damaged one is deleted."""
        try:
            with self._beside(name) as folder:
                with folder.open(name) as file:
                    head, data = file.read(_HEAD.size), file.read()
                if head != _head(name, data):
                    folder.unlink(name)
                    return None
                with contextlib.suppress(OSError):
                    folder.touch(name)
                return data
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """True if there is an entry, which may be damaged."""
        try:
            with self._beside(name) as folder:
                return folder.has(name)
        except FileNotFoundError:
            return False

    def keep(self, name: str, data: bytes) -> None:
        """Keep these bytes, instead of those that were used longest ago. Needs the lock of `name`.

        Nothing happens if they alone are more than the limit. If the disk is full before that, other entries go too.
        """
        size = len(data) + _HEAD.size
        if size > self.limit:
            return
        try:
            self._keep(name, data, size)
        except OSError as error:
            if error.errno not in _FULL or not self._delete_oldest(size):
                raise
            self._keep(name, data, size)

    def _keep(self, name: str, data: bytes, size: int) -> None:
        if not self._make_room(size):
            return
        # FileNotFoundError: another process has made room meanwhile, and took this for a leftover
        with self._beside(name, make=True) as folder, contextlib.suppress(FileNotFoundError):
            folder.write(name, _head(name, data), data, beside=f"{name}.partial")

    def locked(self, name: str, timeout: float) -> contextlib.AbstractContextManager[bool]:
        """Hold the lock of an entry in the body, as `_locked`. Some entries have the same lock."""
        return self._locked(f"{int(name[:8], 16) % _STRIPES:03x}", timeout)

    @property
    def total(self) -> int:
        """How many bytes of the disk the entries take, counted anew."""
        return sum(size for _, _, size in self._all())

    def _make_room(self, size: int) -> bool:
        """Count `size` bytes more, and delete what was used longest ago if that is too much. False if it cannot now."""
        with self._locked("size", _SIZE_LOCK_S) as alone:
            if alone:
                total = self._counted() + size
                if total > self.limit:
                    total = self._shrink(int(self.limit * _LOWERED) - size) + size
                self._count(total)
        return alone

    def _delete_oldest(self, size: int) -> bool:
        """The disk is full: delete what was used longest ago, `size` bytes and a tenth of all. False: nothing went."""
        with self._locked("size", _SIZE_LOCK_S) as alone:
            if not alone:
                return False
            total = self.total
            left = self._shrink(int(total * _LOWERED) - size)
            self._count(left)
        return left < total

    def _counted(self) -> int:
        """What the last process counted, which is never too little: it is written before an entry is."""
        try:
            with opened(self.folder) as folder:
                return int(folder.read(_SIZE))
        except (FileNotFoundError, ValueError):
            return self.total

    def _count(self, total: int) -> None:
        """Note how many bytes the entries are. Needs the lock "size"."""
        with opened(self.folder) as folder:
            folder.write(_SIZE, str(total).encode())

    def _shrink(self, most: int) -> int:
        """Delete entries, those first that were used longest ago, until they are `most` bytes. Returns what is left."""
        found = sorted(self._all())
        total = sum(size for _, _, size in found)
        for _, name, size in found:
            if total <= most:
                break
            with contextlib.suppress(FileNotFoundError), self._beside(name) as folder:
                folder.unlink(name)
            total -= size
        return total

    def _all(self) -> Iterator[tuple[int, str, int]]:
        """When it was used, name and size of each entry, and of each leftover."""
        with opened(self.folder) as own, own.folder(_ENTRIES) as entries:
            for start in entries.names():
                with entries.folder(start) as folder:
                    for name in folder.names():
                        with contextlib.suppress(FileNotFoundError):
                            about = folder.stat(name)
                            yield about.st_mtime_ns, name, about.st_size

    @contextlib.contextmanager
    def _locked(self, name: str, timeout: float) -> Iterator[bool]:
        """Hold a lock in the body; it ends with this process. False if others have held it for `timeout` seconds."""
        with opened(self.folder) as own, own.folder(_LOCKS) as locks:
            descriptor = locks.lock_file(name)
        try:
            # For this descriptor alone: other threads of the process wait too
            yield lock_within(descriptor, timeout, _POLL_S)
        finally:
            with contextlib.suppress(OSError):  # a process that was forked meanwhile has it too: closing is not enough
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    @contextlib.contextmanager
    def _beside(self, name: str, *, make: bool = False) -> Iterator[OpenFolder]:
        """In the body the folder of an entry is open. `make`: it is made if there is none."""
        with opened(self.folder) as own, own.folder(_ENTRIES) as entries, entries.folder(name[:2], make=make) as folder:
            yield folder


def _head(name: str, data: bytes) -> bytes:
    """What stands before an entry's bytes. Its checksum tells damage, and no malice."""
    digest = xxhash.xxh3_128(name.encode())
    digest.update(data)
    return _HEAD.pack(_MAGIC, len(data), digest.digest())
