"""Writing a large local file past the page cache.

A snapshot is written once and not read again soon: in the page cache it would only push out what others need, and
finding and copying into fresh pages costs the processor more than all the rest of a snapshot. So it goes straight from
our memory to the disk (O_DIRECT), where the system and the file system know how to.
"""

from __future__ import annotations

import errno
import os
from mmap import mmap

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BUFFER_BYTES = 4 << 20
_ALIGNMENT = 4096  # of memory, position and length: at least a logical block of every disk there is
_LARGE = 1 << 16
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """A new file, written from its beginning to its end; a context manager that closes it.

    Pieces are gathered in `buffer` (see `new_buffer`). FileExistsError when there is one of that name; everything
    raises OSError as the file system does.
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
            self._direct = False  # (in memory, over the network): not here
            self._descriptor = os.open(path, flags & ~os.O_EXCL, 0o666)  # the failed one may have made it

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer.release()
        os.close(self._descriptor)

    def write(self, chunk: bytes | memoryview) -> None:
        """The file's next bytes."""
        rest = memoryview(chunk).cast("B")
        while len(rest):
            taken = min(len(rest), len(self._buffer) - self._filled)
            _copy(rest[:taken], self._buffer[self._filled : self._filled + taken])
            self._filled += taken
            rest = rest[taken:]
            if self._filled == len(self._buffer):
                self._flush(self._filled)

    def sync(self) -> None:
        """Everything is on the disk when this returns; nothing can be written any more."""
        self._flush(self._filled - self._filled % _ALIGNMENT)
        self._go_through_the_cache()  # the last bytes fill no block
        self._flush(self._filled)
        os.fsync(self._descriptor)

    def _flush(self, count: int) -> None:
        """Write the first `count` bytes that are gathered."""
        written = 0
        while written < count:
            try:
                written += os.write(self._descriptor, self._buffer[written:count])
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._go_through_the_cache()  # its blocks are larger, or the disk was full for a moment
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
    # Unlike a slice's assignment, it lets other threads run. Not imported above: who only commits needs no numpy.
    from numpy import copyto, frombuffer, uint8

    copyto(frombuffer(to, uint8), frombuffer(chunk, uint8))


def new_buffer() -> mmap:
    """Memory that DirectFiles can use, one after the other."""
    return mmap(-1, BUFFER_BYTES)
