"""A connection that carries frames. One thread sends from a queue; the owner's thread receives."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, NoReturn

from rallypoint.core.protocol import Message, Refused, decode, encode, with_secrets
from rallypoint.errors import LinkError, ProtocolError
from rallypoint.net.frames import Header, Kind
from rallypoint.net.keys import LinkKeys
from rallypoint.net.seal import SEALED_BYTES, Opener, Sealer, Secrets
from rallypoint.net.transport import Connection, receive_bytes
from rallypoint.observe.trace import Tracer

# ---- The frames that wait to be sent on one channel, and how many bytes of them may ----


Rank = tuple[int, ...]  # compared as tuples are; () is the lowest

_ITS_OWN = object()  # begins the place of a frame that has none


class Outgoing(NamedTuple):
    """A frame, and what to call when its payload may be reused. Its header says how long the payload is."""

    header: Header
    payload: memoryview | None
    sent: Callable[[], None] | None


class Backlog:
    """How many bytes may wait on one channel (`most`), and on all channels that share this object (`most_in_all`).

    Frames with a place do not count: there is one for each place. Thread-safe.
    """

    def __init__(self, most: int, most_in_all: int) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0
        self.allow(most, most_in_all)

    def allow(self, most: int, most_in_all: int) -> None:
        """Change the limits."""
        self.most, self.most_in_all = most, most_in_all

    def change(self, nbytes: int, own: int) -> bool:
        """Count `nbytes` more (or less), after which `own` wait on that channel. Returns False if that is too much.

        If too much waits on all channels together, it is too much for those with more than a quarter of `most`.
        """
        with self._lock:
            self.nbytes += nbytes
            return own <= self.most and (self.nbytes <= self.most_in_all or own <= self.most // 4)


class Outbox:
    """Urgent frames go first, then the others: those of a lower rank before those of a higher one, and those of equal
    rank in the order in which they were added. Not thread-safe.

    A frame may have a place, such as ("version", 7): then it replaces the frame that waits at that place, and goes out
    in its stead. So of each shard only the newest version waits for a slow follower, and every shard gets its share of
    a slow link. `nbytes` counts the payloads that wait. All frames without a place count in `backlog`, if there is one.
    """

    def __init__(self, backlog: Backlog | None = None) -> None:
        self._backlog, self._counted = backlog, 0
        self._urgent: deque[Outgoing] = deque()
        self._others: dict[Hashable, Outgoing] = {}
        self._places: list[tuple[Rank, int, Hashable]] = []  # a heap: the next place to send from is its first
        self._numbers = itertools.count()
        self.nbytes = 0
        self.overflows = False  # more waits than the backlog allows

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def add(
        self, frame: Outgoing, place: Hashable = None, *, urgent: bool = False, rank: Rank = ()
    ) -> Outgoing | None:
        """Append a frame. Returns the frame that it has replaced, if there is one: it takes that one's turn."""
        self.nbytes += frame.header.length
        if urgent:
            self._urgent.append(frame)
            self._count(frame, 1)
            return None
        number = next(self._numbers)
        if place is None:
            place = (_ITS_OWN, number)
            self._count(frame, 1)
        old = self._others.get(place)
        self._others[place] = frame
        if old is None:
            heapq.heappush(self._places, (rank, number, place))
        if old is not None:
            self.nbytes -= old.header.length
        return old

    def pop(self) -> Outgoing:
        """Take out the next frame. There must be one."""
        if self._urgent:
            frame, counts = self._urgent.popleft(), True
        else:
            _, _, place = heapq.heappop(self._places)
            frame = self._others.pop(place)
            counts = isinstance(place, tuple) and place[0] is _ITS_OWN
        self.nbytes -= frame.header.length
        if counts:
            self._count(frame, -1)
        return frame

    def _count(self, frame: Outgoing, sign: int) -> None:
        nbytes = sign * (SEALED_BYTES + frame.header.length)
        self._counted += nbytes
        if self._backlog is not None:
            self.overflows = not self._backlog.change(nbytes, self._counted)


