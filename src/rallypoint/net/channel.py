"""A connection that carries frames, each with its seal."""

from __future__ import annotations

import hashlib
import heapq
import hmac
import itertools
import logging
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rallypoint.core.protocol import Message, Refused, decode, encode, with_secrets
from rallypoint.errors import CorruptFrame, Explained, LinkError, ProtocolError
from rallypoint.net.frames import HEADER_BYTES, LENT, Header, Kind, pack, unpack
from rallypoint.net.handshake import LinkKeys, expand
from rallypoint.net.transport import Connection, Lender, receive_bytes
from rallypoint.observe.trace import Tracer

# ---- Seals: each frame has a MAC of its payload, and a tag of its header and place in the stream ----
#
# After the greeting (`handshake.py`) each frame begins with 80 bytes:
#
#      0  header   48 bytes (`frames.py`)
#     48  mac      16 bytes, of the payload: AES-256-GMAC (NIST SP 800-38D). Its nonce is the frame's number (12 bytes).
#                  Zeros if there is no payload, and with TLS
#     64  tag      16 bytes: keyed BLAKE2b of the frame's number (8 bytes, from 0), header and MAC
#
# All numbers are little-endian. The keys belong to this connection and direction, so no nonce is used twice, and a
# frame that was changed, repeated, left out, put in, moved or taken from another connection has a wrong tag. The tag is
# checked before the header is read, the MAC before anything reads the payload.
#
# Where two members can read each other's memory (`transport.Lender`) a large payload is lent: the frame has the flag
# LENT, and in place of the MAC the number of the loan (8 bytes) and zeros. The other side counts, in its memory, what
# it has read: that may change. A side that ends the link withdraws what it lends before that changes.
#
# Frames are not encrypted, but the secrets in control messages are (`Secrets`): who reads the network gets no tickets.
#
# With TLS the connection authenticates every byte itself, and the greeting is bound to that connection. So there a
# payload needs no MAC: `macs` is False on both sides. The tags stay.
#
# GMAC takes about as long as reading the payload from memory (`benchmarks/seals.py`), so there is no cheaper checksum
# for networks that somebody trusts.

MAC_BYTES = 16
TAG_BYTES = 16
SEALED_BYTES = HEADER_BYTES + MAC_BYTES + TAG_BYTES
_EMPTY = bytes(MAC_BYTES)
_NONCE_BYTES = 12
_LENT = struct.Struct("<Q8x")
_FLAGS_AT = 6  # in the header
_PERSON = b"rallypoint/frame"  # BLAKE2b's personalisation: 16 bytes


class Sealer:
    """Makes the first 80 bytes of each frame that one side sends. Only one thread may use it."""

    def __init__(self, keys: LinkKeys, *, macs: bool = True) -> None:
        self._tags, self._macs = _seals(keys.sending, macs=macs)
        self._count = 0

    def seal(self, header: Header, payload: memoryview | None, lent: int | None = None) -> bytes:
        """The header, MAC and tag of the next frame. The payload must not change before it is sent. `lent` is the
        number under which it is lent instead."""
        number, self._count = self._count, self._count + 1
        head = pack(header, 0 if lent is None else LENT)
        if lent is not None:
            head += _LENT.pack(lent)
        elif self._macs is not None and payload is not None and len(payload):
            head += self._macs.encrypt(number.to_bytes(_NONCE_BYTES, "little"), b"", payload)
        else:
            head += _EMPTY
        tag = self._tags.copy()
        tag.update(number.to_bytes(8, "little") + head)
        return head + tag.digest()


