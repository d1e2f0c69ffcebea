"""Pieces of the data set from one host of the job to another: who asks before the store is asked, and who answers."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec
import xxhash

from rallypoint.core.placing.placement import ranking
from rallypoint.core.protocol import MOST_PIECE, Caches, Found, Hello, Holder, NotFound, Wanted, Welcome
from rallypoint.core.typed import build_now
from rallypoint.data.cache import Cache, FilePiece, checksum
from rallypoint.data.files import File, StoredFiles
from rallypoint.errors import AccessDenied, CorruptFrame, DataError, LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Identity, introduce
from rallypoint.net.transport import Connection, Transport

log = logging.getLogger("rallypoint")

CONNECT_S, ANSWER_S = 2.0, 20.0  # the store of the host that is asked may fail a few times meanwhile
SLOWEST = 1 << 20  # bytes a second: a host that sends more slowly is not waited for
MOST_OPEN = 16  # connections that are kept, in each process
REST_S, LONGEST_REST_S = 10.0, 600.0  # so long a host that did not answer is not asked
CHECKED = 64  # about one piece in so many is fetched from the store too, by one of all hosts


class Asking:
    """The caches of other hosts, as one process asks them: for any thread, and after a fork.

    A piece has one host that fetches it from the store: the first in the piece's order (`Known.order`). Who needs it
    asks there. A host that does not answer, or answers wrong, is left alone for a while: the next one in the order is
    asked, and where this host comes first, the store.

    Now and then a piece that came from another host is fetched from the store too, and compared, unless the store
    fails. The host that sent other bytes is never asked again by this process.

    Attributes:
        asked, answered: how many pieces this process has asked for, and has got.
    """

    def __init__(self, transport: Transport, roster: Roster, own_cache: str) -> None:
        self._transport, self._roster, self._own = transport, roster, own_cache
        self._made: tuple[int, _Connections] = 0, _Connections()
        self.asked = self.answered = 0

    def ask(self, piece: FilePiece, fetch: Callable[[], bytes]) -> bytes | None:
        """Return the piece from the host that is to have it; None: this one is, or no other can give it.

        `fetch` gets it from the store.
        """
        known = self._roster.read()
        if known is None or piece.stop - piece.start > MOST_PIECE:
            return None
        connections = self._connections()
        for holder in known.order(piece.name):
            if holder.cache == self._own:
                return None
            if connections.rests(holder):
                continue
            self.asked += 1
            data = self._from(connections, known, holder, piece)
            if data is None:
                return None
            self.answered += 1
            return self._compared(connections, known, holder, data, fetch)
        return None

    def close(self) -> None:
        """End this process's connections."""
        self._connections().close()

    def _connections(self) -> _Connections:
        process, connections = self._made
        if process != os.getpid():  # after a fork the connections are the parent's, and locks may be held for ever
            connections = _Connections()
            self._made = os.getpid(), connections
        return connections

    def _from(self, connections: _Connections, known: Known, holder: Holder, piece: FilePiece) -> bytes | None:
        """None if it has not come; the holder rests then, unless it said why."""
        if (kept := connections.take(holder)) is not None:
            before = time.monotonic()
            try:
                return _asked(connections, holder, kept, piece)
            except RallypointError as error:
                late = time.monotonic() - before >= ANSWER_S
                if late or not isinstance(error, LinkError) or isinstance(error, CorruptFrame):
                    _rests(connections, holder, error)
                    return None
                log.info("a connection to %s that was kept has ended; it is opened anew: %s", holder.id, error)
                connections.forget(holder)  # the others are as old
        try:
            return _asked(connections, holder, self._connect(known, holder), piece)
        except RallypointError as error:
            _rests(connections, holder, error)
            return None

    def _connect(self, known: Known, holder: Holder) -> Channel:
        if not (ticket := known.caches.tickets.get(holder.id, b"")):
            raise LinkError(f"there is no ticket for {holder.id}")
        connection = self._transport.connect(holder.address, CONNECT_S)
        try:
            to = ("worker", holder.id, holder.incarnation)
            hello = Hello("worker", known.id, known.host, incarnation=known.incarnation, to=to)
            _, keys = introduce(connection, hello, ticket=ticket)
            return Channel(connection, holder.id, keys)
        except BaseException:
            connection.close()
            raise

    def _compared(
        self, connections: _Connections, known: Known, holder: Holder, data: bytes, fetch: Callable[[], bytes]
    ) -> bytes:
        if secrets.randbelow(CHECKED * max(1, len({one.cache for one in known.caches.holders}) - 1)):
            return data
        try:
            own = fetch()
        except DataError:  # the store fails: what is here already need not wait for it
            return data
        if own != data:
            connections.rest(holder, forever=True)
            log.warning(
                "worker %s at %s sent other bytes of a file of the data set than the store has: it is not asked again, "
                "and what it sent before may be wrong. End it, empty the folders of the caches, and begin again from "
                "a snapshot that is older than this worker", holder.id, holder.address,
            )  # fmt: skip
        return own


