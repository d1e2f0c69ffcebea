"""Writes a large local file past the page cache.

A snapshot is written once and not read soon. In the page cache it would only evict data that other processes need, and
allocating and filling fresh pages costs more processor time than the rest of a snapshot. So the bytes go directly from
our memory to the disk (O_DIRECT), where the system and the filesystem support that.
"""

from __future__ import annotations

import contextlib
import errno
import os
from mmap import mmap

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BUFFER_BYTES = 4 << 20
_ALIGNMENT = 4096  # of memory, position and length: a multiple of every disk's logical block
_LARGE = 1 << 16
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """A new file, written from beginning to end; a context manager that closes it.

    Pieces are collected in `buffer` (see `new_buffer`). Raises FileExistsError when a file of that name exists. All
    methods raise OSError like the filesystem.
    """

    def __init__(self, path: str, buffer: mmap) -> None:
        self._buffer, self._filled = memoryview(buffer), 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self._direct = _DIRECT != 0 and fcntl is not None
        try:
            self._descriptor = os.open(path, flags | (_DIRECT if self._direct else 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
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
        """Append `chunk` to the file."""
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
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
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