class Opener:
    """Checks each frame that one side receives: `open`, then `verify` if it has a payload. Only one thread may use it.

    `peer` names the sender in errors. A CorruptFrame is final: the connection must be closed.

    Attributes:
        lent: the number under which the payload of the frame that was opened last is lent; None if it follows.
    """

    lent: int | None = None

    def __init__(self, keys: LinkKeys, peer: str, *, macs: bool = True) -> None:
        self._tags, self._macs = _seals(keys.receiving, macs=macs)
        self._peer = peer
        self._number, self._kind, self._mac = -1, Kind.CONTROL, _EMPTY  # of the frame that was opened last

    def open(self, sealed: memoryview) -> Header:
        """Return the header of the next frame. CorruptFrame if the tag is wrong, ProtocolError if it is no header."""
        self._number += 1
        tag = self._tags.copy()
        tag.update(self._number.to_bytes(8, "little"))
        tag.update(sealed[:-TAG_BYTES])
        if not hmac.compare_digest(tag.digest(), sealed[-TAG_BYTES:]):
            raise CorruptFrame(f"a frame from {self._peer} has a wrong tag: something changed it on the way")
        header = unpack(sealed[:HEADER_BYTES])
        self._kind, self._mac = header.kind, bytes(sealed[HEADER_BYTES:-TAG_BYTES])
        self.lent = _LENT.unpack(self._mac)[0] if sealed[_FLAGS_AT] & LENT else None
        if self.lent is not None and not header.length:
            raise ProtocolError(f"{self._peer} lends a payload of no bytes")
        return header

    def verify(self, payload: memoryview) -> None:
        """CorruptFrame unless this is the payload of the frame that was opened last. Without MACs it is believed."""
        if self._macs is None:
            return
        mac = self._macs.encrypt(self._number.to_bytes(_NONCE_BYTES, "little"), b"", payload)  # lets Python's lock go
        if not hmac.compare_digest(mac, self._mac):
            raise CorruptFrame(f"the payload of a {self._kind.name} frame from {self._peer} was changed on the way")


class Secrets:
    """Encrypts the secrets that one side sends in control messages, and decrypts those that it gets: AES-256-GCM.

    The keys are those of this connection; each secret has a random nonce of 12 bytes before it. Any thread may use it.
    """

    def __init__(self, keys: LinkKeys) -> None:
        self._sending, self._receiving = (AESGCM(expand(key, b"secrets")) for key in (keys.sending, keys.receiving))

    def hide(self, secret: bytes) -> bytes:
        """Encrypt a secret. It is 28 bytes longer then; b"", which is none, stays so."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._sending.encrypt(nonce, secret, None) if secret else b""

    def reveal(self, hidden: bytes) -> bytes:
        """Decrypt a secret. ProtocolError if it was not encrypted for this connection and direction."""
        if not hidden:
            return b""
        try:
            return self._receiving.decrypt(hidden[:_NONCE_BYTES], hidden[_NONCE_BYTES:], None)
        except (InvalidTag, ValueError):
            raise ProtocolError("a secret that was not encrypted for this connection") from None


def _seals(secret: bytes, *, macs: bool) -> tuple[hashlib.blake2b, AESGCM | None]:
    """What tags one direction's frames (copy it for each), and what makes the MACs of their payloads: it authenticates
    them, and encrypts nothing."""
    tags = hashlib.blake2b(digest_size=TAG_BYTES, key=expand(secret, b"tags"), person=_PERSON)
    return tags, AESGCM(expand(secret, b"payloads")) if macs else None


# ---- The frames that wait to be sent on one channel, and how many bytes of them may ----

Rank = tuple[int, ...]  # compared as tuples are; () is the lowest

_ITS_OWN = object()  # begins the place of a frame that has none


class Outgoing(NamedTuple):
    """A frame, and what to call when its payload may be reused, and (before that) when it has left the queue. Its
    header says how long the payload is."""

    header: Header
    payload: memoryview | None
    sent: Callable[[], None] | None
    left: Callable[[], None] | None = None


class Backlog:
    """How many bytes may wait on one channel (`most`), and on all channels that share this object (`most_in_all`).

    Frames with a place do not count: there is one for each place. Thread-safe.
    """

    def __init__(self, most: int, most_in_all: int) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0
        self.allow(most, most_in_all)

    def allow(self, most: int, most_in_all: int) -> None:
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
    a slow link. `nbytes` counts the payloads that wait, `waiting` the frames. All frames without a place count in
    `backlog`, if there is one.
    """

    def __init__(self, backlog: Backlog | None = None) -> None:
        self._backlog, self._counted = backlog, 0
        self._urgent: deque[Outgoing] = deque()
        self._others: dict[Hashable, Outgoing] = {}
        self._places: list[tuple[Rank, int, Hashable]] = []  # a heap: the next place to send from is its first
        self._numbers = itertools.count()
        self.nbytes = self.waiting = 0
        self.overflows = False  # more waits than the backlog allows

    def add(self, frame: Outgoing, place: Hashable = None, *, urgent: bool = False, rank: Rank = ()) -> Outgoing | None:
        """Append a frame. Returns the frame that it has replaced, if there is one: it takes that one's turn."""
        self.nbytes += frame.header.length
        if self._backlog is not None and (urgent or place is None):
            self._counted += (more := SEALED_BYTES + frame.header.length)
            self.overflows = not self._backlog.change(more, self._counted)
        if urgent:
            self._urgent.append(frame)
            self.waiting += 1
            return None
        number = next(self._numbers)
        if place is None:
            place = (_ITS_OWN, number)
        old = self._others.get(place)
        self._others[place] = frame
        if old is None:
            heapq.heappush(self._places, (rank, number, place))
            self.waiting += 1
        else:
            self.nbytes -= old.header.length
        return old

    @property
    def urgent(self) -> bool:
        """Is an urgent frame the next?"""
        return bool(self._urgent)

    def pop(self) -> Outgoing:
        """Take out the next frame. There must be one."""
        if self._urgent:
            frame, counts = self._urgent.popleft(), True
        else:
            _, _, place = heapq.heappop(self._places)
            frame = self._others.pop(place)
            counts = isinstance(place, tuple) and place[0] is _ITS_OWN
        self.nbytes -= frame.header.length
        self.waiting -= 1
        if counts and self._backlog is not None:
            self._counted -= (less := SEALED_BYTES + frame.header.length)
            self.overflows = not self._backlog.change(-less, self._counted)
        return frame