def _asked(connections: _Connections, holder: Holder, channel: Channel, piece: FilePiece) -> bytes | None:
    """Ask on this connection, and keep it for later if that works."""
    try:
        found = _receive(channel, piece)
    except BaseException:
        channel.close()
        raise
    connections.give_back(holder, channel)
    return found


def _rests(connections: _Connections, holder: Holder, error: RallypointError) -> None:
    connections.rest(holder)
    log.info("%s cannot be asked for its cache: %s", holder.id, error)


def _receive(channel: Channel, piece: FilePiece) -> bytes | None:
    """Ask for a piece. None if the other side says that it has none. LinkError or ProtocolError for anything else."""
    channel.connection.set_deadline(ANSWER_S)
    channel.send_message(Wanted(piece.file, piece.start, piece.stop))
    header = channel.receive_header()
    if header.kind is not Kind.CONTROL:
        raise ProtocolError(f"{channel.name} answered with a {header.kind.name} frame")
    answer = channel.receive_message(header)
    if isinstance(answer, NotFound):
        return None
    if not isinstance(answer, Found):
        raise ProtocolError(f"{channel.name} answered with a {type(answer).__name__} message")
    channel.connection.set_deadline(ANSWER_S + (piece.stop - piece.start) / SLOWEST)
    header = channel.receive_header()
    if header.kind is not Kind.PIECE or header.length != piece.stop - piece.start:
        raise ProtocolError(f"{channel.name} sent {header.length} bytes as a {header.kind.name} frame")
    data = bytes(channel.receive_bytes(header))
    if checksum(data) != answer.checksum:
        raise CorruptFrame(f"what {channel.name} sent is damaged")
    channel.connection.set_deadline(None)
    return data


