"""TLS 1.3 over TCP: each side shows a certificate of the job's CA."""

from __future__ import annotations

import hashlib
import secrets
import ssl
import threading
from collections.abc import Iterator, Sequence

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rallypoint.errors import AccessDenied, CorruptFrame, LinkError, UnprovenPeer
from rallypoint.net.certificates import ALPN, LoadedFiles, TlsFiles, role_of, words_of
from rallypoint.net.frames import Header, Kind, pack
from rallypoint.net.handshake import expand, extract
from rallypoint.net.tcp import TcpConnection, TcpListener, TcpTransport
from rallypoint.net.transport import LEAST_IN_FLIGHT, Secured

# ---- Records: what a connection with TLS carries after TLS's handshake. Each is encrypted and authenticated ----
#
#      0  length   4 bytes, little-endian: of the data, 1 byte to 256 KiB
#      4  data     encrypted with AES-256-GCM (NIST SP 800-38D)
#         tag      16 bytes, of the length and the data
#
# TLS's own records have at most 16 KiB, so a payload of 1 MiB is 64 calls of OpenSSL: that took five times as long
# (docs/protocol.md). The keys are TLS's work all the same: inside TLS both sides have sent each other a secret
# (`TlsConnection`), and nobody else has it.
#
# Each direction has a key of its own, and a record's nonce is its number, so no nonce is used twice with one key, and a
# record that was changed, repeated, left out, moved or put in has a wrong tag. After `KEY_LASTS` records the next key
# follows from the last one, which is forgotten.

LENGTH_BYTES = 4
TAG_BYTES = 16
LONGEST = 256 << 10  # bytes of data; longer ones leave the processor's caches
SECRET_BYTES = 32  # what each side adds to the keys
KEY_LASTS = 1 << 20  # records: at most 2^38 bytes, with which GCM's margin is still below 2^-57 (RFC 8446, section 5.5)
_NONCE_BYTES = 12


def keys(binding: bytes, dialers: bytes, listeners: bytes) -> tuple[bytes, bytes]:
    """Return the keys for what the dialer sends, and for what the listener sends.

    They follow from both sides' secrets and from what is this connection's alone (`Secured.binding`).
    """
    root = extract(binding, dialers + listeners)
    return expand(root, b"rallypoint/tls from the dialer"), expand(root, b"rallypoint/tls from the listener")


class RecordError(Exception):
    """These bytes are not the next record."""


class _Direction:
    """The cipher and the count of one direction's records."""

    def __init__(self, key: bytes) -> None:
        self._begin(key)

    def _begin(self, key: bytes) -> None:
        self._next_key, self._count = expand(key, b"next key"), 0
        self._cipher = AESGCM(expand(key, b"records"))

    def _next(self) -> tuple[AESGCM, bytes]:
        """The cipher and the nonce of the next record."""
        if self._count == KEY_LASTS:
            self._begin(self._next_key)
        self._count += 1
        return self._cipher, (self._count - 1).to_bytes(_NONCE_BYTES, "little")