# ---- A connection that carries frames. One thread sends from a queue; the owner's thread receives ----

log = logging.getLogger("rallypoint")
LENT_BYTES = 8 << 20  # of payloads that one side of a channel lends at once, or one payload
_LOOK_S, _LOOK_FULL_S = 0.05, 1e-3  # the sending thread looks so often what was read, though nothing comes from there


class _Loans:
    """What a channel lends, oldest first. Needs the channel's lock, but for `nbytes`."""

    def __init__(self, lender: Lender | None) -> None:
        """Without a lender it is empty."""
        self.lender, self.nbytes, self.look_at = lender, 0, 0.0
        self._frames: deque[Outgoing] = deque()
        self._ended = 0

    def add(self, frame: Outgoing) -> None:
        self._frames.append(frame)
        self.nbytes += frame.header.length

    def end(self, *, all: bool = False) -> list[Outgoing]:
        """Those that the other side has read since the last call; with `all` the others too, which are withdrawn."""
        assert self.lender is not None
        self.look_at = time.monotonic() + _LOOK_S
        if all:
            self.lender.withdraw()
        read = self._ended + len(self._frames) if all else self.lender.returned()
        ended = []
        while self._ended < read and self._frames:
            ended.append(frame := self._frames.popleft())
            self.nbytes -= frame.header.length
            self._ended += 1
        return ended