class _Connections:
    """Connections of one process that wait to be used again, and hosts that are left alone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[Channel, Holder] = OrderedDict()
        self._rests: dict[Holder, tuple[float, float]] = {}  # until when, and how long that is
        self._closed = False

    def take(self, holder: Holder) -> Channel | None:
        with self._lock:
            found = next((channel for channel, of in reversed(self._idle.items()) if of == holder), None)
            if found is not None:
                del self._idle[found]
            return found

    def give_back(self, holder: Holder, channel: Channel) -> None:
        """It works: it may be used again, and the holder need not rest."""
        with self._lock:
            self._rests.pop(holder, None)
            self._idle[channel] = holder
            most = 0 if self._closed else MOST_OPEN
            ended = [self._idle.popitem(last=False)[0] for _ in range(len(self._idle) - most)]
        for one in ended:
            one.close()

    def rest(self, holder: Holder, *, forever: bool = False) -> None:
        with self._lock:
            now = time.monotonic()
            until, length = self._rests.get(holder, (0.0, REST_S / 2))
            if until <= now or forever:
                length = min(2 * length, LONGEST_REST_S)
                self._rests[holder] = (float("inf") if forever else now + length), length
        self.forget(holder)

    def forget(self, holder: Holder) -> None:
        """Close what is kept of connections to it."""
        with self._lock:
            ended = [channel for channel, of in self._idle.items() if of == holder]
            for channel in ended:
                del self._idle[channel]
        for channel in ended:
            with suppress(RallypointError):
                channel.close()

    def rests(self, holder: Holder) -> bool:
        with self._lock:
            return self._rests.get(holder, (0.0, 0.0))[0] > time.monotonic()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            ended = list(self._idle)
            self._idle.clear()
        for channel in ended:
            channel.close()


ROOM = 4 << 20  # bytes; none of it is memory before it is used
_HEAD = 12  # the length, 4 bytes; a checksum, 8 bytes


class Known(msgspec.Struct, frozen=True):
    """What a worker knows: who it is itself, and who answers for a cache."""

    id: str
    incarnation: int
    host: str
    caches: Caches

    def order(self, name: str) -> list[Holder]:
        """Return the holders in the order in which their caches are to have the piece of this name.

        It is the same on all hosts (rendezvous hashing), and few pieces change their place when hosts come and go.
        """
        of_cache: dict[str, list[Holder]] = {}
        for holder in sorted(self.caches.holders, key=lambda one: one.id):
            of_cache.setdefault(holder.cache, []).append(holder)
        return [holder for cache in ranking(name, list(of_cache)) for holder in of_cache[cache]]


build_now(Known)


class Roster:
    """Memory that a process shares with those that it forks later. One thread writes; any may read."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ROOM)
        self._seen: tuple[bytes, Known | None] = b"", None

    def tell(self, known: Known) -> None:
        """Replace what is known. If it is too much, nothing changes: fewer hosts are asked then."""
        data = msgspec.msgpack.encode(known)
        if _HEAD + len(data) <= ROOM:
            head = len(data).to_bytes(4, "little") + xxhash.xxh3_64_digest(data)
            self._memory[: _HEAD + len(data)] = head + data

    def read(self) -> Known | None:
        """Return what is known; None before anything is. While it is being written: what was known before."""
        head = bytes(self._memory[:_HEAD])
        if head == self._seen[0]:
            return self._seen[1]
        data = bytes(self._memory[_HEAD : _HEAD + min(int.from_bytes(head[:4], "little"), ROOM)])
        if data and xxhash.xxh3_64_digest(data) == head[4:]:
            self._seen = head, msgspec.msgpack.decode(data, type=Known)
        return self._seen[1]

    def close(self) -> None:
        """Forget it all."""
        self._memory[:_HEAD] = bytes(_HEAD)
        self._seen = b"", None


SENT_WITHIN_S = 120.0
MOST_AT_ONCE = 16  # pieces that are fetched, or sent, for one worker at a time: the rest of its requests wait
MOST_OF_ONE = 128  # connections of one worker and its loader processes


