"""Whole files on any fsspec filesystem: a file exists completely or not at all, and on disk it survives a power cut.

Large local files go past the page cache (`DirectFile`). Reads of a store that fails temporarily are repeated
(`patiently`), and a store that hangs does not keep a job from ending (`end_threads`). SQLite keeps a file whole by a
log that needs shared memory, or by an older way, as the disk where it is allows (`journal_mode`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import TypeVar

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from rallypoint.errors import ConfigError, Explained, RallypointError, SnapshotError, sentence_of

_PARTIAL = ".partial"

Chunk = bytes | memoryview


class Files:
    """The files below one URL or local path. Paths are relative to it, with parts joined by `/`.

    On a local filesystem a file is written under another name, flushed to the disk and then renamed. On a remote one it
    is one put, which object stores make atomic. All methods raise OSError like the filesystem. `on_disks`: it is local.
    """

    def __init__(self, url: str) -> None:
        local = LocalFileSystem(), LocalFileSystem._strip_protocol(url)
        with Explained(ConfigError, f"{url} is no place for snapshots", of=(ValueError, ImportError)):
            # (fsspec takes ``a::b``, which a folder may be called, for a chain)
            self._fs, root = fsspec.core.url_to_fs(url) if "://" in url else local
        self._root: str = root.rstrip("/")
        self.on_disks = isinstance(self._fs, LocalFileSystem)
        # Of closed files, to use again: the system would clear fresh memory, which costs more than a copy
        self._buffers: list[mmap] = []

    def where(self, path: str = "") -> str:
        """The full name, for messages: a plain path for a local filesystem, a URL for others."""
        full = self._full(path)
        return full if self.on_disks else str(self._fs.unstrip_protocol(full))

    @contextmanager
    def writing(self, path: str) -> Iterator[Callable[[Chunk], object]]:
        """Write a whole file, replacing any of that name. Yields a function that takes the next piece.

        Only a remote filesystem keeps the pieces in memory. A failure removes what was written.
        """
        folder = path.rpartition("/")[0]
        self._make_folder(self._full(folder))
        if self.on_disks:
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
        sync_to_disk(self._full(folder))

    def get(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes `start..stop` of a file, or all of it; fewer where the file ends earlier.

        What is there and no regular file (a pipe, say) has no bytes.
        """
        full = self._full(path)
        if self.on_disks and Path(full).exists() and not Path(full).is_file():
            return b""  # opening a pipe would wait for somebody who writes into it
        return bytes(self._fs.cat_file(full, start=start, end=stop))

    def size(self, path: str) -> int:
        return int(self._fs.info(self._full(path))["size"])

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in `folder`; none when it does not exist."""
        full = self._full(folder)
        self._fs.invalidate_cache()  # other processes write here too
        try:
            found = self._fs.ls(full, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in (path.rstrip("/").rpartition("/")[2] for path in found) if name)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file directly in `folder`; nothing when it does not exist.

        The folder is read anew: NFS may tell of a single file for a minute that it is not there.
        """
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._full(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {str(one["name"]).rpartition("/")[2]: int(one["size"] or 0) for one in found}

    def remove(self, path: str) -> None:
        """Remove a file, also across a power cut. Does nothing when there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))
            if self.on_disks:
                sync_to_disk(self._full(path).rpartition("/")[0])

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with everything in it. Does nothing when there is none."""
        path = self._full(folder)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(path if self.on_disks else glob.escape(path), recursive=True)  # others' takes patterns

    def sweep(self, name: str) -> None:
        """Remove the partial files that killed writers of `name`, directly below the root, have left."""
        for found in self.names():
            if found.startswith(f".{name}.") and found.endswith(_PARTIAL):
                self.remove(found)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _make_folder(self, full: str) -> None:
        if not self.on_disks:
            self._fs.makedirs(full, exist_ok=True)
            return
        folder = Path(full)
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(new):
            path.mkdir(mode=0o700, exist_ok=True)  # a model's weights are their owner's
        for path in new:
            sync_to_disk(str(path.parent))


def sync_to_disk(full: str) -> None:
    """Flush a file to the disk, or a folder: it holds the names of its files."""
    descriptor = os.open(full, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


BUFFER_BYTES = 4 << 20
_ALIGNMENT = 4096  # of memory, position and length: a multiple of every disk's logical block
_LARGE = 1 << 16


class DirectFile:
    """A new file, written from beginning to end; a context manager that closes it.

    A snapshot is written once and not read soon. In the page cache it would only evict data that other processes need,
    and allocating and filling fresh pages costs more processor time than the rest of a snapshot. So the bytes go
    directly from our memory to the disk (O_DIRECT), where the system and the filesystem support that.

    Pieces are collected in `buffer` (see `new_buffer`). Raises FileExistsError when a file of that name exists. All
    methods raise OSError like the filesystem.
    """

    def __init__(self, path: str, buffer: mmap) -> None:
        self._buffer, self._filled = memoryview(buffer), 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._direct = True
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False  # not supported here (files in memory, network filesystems)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # the failed open may have created the file
            self._descriptor = os.open(path, flags, 0o666)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer.release()
        os.close(self._descriptor)

    def write(self, chunk: bytes | memoryview) -> None:
        rest = memoryview(chunk).cast("B")
        while len(rest):
            taken = min(len(rest), len(self._buffer) - self._filled)
            _copy(rest[:taken], self._buffer[self._filled : self._filled + taken])
            self._filled += taken
            rest = rest[taken:]
            if self._filled == len(self._buffer):
                self._flush(self._filled)

    def sync(self) -> None:
        """Flush everything to the disk; nothing can be written after that."""
        self._flush(self._filled - self._filled % _ALIGNMENT)
        self._go_through_the_cache()  # the last bytes do not fill a block
        self._flush(self._filled)
        os.fsync(self._descriptor)

    def _flush(self, count: int) -> None:
        """Write the first `count` collected bytes."""
        written = 0
        while written < count:
            try:
                written += os.write(self._descriptor, self._buffer[written:count])
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._go_through_the_cache()  # the disk's blocks are larger, or the disk was full for a moment
        left = self._filled - count
        self._buffer[:left] = self._buffer[count : self._filled]
        self._filled = left

    def _go_through_the_cache(self) -> None:
        if self._direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self._direct = False


def _copy(chunk: memoryview, to: memoryview) -> None:
    if len(chunk) < _LARGE:
        to[:] = chunk
        return
    # Unlike the assignment of a slice, this lets other threads run. Imported here, because a process that only commits
    # snapshots needs no numpy.
    from numpy import copyto, frombuffer, uint8

    copyto(frombuffer(to, uint8), frombuffer(chunk, uint8))


def new_buffer() -> mmap:
    """Return memory for DirectFiles, one after the other."""
    return mmap(-1, BUFFER_BYTES)


log = logging.getLogger("rallypoint")

DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further try
READ_AGAIN_S = (0.05, 0.2, 1.0)  # seconds before each further try after a read error of the disk
_T = TypeVar("_T")


class StoreSilent(SnapshotError):
    """The filesystem of the snapshots did not answer. It may answer the next time."""


def patiently(
    call: Callable[[], _T], say: Callable[[str], None], doing: str, pause: Callable[[float], object] | None = None
) -> _T:
    """Return `call()`, repeated after a transient error up to `len(DELAYS_S)` times, with growing pauses.

    `say` gets a sentence for each error. `pause` (default: `time.sleep`) gets the seconds to wait before the next try;
    an exception from it ends the tries. Damage and a wrong format are raised at once. The last transient error is
    raised as a SnapshotError that says what to do.
    """
    for delay in (*DELAYS_S, None):
        try:
            return call()
        except Exception as error:  # remote filesystems raise exceptions of any type
            if isinstance(error, RallypointError) and not isinstance(error, StoreSilent):
                raise
            if delay is None:
                raise SnapshotError(
                    f"{sentence_of(error)} ({len(DELAYS_S) + 1} tries, {doing}): when it answers again, go on with "
                    "`rallypoint resume`"
                ) from error
            say(f"{doing}: {sentence_of(error)}; trying again in {delay:g} s")
        (pause or time.sleep)(delay)
    raise AssertionError("the last try returns or raises")


def read_again(call: Callable[[], _T]) -> _T:
    """Return `call()`, repeated after a read error of the disk (EIO): `len(READ_AGAIN_S)` times, with short pauses.

    Raises the last OSError, and every other error at once. A wrong checksum is damage, which a second read would not
    repair.
    """
    for pause in READ_AGAIN_S:
        try:
            return call()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            log.warning("a file of a snapshot cannot be read: %s; trying again in %g s", error, pause)
        time.sleep(pause)
    return call()


END_PATIENCE_S = 10.0  # seconds that a store may still take when the job is over

EndingThread = tuple[threading.Thread, str]  # a thread that was told to end, and what it does


def end_threads(*threads: EndingThread) -> None:
    """Wait for threads that were told to end, each given with what it does, for END_PATIENCE_S together.

    If the store does not answer a thread in time, logs what is given up. The threads must be daemons: they may then be
    left behind.
    """
    deadline = time.monotonic() + END_PATIENCE_S
    for thread, doing in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.warning("given up: %s. The job is over, and the store has not answered for %g s", doing, END_PATIENCE_S)


WAL, ROLLBACK = "wal", "truncate"
_MOUNTS = Path("/proc/self/mountinfo")
_SHARED = re.compile(  # file systems of networks; of FUSE's nobody knows, but for those of local disks
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|beegfs|ceph|glusterfs|afs|ncpfs|ocfs2|gfs2?|pvfs2|orangefs|9p|virtiofs|"
    r"fuse(?!blk|ctl).*"
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


def journal_mode(path: Path) -> str:
    """Return SQLite's ``journal_mode`` for the database at `path`: WAL, or ROLLBACK on a file system of a network.

    With WAL the processes that use a file share memory, which those of two hosts cannot: SQLite does not support it
    there. A rollback journal needs file locks alone, and costs two more flushes for each transaction.
    """
    try:
        mounts = _MOUNTS.read_text(errors="replace")
    except OSError:  # there is no /proc
        return WAL
    return ROLLBACK if _SHARED.fullmatch(kind_of(path.resolve(), mounts)) else WAL


def kind_of(path: Path, mounts: str) -> str:
    """Return the kind of the file system that holds `path`, as ``ext4``, by the text of ``mountinfo``; "": unknown."""
    found, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, about = before.split(" "), after.split(" ")
        if len(fields) < 5 or not about[0]:
            continue
        place = Path(_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4]))
        if path.is_relative_to(place) and len(place.parts) >= found:  # the last one hides those before it
            found, kind = len(place.parts), about[0]
    return kind


def is_over(path: Path) -> bool:
    """True if nobody has the database at `path` open, as far as its files say: it may be read without locks.

    Without locks SQLite leaves no files of its own beside it. With a rollback journal the files do not say it.
    """
    with path.open("rb") as file:
        header = file.read(20)
    return header[18:20] == b"\x02\x02" and not path.with_name(f"{path.name}-wal").exists()  # its mode is WAL
