"""A connection with TLS over one of TCP. OpenSSL works on memory; the socket stays `TcpConnection`'s.

One thread sends while another receives, and an OpenSSL connection is not for two threads. So one lock is held while
OpenSSL works, and only then: nobody is blocked in the socket meanwhile.

    send      lock: encrypt a piece        no lock: the socket takes it
    receive   no lock: the socket gives    lock: decrypt, one record at a time

Only the sending thread, or the one that shakes hands, writes to the socket: so records leave in the order in which they
were made. There is no `close_notify`: a process that is killed says none, so nobody may rely on it.
"""

from __future__ import annotations

import hashlib
import ssl
import threading
from collections.abc import Iterator
from typing import cast

from rallypoint.errors import AccessDenied, CorruptFrame, LinkClosed, LinkError, UnprovenPeer
from rallypoint.net.frames import Header, Kind, pack
from rallypoint.net.tcp import TcpConnection
from rallypoint.net.tls.files import Loaded, TlsFiles, role_of
from rallypoint.net.tls.records import Records
from rallypoint.net.transport import Secured

_PIECE = 128 << 10  # bytes that are encrypted at once: what a payload needs of spare memory
_ROOM = 256 << 10  # bytes that are received at once; with less, a receiver wakes up more often
_GREETING_ROOM = 4 << 10  # less for a peer that has not proved anything
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
_RENEW = "`rallypoint certs FOLDER` renews it"


class TlsConnection:
    """A Connection with TLS 1.3 over `stream`. Both sides must show a certificate of the job's CA.

    The sides shake hands when the connection is first used, in the thread that uses it and within its deadline. If that
    fails, the dialer gets an UnprovenPeer and the listener an AccessDenied, with a sentence. The connection is closed.
    """

    def __init__(self, stream: TcpConnection, files: TlsFiles, *, listener: bool) -> None:
        self._stream, self._files, self._listener = stream, files, listener
        self._shaking = threading.Lock()
        self._secured: Secured | None = None  # set last: then both threads may use the rest
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject  # from the handshake on
        self._lock = threading.Lock()  # of OpenSSL's part
        self._records = Records()
        self._room = memoryview(bytearray(_GREETING_ROOM))
        self._closed = False

    @property
    def peer(self) -> str:
        return self._stream.peer

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
            with self._lock:
                try:
                    for piece in pieces:
                        self._tls.write(piece)
                except ssl.SSLError as error:
                    raise self._broken(error) from None
                data = self._outgoing.read()
            self._stream.send(data)

    def recv_into(self, view: memoryview) -> None:
        self._ensure_secured()
        while len(view):
            if self._closed:
                raise LinkError(f"the link to {self.peer} is closed")
            if got := self._decrypted(view):
                view = view[got:]
            else:
                self._receive(self._records.to_come(len(view)))

    def _decrypted(self, view: memoryview) -> int:
        """Fill the view from the next record. Returns how many bytes; 0 if no whole record is here."""
        try:
            with self._lock:
                got = cast(int, self._tls.read(len(view), view))
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise self._broken(error) from None
        if not got:
            raise LinkClosed(f"{self.peer} closed the link")
        return got

    def _receive(self, count: int) -> None:
        """Receive so many bytes for OpenSSL, or fewer."""
        if len(self._room) < min(count, _ROOM):
            self._room = memoryview(bytearray(_ROOM))
        room = self._room[:count]
        got = self._stream.recv_some(room, whole=True)
        self._came(room[:got])

    def _came(self, data: memoryview) -> None:
        self._records.came(data)
        with self._lock:
            self._incoming.write(data)

    def _broken(self, error: ssl.SSLError) -> LinkError:
        """What a failure of OpenSSL after the handshake means."""
        reason = error.reason or ""
        if "_ALERT_" in reason and (why := _alert(reason)):  # the listener checks ours when we believe to be done
            return UnprovenPeer(f"{self.peer} does not accept this member's certificate: {why}; {_RENEW}")
        return CorruptFrame(f"the link to {self.peer} is ended: bytes were changed on the way ({_words(error)})")

    # ---- the handshake ----

    def _shake_hands(self) -> Secured:
        loaded = self._files.loaded()
        context = loaded.listening if self._listener else loaded.dialing
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=self._listener)
        try:
            self._talk()
            return self._proved(loaded)
        except ssl.SSLError as error:
            self._stream.send_at_once(self._outgoing.read())  # an alert, which says why
            raise self._refusal(self._said(error)) from None
        except ValueError as error:
            raise self._refusal(f"the certificate of {self.peer} names no role: {error}") from None

    def _talk(self) -> None:
        """Shake hands. SSLError if that fails, LinkError if the stream ends."""
        if self._listener and not self._stream.has_input(_FIRST_WORD_S):
            self._stream.send_at_once(pack(Header(Kind.REFUSE)))
            raise AccessDenied(f"{self.peer} has said nothing for {_FIRST_WORD_S:.0f} s: it may have come without TLS")
        first = True
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
            else:
                self._flush()
                return
            got = self._stream.recv_some(self._room)
            if first and self._room[0] not in (_HANDSHAKE, _ALERT):
                how = "came without TLS: give it --tls" if self._listener else "speaks no TLS, and this member does"
                raise self._refusal(f"{self.peer} {how}")
            first = False
            self._came(self._room[:got])

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self._stream.send(data)

    def _proved(self, loaded: Loaded) -> Secured:
        """What the handshake has proved.

        Python has no exporter for TLS 1.3 (RFC 9266). So the binding digests both certificates (as the
        tls-server-end-point of RFC 5929 does one) and the dialer's Finished message: that is a MAC of the whole
        handshake under a key of this connection, so it differs also where certificates are the same.
        """
        other = self._tls.getpeercert(binary_form=True)
        finished = self._tls.get_channel_binding("tls-unique")
        assert other
        assert finished
        parts = [other, loaded.certificate] if not self._listener else [loaded.certificate, other]
        digests = [hashlib.sha256(part).digest() for part in (*parts, finished)]
        return Secured(role_of(self._tls.getpeercert()), hashlib.sha256(_LABEL + b"".join(digests)).digest())

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
        if "_ALERT_" in (error.reason or "") and (why := _alert(error.reason)):
            return f"{self.peer} does not accept this member's certificate: {why}; {_RENEW}"
        if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return f"{self.peer} has no certificate, and this job needs one: give it --tls"
        return f"TLS with {self.peer} has failed: {_words(error)}"

    # ---- as of TCP ----

    def set_timeout(self, seconds: float | None) -> None:
        self._stream.set_timeout(seconds)

    def set_deadline(self, seconds: float | None) -> None:
        self._stream.set_deadline(seconds)

    def limit_in_flight(self, nbytes: int) -> None:
        self._stream.limit_in_flight(nbytes)

    def finish(self) -> None:
        self._stream.finish()

    def close(self) -> None:
        self._closed = True
        self._stream.close()


def _pieces(head: bytes, payload: memoryview | None) -> Iterator[list[bytes | memoryview]]:
    """What is encrypted at once: the head with the payload's first piece, then a piece at a time."""
    if payload is None or not len(payload):
        if head:
            yield [head]
        return
    yield [head, payload[:_PIECE]] if head else [payload[:_PIECE]]
    for start in range(_PIECE, len(payload), _PIECE):
        yield [payload[start : start + _PIECE]]


def _alert(reason: str | None) -> str:
    """What an alert says of our certificate; "" if it is about something else."""
    return next((said for name, said in _ALERTS.items() if (reason or "").endswith(name)), "")


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
