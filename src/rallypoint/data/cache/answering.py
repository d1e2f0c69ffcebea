"""Answers other hosts of the job that ask for pieces of the data set."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from rallypoint.core.protocol import MOST_PIECE, Found, Hello, NotFound, Wanted, Welcome
from rallypoint.data.cache.cache import Cache, Piece
from rallypoint.data.cache.entries import checksum
from rallypoint.data.sources.remote import File, Files
from rallypoint.errors import AccessDenied, DataError, LinkError, ProtocolError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Identity
from rallypoint.net.transport import Connection, Transport

log = logging.getLogger("rallypoint")

SENT_WITHIN_S = 120.0
MOST_AT_ONCE = 16  # pieces that are fetched, or sent, for one worker at a time: the rest of its requests wait
MOST_OF_ONE = 128  # connections of one worker and its loader processes


class Answering:
    """Listens at `bind` as `me` for workers that want pieces, from construction to `close`.

    Only files of this worker's own data set are read, each within its size: who asks names a file by its digest, and
    no path. UsageError if `bind` can be reached from elsewhere and there is no token.

    Attributes:
        gate: who listens; its `me` is kept up to date by the owner.
    """

    def __init__(
        self, transport: Transport, bind: str, me: Identity, cache: Cache, sources: Iterable[tuple[Files, list[File]]]
    ) -> None:
        self._cache = cache
        self._files: Mapping[bytes, tuple[Files, File]] = {
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
        piece = Piece(wanted.file, wanted.start, wanted.stop)
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