log = logging.getLogger("rallypoint")


class Channel:
    """Frames over one connection. LinkError if its sending thread cannot be started.

    `send` never blocks: it queues the frame. Urgent frames (credits, measures, control) go before bulk ones. Any thread
    may send; only one thread may receive. When the connection breaks, the sending thread ends quietly, and the
    receiving thread gets the LinkError. `keys` are those of the greeting: each frame is sealed (`seal.py`). `number`
    counts accepted connections: of two channels, the one with the higher number is newer.

    If more waits than `backlog` allows, the peer reads too slowly: what waits is dropped, and the connection ends with
    a sentence. The peer may connect again, and ask anew.

    `fault` is the exception with which the sending thread has failed: a frame that cannot be packed, a `sent` that
    raises. The channel is closed then, and the receiving thread gets a ProtocolError that says so.
    """

    def __init__(
        self, connection: Connection, name: str, keys: LinkKeys, tracer: Tracer | None = None, number: int = 0,
        backlog: Backlog | None = None,
    ) -> None:  # fmt: skip
        self.connection = connection
        macs = not connection.secured.binding  # TLS authenticates every byte, and the keys are of this very connection
        self._sealer, self._opener = Sealer(keys, macs=macs), Opener(keys, name, macs=macs)
        self._secrets = Secrets(keys)
        self.name, self.number = name, number
        self._tracer = tracer or Tracer(name)
        self._head = memoryview(bytearray(SEALED_BYTES))
        self._outbox = Outbox(backlog)
        self._last_word = False  # what is sent after it is dropped
        self._changed = threading.Condition()
        self._closing = False
        self._idle = True
        self.fault: Exception | None = None
        self._thread = threading.Thread(target=self._send_all, name=f"send to {name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise LinkError(f"no thread can be started to send to {name}: {error}") from None

    # ---- sending ----

    def send(
        self, header: Header, payload: memoryview | None = None, sent: Callable[[], None] | None = None,
        *, urgent: bool = False, place: Hashable = None, rank: Rank = (),
    ) -> None:  # fmt: skip
        """Queue a frame, behind those of its `rank` and before those of a higher one. It replaces the frame that waits
        at the same `place`, if it has one (see `Outbox`).

        `payload` must not change before `sent` is called, from the sending thread: after the frame went out, or when it
        never will. If the channel is closed, the frame is dropped and `sent` is called at once, from the calling
        thread; so is that of a frame that is replaced.
        """
        frame = Outgoing(header, payload, sent)
        dropped: list[Outgoing | None] = [frame]
        with self._changed:
            if not self._closing and not self._last_word:
                dropped = [self._outbox.add(frame, place, urgent=urgent, rank=rank)]
                if self._outbox.overflows:
                    dropped += self._give_up()
                self._changed.notify_all()
        for frame_dropped in dropped:
            if frame_dropped is not None and frame_dropped.sent is not None:
                frame_dropped.sent()

    def send_message(self, message: Message, kind: Kind = Kind.CONTROL) -> None:
        """Queue a control message, as an urgent frame. Secrets in it are encrypted."""
        data = encode(with_secrets(message, self._secrets.hide))
        self.send(Header(kind, length=len(data)), memoryview(data), urgent=True)

    def refuse(self, reason: str, *, final: bool = False) -> None:
        """Tell the other side why this connection ends, then close the connection. `final`: see `Refused`."""
        frame = self._refusal(reason, final=final)
        self.send(frame.header, frame.payload, frame.sent, urgent=True)

    def _refusal(self, reason: str, *, final: bool = False) -> Outgoing:
        data = encode(Refused(reason, final))
        return Outgoing(Header(Kind.REFUSE, length=len(data)), memoryview(data), self.connection.close)

    def _give_up(self) -> list[Outgoing]:
        """Drop all that waits, and end the connection with a sentence. Needs the lock. Returns what is dropped."""
        megabytes = self._outbox.nbytes / 1e6
        dropped = [self._outbox.pop() for _ in range(len(self._outbox))]
        log.warning("the link to %s is ended: %.0f MB waited for it, because it reads too slowly", self.name, megabytes)
        self._outbox.add(
            self._refusal(f"{megabytes:.0f} MB waited here, because they are read too slowly: ask for them anew"),
            urgent=True,
        )
        self._last_word = True
        return dropped

    @property
    def waiting_bytes(self) -> int:
        """How many bytes of payloads wait to be sent."""
        with self._changed:
            return self._outbox.nbytes

    def flush(self, timeout: float) -> bool:
        """Wait until every queued frame is sent, or the channel is closed. Returns False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._drained(), timeout)

    def close(self) -> None:
        """End the connection and the sending thread. Queued frames are dropped."""
        self._stop()
        self.connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _drained(self) -> bool:
        return self._idle and not self._outbox

    def _send_all(self) -> None:
        while (item := self._next()) is not None:
            try:
                if self._tracer.on:
                    self._send_traced(item)
                else:
                    self.connection.send(self._sealer.seal(item.header, item.payload), item.payload)
            except LinkError:  # the receiving thread will get it too, after the last frames: they may say why
                self._stop()
            except Exception as fault:  # any other one would end this thread unseen, and the queue would only grow
                self._fail(fault)
            if item.sent is not None:
                self._call(item.sent)
        while self._outbox:
            if (sent := self._outbox.pop().sent) is not None:
                self._call(sent)

    def _send_traced(self, item: Outgoing) -> None:
        kind, shard = item.header.kind.name, item.header.shard
        with self._tracer.span("send", kind=kind, shard=shard, waiting=self._outbox.nbytes):
            self.connection.send(self._sealer.seal(item.header, item.payload), item.payload)

    def _call(self, sent: Callable[[], None]) -> None:
        try:
            sent()
        except Exception as fault:
            self._fail(fault)

    def _fail(self, fault: Exception) -> None:
        """Close the channel. The receiving thread learns why."""
        log.error("sending to %s has failed", self.name, exc_info=fault)
        self.fault = self.fault or fault
        self._stop()
        self.connection.close()

    def _stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _next(self) -> Outgoing | None:
        with self._changed:
            if not (self._closing or self._outbox):
                self._idle = True
                self._changed.notify_all()  # for `flush`
                self._changed.wait_for(lambda: self._closing or bool(self._outbox))
            if self._closing:
                return None
            self._idle = False
            return self._outbox.pop()

    # ---- receiving: one thread only ----

    def receive_header(self) -> Header:
        """Block until the next header is here.

        LinkError when the stream ends or the frame was changed on its way, ProtocolError if it is no header.
        """
        try:
            self.connection.recv_into(self._head)
        except LinkError as ended:
            self._raise(ended)
        return self._opener.open(self._head)

    def receive_into(self, view: memoryview) -> None:
        """Receive the payload of the last header into `view`. LinkError when the stream ends.

        CorruptFrame (a LinkError) if the payload was changed on its way: then nothing may read `view`.
        """
        try:
            self.connection.recv_into(view)
        except LinkError as ended:
            self._raise(ended)
        if len(view):
            self._opener.verify(view)

    def receive_bytes(self, header: Header) -> bytearray:
        """Receive the payload of `header` into new memory, which grows as it comes. LinkError when the stream ends.

        CorruptFrame (a LinkError) if the payload was changed on its way.
        """
        try:
            data = receive_bytes(self.connection, header.length)
        except LinkError as ended:
            self._raise(ended)
        if header.length:
            self._opener.verify(memoryview(data))
        return data

    def receive_message(self, header: Header) -> Message:
        """Receive the control message of `header`, with its secrets decrypted. ProtocolError if it is none."""
        return with_secrets(decode(self.receive_bytes(header)), self._secrets.reveal)

    def _raise(self, ended: LinkError) -> NoReturn:
        """The stream has ended: by what the sending thread has failed with, if it has."""
        if self.fault is not None:
            raise ProtocolError(f"what was queued for {self.name} could not be sent: {self.fault!r}") from None
        raise ended
