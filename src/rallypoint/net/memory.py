"""Memory that other processes of this host may read: between members of one host large payloads are lent, not sent.

A process keeps its payloads in one memfd (`allocate`). When two members of a host have greeted each other, each says
where its memfd is, and the other opens it by ``/proc/PID/fd/N``: the kernel allows that to processes of
the same user only, and maps it (to copy by `preadv` takes 1.7 times as long). A frame says where its payload lies
(`channel.py`). A memfd is sealed against shrinking: to read what a peer has taken away would be a signal.

Such payloads have no MAC. Nothing carries them that another user could write to, and a process of the same user could
change this process's memory anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import logging
import mmap
import os
import secrets
import struct
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rallypoint.errors import LinkError
from rallypoint.net.transport import LEAST_LENT, Connection, receive_bytes

log = logging.getLogger("rallypoint")

LEAST_BYTES = 128 << 10  # less is ordinary memory
_PAGE = mmap.PAGESIZE
_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_FAILED = ctypes.c_void_p(-1).value
_ROOM, _NORESERVE = 16 << 30, 0x4000  # bytes of addresses; MAP_NORESERVE


class _Region(NamedTuple):
    """Memory at `start`, of `nbytes`, which is `at` bytes from the beginning of the memfd. Ordered by `start`."""

    start: int
    nbytes: int
    at: int


class Arena:
    """One memfd, and what of it is mapped here. Thread-safe.

    Each piece of memory is mapped by itself, and its pages go back to the system with it. Places in the file are
    never used twice, so a reader that comes too late finds zeros and no other payload.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
        )  # fmt: skip
        self._libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
        self._libc.fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong
        self._lock = threading.Lock()
        self._size = 0
        self._next = self._room()
        self._regions: list[_Region] = []
        self._freed: deque[_Region] = deque()  # not yet taken off the list; a collector may free in any thread
        self._pid = os.getpid()
        if self._libc.fallocate(self.fd, _PUNCH_HOLE, 0, _PAGE):
            os.close(self.fd)
            raise OSError(ctypes.get_errno(), "the system does not take shared memory back")

    @property
    def name(self) -> str:
        """What the system calls the memfd, without its "/memfd:"."""
        return f"rallypoint-{self.token}"

    def allocate(self, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Memory of zeros, for as long as the object lives. OSError if there is none."""
        length = -(-nbytes // _PAGE) * _PAGE
        with self._lock:
            at, size = self._size, self._size + length
            os.ftruncate(self.fd, size)
            self._size = size
            start = self.map(self.fd, length, mmap.PROT_READ | mmap.PROT_WRITE, at, self._next)
            self._next = start + length if start == self._next else self._room()
        memory = (ctypes.c_char * nbytes).from_address(start)
        region = _Region(start, length, at)
        weakref.finalize(memory, self._free, region).atexit = False
        with self._lock:
            self._forget_freed()
            insort(self._regions, region)
        return memory

    def _room(self) -> int | None:
        """Where the next pieces may follow each other: the system joins such mappings, of which it allows 65,530."""
        start: int = self._libc.mmap(None, _ROOM, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
        if start == _FAILED:
            return None
        self.unmap(start, _ROOM)
        return start

    def map(self, fd: int, nbytes: int, protection: int, at: int = 0, near: int | None = None) -> int:
        """Map `nbytes` of a file, shared, if possible at `near`. Return their address. OSError if that cannot be."""
        start: int = self._libc.mmap(near, nbytes, protection, mmap.MAP_SHARED, fd, at)
        if start == _FAILED:
            raise OSError(ctypes.get_errno(), "no shared memory can be mapped")
        return start

    def unmap(self, start: int, nbytes: int) -> None:
        """Nobody may read those addresses from now on."""
        self._libc.munmap(start, nbytes)

    def find(self, payload: memoryview) -> int | None:
        """Where in the memfd these bytes are; None if they are somewhere else."""
        try:
            start = ctypes.addressof(ctypes.c_char.from_buffer(payload))
        except TypeError:  # memory that nobody may write
            return None
        with self._lock:
            self._forget_freed()
            index = bisect_right(self._regions, (start, _PAGE << 40)) - 1
            region = self._regions[index] if index >= 0 else _Region(0, 0, 0)
        inside = start - region.start
        return region.at + inside if inside >= 0 and inside + len(payload) <= region.nbytes else None

    def _free(self, region: _Region) -> None:
        self._freed.append(region)  # first: the system may give the same addresses to somebody else at once
        self.unmap(region.start, region.nbytes)
        if os.getpid() == self._pid:  # a forked child gives up its mapping alone
            self._libc.fallocate(self.fd, _PUNCH_HOLE, region.at, region.nbytes)

    def _forget_freed(self) -> None:
        while self._freed:
            region = self._freed.popleft()
            index = bisect_right(self._regions, region) - 1
            if index >= 0 and self._regions[index] == region:
                del self._regions[index]


class _Arenas:
    """The arena of this process: its addresses are one thing too. A forked child begins with one of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._tried = False
        os.register_at_fork(after_in_child=self._begin_anew)

    def get(self) -> Arena | None:
        """The arena; None where the system has none."""
        with self._lock:
            if not self._tried:
                self._tried = True
                try:
                    self._arena = Arena()
                except OSError as error:
                    log.info("members of this host send payloads through sockets: %s", error)
            return self._arena

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._arena, self._tried = None, False


_ARENAS = _Arenas()


def allocate(nbytes: int) -> ctypes.Array[ctypes.c_char] | None:
    """Memory that other members of this host may read. None for little, and where there is none: take any other."""
    if nbytes >= LEAST_BYTES and (arena := _ARENAS.get()) is not None:
        try:
            return arena.allocate(nbytes)
        except OSError as error:
            log.info("no shared memory for a payload: %s", error)
    return None


# ---- Two members of one host agree, and lend ----

OFFER = "host/1"
_MAC_BYTES = 32
LABEL = b"rallypoint/host"
_DESCRIBED = struct.Struct("<II16sQ")  # the process, its memfd, its token, and where the two words of a link are
_WORD_BYTES = 8
_READ, _LENDS = range(2)  # which word


def say(stream: Connection, key: bytes, data: bytes) -> None:
    """Send `data` during an upgrade, with a MAC."""
    stream.send(len(data).to_bytes(4, "little") + data + hmac.digest(key, data, "sha256"))


def heard(stream: Connection, key: bytes, longest: int) -> bytes:
    """Receive what the other side says in an upgrade. LinkError if it is longer, or was changed on its way."""
    size = int.from_bytes(receive_bytes(stream, 4), "little")
    if size > longest:
        raise LinkError(f"{stream.peer} describes its memory with {size} bytes: at most {longest} are allowed")
    data, mac = bytes(receive_bytes(stream, size)), bytes(receive_bytes(stream, _MAC_BYTES))
    if not hmac.compare_digest(hmac.digest(key, data, "sha256"), mac):
        raise LinkError(f"what {stream.peer} says of its memory was changed on the way")
    return data


def agreed(
    stream: Connection, sending: bytes, receiving: bytes, count: Callable[[int, int], None]
) -> HostLender | None:
    """Say where this process's memory is, and open the other's: what lends from now on. None if either cannot.

    Both sides call it at the same point of the stream. The keys are made for this alone. LinkError if the stream ends.
    """
    arena = _ARENAS.get()
    words = None if arena is None else _two_words(arena)
    if arena is None or words is None:
        say(stream, sending, b"")
        heard(stream, receiving, _DESCRIBED.size)
        lender = None
    else:
        at = arena.find(memoryview(words).cast("B"))
        assert at is not None
        say(stream, sending, _DESCRIBED.pack(os.getpid(), arena.fd, arena.token.encode(), at))
        lender = _opened(heard(stream, receiving, _DESCRIBED.size), arena, words, stream.peer, count)
    both = False
    try:
        say(stream, sending, b"no" if lender is None else b"yes")
        both = heard(stream, receiving, 3) == b"yes" and lender is not None
    finally:
        if lender is not None and not both:
            lender.close()
    return lender if both else None


def _two_words(arena: Arena) -> ctypes.Array[ctypes.c_uint64] | None:
    """What a `HostLender` tells the other side. None if there is no more memory."""
    try:
        words = (ctypes.c_uint64 * 2).from_buffer(arena.allocate(2 * _WORD_BYTES))
    except OSError as error:
        log.info("no shared memory for a link: %s", error)
        return None
    words[_LENDS] = 1
    return words


def _opened(
    said: bytes, arena: Arena, words: ctypes.Array[ctypes.c_uint64], peer: str, count: Callable[[int, int], None]
) -> HostLender | None:
    """A lender that reads the memory which a peer has described; None if it cannot be opened here."""
    if len(said) != _DESCRIBED.size:
        return None
    pid, there, token, words_at = _DESCRIBED.unpack(said)
    if words_at % _WORD_BYTES:
        return None
    path = f"/proc/{pid}/fd/{there}"
    try:
        # In another container the number may be another process's: its file is not opened, it could be anything.
        if os.readlink(path) != f"/memfd:rallypoint-{token.decode()} (deleted)":
            return None
        there = _Mapped(arena, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), peer)
        try:
            return HostLender(arena, words, there, words_at, peer, count)
        except (OSError, LinkError):
            there.close()
            raise
    except (OSError, UnicodeDecodeError, LinkError) as error:
        log.info("payloads of %s come through the socket: %s", peer, error)
        return None