class PeerAnswers:
    """Listens at `bind` as `me` for workers that want pieces, from construction to `close`.

    Only files of this worker's own data set are read, each within its size: who asks names a file by its digest, and
    no path. UsageError if `bind` can be reached from elsewhere and there is no token.

    Attributes:
        gate: who listens; its `me` is kept up to date by the owner.
    """

    def __init__(
        self, transport: Transport, bind: str, me: Identity, cache: Cache,
        sources: Iterable[tuple[StoredFiles, list[File]]],
    ) -> None:  # fmt: skip
        self._cache = cache
        self._files: Mapping[bytes, tuple[StoredFiles, File]] = {
            file.digest: (files, file) for files, found in sources for file in found
        }
        self._bounded, self._connected = BoundedPeers(MOST_AT_ONCE), BoundedConnections(MOST_OF_ONE)
        self.gate = Gate(transport, bind, me, self._admit, self._serve)

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._bounded.close()
        self.gate.close()

    def _admit(self, hello: Hello) -> Welcome:
        if hello.role != "worker":
            raise AccessDenied(f"{hello.role} {hello.id} has no use for a cache of a data set")
        return Welcome()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        with self._connected.one(hello.id, channel.connection):
            while True:
                wanted = _wanted(channel, hello)
                with self._connected.busy(hello.id, channel.connection), self._bounded.of(hello.id):
                    self._answer(channel, wanted)
                    if not channel.flush(SENT_WITHIN_S):
                        raise LinkError(f"{hello.id} does not read what it has asked for")

    def _answer(self, channel: Channel, wanted: Wanted) -> None:
        files, file = self._files.get(wanted.file, (None, None))
        if files is None or file is None:
            channel.send_message(NotFound("the data set here has no such file"))
            return
        if not (wanted.start < wanted.stop <= file.size and wanted.stop - wanted.start <= MOST_PIECE):
            range_ = f"{wanted.start} to {wanted.stop}"
            raise ProtocolError(f"it asked for the bytes {range_} of a file of {file.size} bytes")
        piece = FilePiece(wanted.file, wanted.start, wanted.stop)
        try:
            data = self._cache.serve(piece, lambda: files.fetch(file, wanted.start, wanted.stop))
        except DataError as error:
            channel.send_message(NotFound(str(error)))
            return
        channel.send_message(Found(checksum(data)))
        channel.send(Header(Kind.PIECE, length=len(data)), memoryview(data), urgent=True)


def _wanted(channel: Channel, hello: Hello) -> Wanted:
    """Wait for the next question. ProtocolError for anything else."""
    header = channel.receive_header()
    if header.kind is not Kind.CONTROL:
        raise ProtocolError(f"a {header.kind.name} frame from worker {hello.id}, which may ask for pieces only")
    wanted = channel.receive_message(header)
    if not isinstance(wanted, Wanted):
        raise ProtocolError(f"a {type(wanted).__name__} message from worker {hello.id}")
    return wanted


class BoundedPeers:
    """Lets each peer have `most` things done for it at once; whoever asks for more waits. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._changed = most, threading.Condition()
        self._busy: Counter[str] = Counter()  # of peers that have something done now, and of no others
        self._closed = False

    @contextmanager
    def of(self, peer: str) -> Iterator[None]:
        """Wait until one more may be done for this peer, and do it in the body. LinkError after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._busy[peer] < self._most)
            if self._closed:
                raise LinkError("it answers no longer")
            self._busy[peer] += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy[peer] -= 1
                self._busy += Counter()  # without those that are 0
                self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class BoundedConnections:
    """Lets each peer have `most` connections. For one more, its idle one ends that was asked longest ago.

    Each connection costs a thread. Who asks opens one anew when one that it has kept has ended. Thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        # by peer (only those that have some): each connection, and is it busy? The last to be asked is the last
        self._of: dict[str, dict[Connection, bool]] = {}

    @contextmanager
    def one(self, peer: str, connection: Connection) -> Iterator[None]:
        """This peer has a connection more, in the body. LinkError if none of its own is idle that could end for it."""
        with self._lock:
            own = self._of.setdefault(peer, {})
            idle = next((one for one, busy in own.items() if not busy), None) if len(own) >= self._most else None
            if len(own) >= self._most and idle is None:
                raise LinkError(f"{peer} has {len(own)} connections, and waits for answers on all of them")
            if idle is not None:
                del own[idle]
            own[connection] = False
        if idle is not None:
            idle.close()
        try:
            yield
        finally:
            with self._lock:
                own.pop(connection, None)
                if not own and self._of.get(peer) is own:
                    del self._of[peer]

    @contextmanager
    def busy(self, peer: str, connection: Connection) -> Iterator[None]:
        """Something is done for this connection, in the body. LinkError if it has ended for another one."""
        self._set(peer, connection, busy=True)
        yield
        self._set(peer, connection, busy=False)

    def _set(self, peer: str, connection: Connection, *, busy: bool) -> None:
        with self._lock:
            own = self._of.get(peer, {})
            if connection not in own:
                raise LinkError(f"this connection of {peer} has ended for another one")
            if busy:
                del own[connection]
            own[connection] = busy