class Channel:
    """Frames over one connection. LinkError if its sending thread cannot be started.

    `send` never blocks: it queues the frame. Urgent frames (credits, measures, control) go before bulk ones. Any thread
    may send; only one thread may receive. When the connection breaks, the sending thread ends quietly, and the
    receiving thread gets the LinkError. `keys` are those of the greeting: each frame is sealed. `number`
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
        self._loans = _Loans(connection.lender)
        self._transmit = self._send_frame if connection.lender is None else self._lend_frame
        self._last_word = False  # what is sent after it is dropped
        self._changed = threading.Condition()
        self._closing = False
        self._idle = True
        self.fault: Exception | None = None
        self._thread = threading.Thread(target=self._send_all, name=f"send to {name}", daemon=True)
        with Explained(LinkError, f"no thread can be started to send to {name}", of=(RuntimeError,)):
            self._thread.start()

    # ---- sending ----

    def send(
        self, header: Header, payload: memoryview | None = None, sent: Callable[[], None] | None = None,
        *, urgent: bool = False, place: Hashable = None, rank: Rank = (), left: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Queue a frame, behind those of its `rank` and before those of a higher one. It replaces the frame that waits
        at the same `place`, if it has one (see `Outbox`).

        `payload` must not change before `sent` is called, from the sending or the receiving thread: after the frame
        went out, and was read if it was lent, or when that will never be. If the channel is closed, the frame is
        dropped and `sent` is called at once, from the calling thread; so is that of a frame that is replaced. `left` is
        called once the frame is out of the queue, whatever became of it.
        """
        frame = Outgoing(header, payload, sent, left)
        dropped: list[Outgoing | None] = [frame]
        with self._changed:
            if not self._closing and not self._last_word:
                dropped = [self._outbox.add(frame, place, urgent=urgent, rank=rank)]
                if self._outbox.overflows:
                    dropped += self._give_up()
                self._changed.notify_all()
        for frame_dropped in dropped:
            if frame_dropped is not None:
                if frame_dropped.left is not None:
                    frame_dropped.left()
                if frame_dropped.sent is not None:
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
        return Outgoing(Header(Kind.REFUSE, length=len(data)), memoryview(data), self._end_refused)

    def _end_refused(self) -> None:
        self._stop()
        self.connection.close()

    def _give_up(self) -> list[Outgoing]:
        """Drop all that waits, and end the connection with a sentence. Needs the lock. Returns what is dropped."""
        megabytes = self._outbox.nbytes / 1e6
        dropped = [self._outbox.pop() for _ in range(self._outbox.waiting)]
        log.warning("the link to %s is ended: %.0f MB waited for it, because it reads too slowly", self.name, megabytes)
        self._outbox.add(
            self._refusal(f"{megabytes:.0f} MB waited here, because they are read too slowly: ask for them anew"),
            urgent=True,
        )
        self._last_word = True
        return dropped

    @property
    def waiting_bytes(self) -> int:
        with self._changed:
            return self._outbox.nbytes

    def flush(self, timeout: float) -> bool:
        """Wait until every queued frame is sent, or the channel is closed. Returns False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self._end_loans()
            left = deadline - time.monotonic()
            with self._changed:
                look = min(left, _LOOK_FULL_S) if self._loans.nbytes else left
                if self._changed.wait_for(lambda: self._closing or (
                    self._idle and not self._outbox.waiting and not self._loans.nbytes), look):  # fmt: skip
                    return True
            if left <= 0:
                return False

    def close(self) -> None:
        """End the connection and the sending thread. Queued frames are dropped."""
        self._stop()
        self.connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send_all(self) -> None:
        while (item := self._next()) is not None:
            over = True
            try:
                over = self._send_traced(item) if self._tracer.on else self._transmit(item)
            except LinkError:  # the receiving thread will get it too, after the last frames: they may say why
                self._stop()
            except Exception as fault:  # any other one would end this thread unseen, and the queue would only grow
                self._fail(fault)
            try:
                if item.left is not None:
                    item.left()
                if over and item.sent is not None:
                    item.sent()
            except Exception as fault:
                self._fail(fault)
        self._end_loans(all=True)
        while self._outbox.waiting:
            item = self._outbox.pop()
            for what in (item.left, item.sent):
                try:
                    if what is not None:
                        what()
                except Exception as fault:
                    self._fail(fault)

    def _end_loans(self, *, all: bool = False) -> None:
        """What the other side has read, or (`all`) will never read, may change."""
        if not self._loans.nbytes:
            return
        with self._changed:
            ended = self._loans.end(all=all)
            if ended:
                self._changed.notify_all()
        for item in ended:
            try:
                if item.sent is not None:
                    item.sent()
            except Exception as fault:
                self._fail(fault)

    def _send_frame(self, item: Outgoing) -> bool:
        """Send a frame. Returns True: its payload may change from now on."""
        self.connection.send(self._sealer.seal(item.header, item.payload), item.payload)
        return True

    def _lend_frame(self, item: Outgoing) -> bool:
        """Send a frame, and lend its payload if that can be. Returns False if it is lent: it may not change yet."""
        lender = self._loans.lender
        number = None if lender is None or item.payload is None else lender.lend(item.payload)
        if number is None:
            self.connection.send(self._sealer.seal(item.header, item.payload), item.payload)
            return True
        head = self._sealer.seal(item.header, item.payload, number)
        with self._changed:
            self._loans.add(item)  # before it is sent: it may be read at once
        try:
            self.connection.send(head)
        except LinkError:
            self._stop()  # then it is withdrawn
        except Exception as fault:
            self._fail(fault)
        return False

    def _send_traced(self, item: Outgoing) -> bool:
        kind, shard = item.header.kind.name, item.header.shard
        with self._tracer.span("send", kind=kind, shard=shard, waiting=self._outbox.nbytes):
            return self._transmit(item)

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
        outbox, loans = self._outbox, self._loans
        while True:
            if loans.nbytes and (loans.nbytes >= LENT_BYTES or time.monotonic() >= loans.look_at):
                self._end_loans()  # also if the other side sends nothing, and however much there is to send here
            with self._changed:
                while not (self._closing or (outbox.urgent if loans.nbytes >= LENT_BYTES else outbox.waiting)):
                    if not self._idle:
                        self._idle = True
                        self._changed.notify_all()  # for `flush`
                    look = None if not loans.nbytes else _LOOK_FULL_S if outbox.waiting else _LOOK_S
                    if not self._changed.wait(look) or loans.nbytes >= LENT_BYTES:
                        break
                else:
                    if self._closing:
                        return None
                    self._idle = False
                    return outbox.pop()

    # ---- receiving: one thread only ----

    def receive_header(self) -> Header:
        """Block until the next header is here.

        LinkError when the stream ends or the frame was changed on its way, ProtocolError if it is no header.
        """
        try:
            self.connection.recv_into(self._head)
        except LinkError as ended:
            self._raise(ended)
        if self._loans.nbytes:
            self._end_loans()  # before anything comes of what the other side has read
        return self._opener.open(self._head)

    def receive_into(self, view: memoryview) -> None:
        """Receive the payload of the last header into `view`. LinkError when the stream ends.

        CorruptFrame (a LinkError) if the payload was changed on its way: then nothing may read `view`.
        """
        if self._opener.lent is not None:
            self._read_loan(self._opener.lent, view)
            return
        try:
            self.connection.recv_into(view)
        except LinkError as ended:
            self._raise(ended)
        if len(view):
            self._opener.verify(view)

    def _read_loan(self, number: int, view: memoryview) -> None:
        if (lender := self.connection.lender) is None:
            raise ProtocolError(f"{self.name} lends a payload, and this link has no memory")
        try:
            lender.read(number, view)
        except LinkError as ended:
            self._raise(ended)

    def receive_bytes(self, header: Header) -> bytearray:
        """Receive the payload of `header` into new memory, which grows as it comes. LinkError when the stream ends.

        CorruptFrame (a LinkError) if the payload was changed on its way.
        """
        if self._opener.lent is not None:
            data = bytearray(header.length)
            with memoryview(data) as view:
                self._read_loan(self._opener.lent, view)
            return data
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