class Writer(_Direction):
    """Makes the records of one direction. Only one thread may use it."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._room = memoryview(bytearray(4 << 10))

    def seal(self, pieces: Sequence[bytes | memoryview]) -> memoryview:
        """Return a record for each piece, one behind the other. They are there until the next call."""
        total = sum(LENGTH_BYTES + len(piece) + TAG_BYTES for piece in pieces)
        if total > len(self._room):
            self._room = memoryview(bytearray(total))
        at = 0
        for piece in pieces:
            data = at + LENGTH_BYTES
            end = data + len(piece) + TAG_BYTES
            self._room[at:data] = len(piece).to_bytes(LENGTH_BYTES, "little")
            cipher, nonce = self._next()
            cipher.encrypt_into(nonce, piece, self._room[at:data], self._room[data:end])
            at = end
        return self._room[:total]


class Reader(_Direction):
    """Opens the records of one direction. Only one thread may use it."""

    def length_of(self, head: bytes | memoryview) -> int:
        """Return how many bytes of data the record has that begins like this. RecordError if none can be so long.

        It is not proved yet, and good only to know how much to receive.
        """
        count = int.from_bytes(head, "little")
        if not 1 <= count <= LONGEST:
            raise RecordError(f"a record of {count} bytes")
        return count

    def open(self, head: bytes | memoryview, sealed: memoryview, into: memoryview) -> None:
        """Decrypt the rest of a record `into` as many bytes as it has data. RecordError if anybody changed it: then
        nothing may read `into`."""
        cipher, nonce = self._next()
        try:
            cipher.decrypt_into(nonce, sealed, head, into)
        except InvalidTag:
            raise RecordError("a wrong tag") from None


# ---- A connection with TLS over one of TCP: TLS 1.3's handshake, then records under keys that both sides exchange in
# it.
#
#     TLS's handshake    certificates of both sides, fresh keys
#     inside TLS         a secret from each side
#     records            see above: encrypted and authenticated under keys that follow from both secrets
#
# OpenSSL works on memory; the socket stays `TcpConnection`'s. Of TLS's stream exactly its records are received, so what
# follows it is not taken for a part of it. One thread sends while another receives, and they share nothing. No record
# says that it is the last one: a process that is killed says nothing, so nobody may rely on it.

_GREETING_ROOM = 4 << 10  # bytes for a record of a peer that has not proved anything
_SHORT = 1 << 10  # bytes of a head that goes out together with what follows it
_TLS_HEADER_BYTES = 5  # RFC 8446, section 5.1: type, version, length
_TLS_LONGEST = (16 << 10) + 256  # section 5.2
_FIRST_WORD_S = 2.0  # a dialer with TLS speaks first, at once; one without waits to be greeted
_LABEL = b"rallypoint/tls"
_HANDSHAKE, _ALERT = 22, 21  # RFC 8446, section 5.1: a record's first byte
_ALERTS = {  # what the other side says of our certificate
    "CERTIFICATE_EXPIRED": "it has expired",
    "UNKNOWN_CA": "it is of another CA",
    "DECRYPT_ERROR": "it is of another CA",
    "CERTIFICATE_REQUIRED": "it was shown none",
    "BAD_CERTIFICATE": "it is not valid (yet)",
    "CERTIFICATE_REVOKED": "it was revoked",
    "UNSUPPORTED_CERTIFICATE": "it is for something else",
    "CERTIFICATE_UNKNOWN": "it cannot be checked",
}
_EXPIRED, _NOT_YET = 10, 9  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID
_RENEW = "`rallypoint token --tls FOLDER` renews it"


class TlsConnection:
    """A Connection with TLS 1.3 over `stream`. Both sides must show a certificate of the job's CA.

    The sides shake hands when the connection is first used, in the thread that uses it and within its deadline. If that
    fails, the dialer gets an UnprovenPeer and the listener an AccessDenied, with a sentence. The connection is closed.

    Attributes:
        certificate: the other side's (DER), once both have shaken hands.
    """

    offers = ""

    def __init__(self, stream: TcpConnection, files: TlsFiles, *, listener: bool) -> None:
        self._stream, self._files, self._listener, self.peer = stream, files, listener, stream.peer
        self.set_timeout, self.set_deadline, self.finish = stream.set_timeout, stream.set_deadline, stream.finish
        self.limit_in_flight, self.pace, self.share_port = stream.limit_in_flight, stream.pace, stream.share_port
        self._shaking = threading.Lock()
        self.lender = None
        self._secured: Secured | None = None  # set last: then both threads may use the rest
        self.certificate = b""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()  # of the handshake, and gone after it
        self._tls: ssl.SSLObject
        self._writer: Writer
        self._reader: Reader
        self._head = memoryview(bytearray(LENGTH_BYTES))
        self._room = memoryview(bytearray(_GREETING_ROOM))
        self._ready = memoryview(b"")  # data of a record of which only a part was wanted
        self._closed = False

    @property
    def secured(self) -> Secured:
        return self._ensure_secured()

    def _ensure_secured(self) -> Secured:
        """Shake hands if that has not been done. Threads that come meanwhile wait."""
        if self._secured is None:
            with self._shaking:
                if self._secured is None:
                    try:
                        self._secured = self._shake_hands()
                    except BaseException:
                        self.close()
                        raise
        return self._secured

    # ---- bytes ----

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self._ensure_secured()
        for pieces in _pieces(head, payload):
            self._stream.send(b"", self._writer.seal(pieces))

    def recv_into(self, view: memoryview) -> None:
        self._ensure_secured()
        while len(view):
            if self._closed:
                raise LinkError(f"the link to {self.peer} is closed")
            if not len(self._ready):
                view = view[self._receive_record(view) :]
            else:
                count = min(len(self._ready), len(view))
                view[:count] = self._ready[:count]
                self._ready, view = self._ready[count:], view[count:]

    def _receive_record(self, view: memoryview) -> int:
        """Receive a record into the view. Returns how many bytes: none, if it has more data than there is room."""
        self._stream.recv_into(self._head)
        try:
            count = self._reader.length_of(self._head)
            sealed = self._room_of(count + TAG_BYTES)
            self._stream.recv_into(sealed)
            if count <= len(view):
                self._reader.open(self._head, sealed, view[:count])
                return count
            ready = memoryview(bytearray(count))
            self._reader.open(self._head, sealed, ready)
        except RecordError as error:
            raise CorruptFrame(f"the link to {self.peer} is ended: bytes were changed on the way ({error})") from None
        self._ready = ready
        return 0

    def _room_of(self, count: int) -> memoryview:
        if count > len(self._room):
            self._room = memoryview(bytearray(count))
        return self._room[:count]

    # ---- the handshake ----

    def _shake_hands(self) -> Secured:
        loaded = self._files.loaded()
        context = loaded.listening if self._listener else loaded.dialing
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=self._listener)
        try:
            self._talk()
            secured = self._proved(loaded)
            self._exchange_secrets(secured.binding)
        except ssl.SSLError as error:
            self._stream.send_at_once(self._outgoing.read())  # an alert, which says why
            raise self._refusal(self._said(error)) from None
        except ValueError as error:
            raise self._refusal(f"the certificate of {self.peer} names no role: {error}") from None
        del self._tls, self._incoming, self._outgoing  # with the keys under which the secrets have travelled
        return secured

    def _talk(self) -> None:
        """Shake hands. SSLError if that fails, LinkError if the stream ends."""
        if self._listener and not self._stream.has_input(_FIRST_WORD_S):
            self._stream.send_at_once(pack(Header(Kind.REFUSE)))
            why = "it may have come without TLS, which is wanted here (--tls)"
            raise AccessDenied(f"{self.peer} has said nothing for {_FIRST_WORD_S:.0f} s: {why}")
        first = True
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
            else:
                return
            self._receive_of_tls(first=first)
            first = False

    def _exchange_secrets(self, binding: bytes) -> None:
        """Tell the other side a secret inside TLS, and learn its own: the keys of all records follow from both.

        SSLError if the other side does not accept this member's certificate: a dialer hears of that here.
        """
        own, other = secrets.token_bytes(SECRET_BYTES), b""
        self._tls.write(own)
        self._flush()
        while len(other) < SECRET_BYTES:
            try:
                got = self._tls.read(SECRET_BYTES - len(other))
            except ssl.SSLWantReadError:
                self._receive_of_tls()
                continue
            if not got:
                raise self._refusal(f"{self.peer} has ended TLS before it has told its secret")
            other += got
        if self._tls.pending():
            raise self._refusal(f"{self.peer} says more inside TLS than its secret")
        dialers, listeners = keys(binding, *((other, own) if self._listener else (own, other)))
        reads, writes = (dialers, listeners) if self._listener else (listeners, dialers)
        self._reader, self._writer = Reader(reads), Writer(writes)

    def _receive_of_tls(self, *, first: bool = False) -> None:
        """Receive a record of TLS, and nothing of what follows it."""
        head = bytearray(_TLS_HEADER_BYTES)
        self._stream.recv_into(memoryview(head))
        if first and head[0] not in (_HANDSHAKE, _ALERT):
            how = "came without TLS: give it --tls" if self._listener else "speaks no TLS, and this member does"
            raise self._refusal(f"{self.peer} {how}")
        if (size := int.from_bytes(head[3:])) > _TLS_LONGEST:
            raise self._refusal(f"TLS with {self.peer} has failed: a record of {size} bytes")
        body = bytearray(size)
        self._stream.recv_into(memoryview(body))
        self._incoming.write(head + body)

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self._stream.send(data)

    def _proved(self, loaded: LoadedFiles) -> Secured:
        """What the handshake has proved.

        Python has no exporter for TLS 1.3 (RFC 9266). So the binding digests both certificates (as the
        tls-server-end-point of RFC 5929 does one) and the dialer's Finished message: that is a MAC of the whole
        handshake under a key of this connection, so it differs also where certificates are the same.
        """
        if self._tls.selected_alpn_protocol() != ALPN:
            raise self._refusal(f"{self.peer} speaks another version of Rallypoint's TLS: give all members one version")
        other = self._tls.getpeercert(binary_form=True)
        finished = self._tls.get_channel_binding("tls-unique")
        assert other
        assert finished
        self.certificate = other
        parts = [other, loaded.certificate] if not self._listener else [loaded.certificate, other]
        digests = [hashlib.sha256(part).digest() for part in (*parts, finished)]
        role = role_of(x509.load_der_x509_certificate(other))
        return Secured(role, hashlib.sha256(_LABEL + b"".join(digests)).digest())

    def _refusal(self, sentence: str) -> AccessDenied | UnprovenPeer:
        return AccessDenied(sentence) if self._listener else UnprovenPeer(sentence)

    def _said(self, error: ssl.SSLError) -> str:
        """Why the handshake has failed, as a sentence."""
        if isinstance(error, ssl.SSLCertVerificationError):
            why = {
                _EXPIRED: f"has expired: {_RENEW}",
                _NOT_YET: "is not valid yet: is a clock wrong?",
            }.get(error.verify_code, f"is not one of this job's CA ({error.verify_message})")
            return f"the certificate of {self.peer} {why}"
        alert = error.reason or ""
        if "_ALERT_" in alert and (why := next((said for name, said in _ALERTS.items() if alert.endswith(name)), "")):
            return f"{self.peer} does not accept this member's certificate: {why}; {_RENEW}"
        if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return f"{self.peer} has no certificate, and this job needs one: give it --tls"
        return f"TLS with {self.peer} has failed: {words_of(error)}"

    # ---- its end ----

    def upgrade(self, sending: bytes, receiving: bytes) -> None:
        """Does nothing: it offers nothing."""

    def close(self) -> None:
        self._closed = True
        self._stream.close()


def _pieces(head: bytes, payload: memoryview | None) -> Iterator[list[memoryview]]:
    """The data of the records that are made at once: a short head with the payload's first piece, then one by one."""
    pieces = [memoryview(head)[at : at + LONGEST] for at in range(0, len(head), LONGEST)]
    if payload is not None:
        pieces += [payload[at : at + LONGEST] for at in range(0, len(payload), LONGEST)]
    together = 2 if len(head) <= _SHORT else 1
    if pieces:
        yield pieces[:together]
    for piece in pieces[together:]:
        yield [piece]