class _Mapped:
    """A peer's memfd, mapped to be read. Not thread-safe."""

    def __init__(self, arena: Arena, fd: int, peer: str) -> None:
        self._arena, self._fd, self._peer = arena, fd, peer
        self._size = self._start = self._length = 0  # of the file when it was looked at; of what is mapped

    def at(self, number: int, nbytes: int) -> int:
        """The address of `nbytes` that begin at `number` of the file; the next call may end it. LinkError if the file
        does not have them, OSError if they cannot be mapped."""
        if self._fd < 0:
            raise LinkError(f"the link to {self._peer} is closed")
        if number + nbytes > self._size:
            self._size = os.fstat(self._fd).st_size
            if number + nbytes > self._size:
                raise LinkError(f"{self._peer} lends memory that it does not have")
        if self._size > self._length:
            if not fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise LinkError(f"the memory of {self._peer} could shrink while it is read")
            self._unmap()
            length = 2 * self._size  # the file grows; nobody reads beyond its end
            self._start, self._length = self._arena.map(self._fd, length, mmap.PROT_READ), length
        return self._start + number

    def close(self) -> None:
        self._unmap()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _unmap(self) -> None:
        length, self._length = self._length, 0
        if length:
            self._arena.unmap(self._start, length)


class HostLender:
    """A `Lender` between two processes of one host.

    Each side has two words in its memfd, which the other one reads: how many payloads it has read, and 1 while what it
    lends may be read. When the words are freed they become zeros, so nothing is lent any more.
    """

    def __init__(
        self, arena: Arena, words: ctypes.Array[ctypes.c_uint64], there: _Mapped, words_at: int, peer: str,
        count: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        """`words` are this side's. `count` is told of bytes that were lent, and read. LinkError if the other side has
        no words."""
        self._arena, self._words, self._there, self._words_at, self._peer = arena, words, there, words_at, peer
        self._count, self._read, self._returned = count, 0, 0
        self._lock = threading.Lock()  # of the mapping: it does not end while it is read
        self.paced = False  # the kernel paces the stream; nothing paces what is read from memory
        self._word(_LENDS)

    def lend(self, payload: memoryview) -> int | None:
        if len(payload) < LEAST_LENT or self.paced or (at := self._arena.find(payload)) is None:
            return None
        self._count(len(payload), 0)
        return at

    def read(self, number: int, view: memoryview) -> None:
        length = len(view)
        with self._lock:
            try:
                if lent := self._word(_LENDS) != 0:  # otherwise there may be a hole, which reading would fill
                    into = ctypes.addressof(ctypes.c_char.from_buffer(view))
                    ctypes.memmove(into, self._there.at(number, length), length)  # lets Python's lock go
                    lent = self._word(_LENDS) != 0
            except OSError as error:
                raise LinkError(f"the memory of {self._peer} cannot be read: {error}") from None
        if not lent:
            raise LinkError(f"{self._peer} has ended the link before its payload was read")
        self._read += 1
        self._words[_READ] = self._read
        self._count(0, length)

    def returned(self) -> int:
        with self._lock:
            with contextlib.suppress(OSError, LinkError):  # it cannot be read, or is there no more
                self._returned = self._word(_READ)
            return self._returned

    def withdraw(self) -> None:
        self._words[_LENDS] = 0

    def close(self) -> None:
        """Read no more. Any thread may call it, more than once."""
        with self._lock:
            self._there.close()

    def _word(self, which: int) -> int:
        address = self._there.at(self._words_at + which * _WORD_BYTES, _WORD_BYTES)
        return ctypes.c_uint64.from_address(address).value