# ---- TLS 1.3 over TCP, as a transport ----


class TlsListener:
    """A Listener whose connections have TLS. It shakes no hands itself, so nobody can keep it from accepting others."""

    def __init__(self, listener: TcpListener, files: TlsFiles) -> None:
        self._listener, self._files, self.address = listener, files, listener.address

    def accept(self) -> TlsConnection:
        return TlsConnection(self._listener.accept(), self._files, listener=True)

    def close(self) -> None:
        self._listener.close()


class TlsTransport:
    """TLS between ``host:port`` addresses. Each connection uses the files as they are when it is made.

    Host names are not checked: members' addresses come from the coordinator. What counts is that a certificate is of
    the job's CA and names the role of the member that is meant, and this member's ticket.
    """

    secure = True

    def __init__(self, files: TlsFiles) -> None:
        # Loopback's segments have up to 64 KiB: one that does not fit into the window waits for 0.2 s. After TLS's
        # handshake the system makes them larger than the least window (`limit_in_flight`).
        self._files, self._tcp = files, TcpTransport(segment_bytes=LEAST_IN_FLIGHT)
        self.traffic = self._tcp.traffic  # the bytes of its connections, as they are on the wire

    def listen(self, address: str) -> TlsListener:
        return TlsListener(self._tcp.listen(address), self._files)

    def connect(self, address: str, timeout: float) -> TlsConnection:
        return TlsConnection(self._tcp.connect(address, timeout), self._files, listener=False)

    def private(self, address: str) -> bool:
        return self._tcp.private(address)
