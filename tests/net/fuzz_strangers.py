"""Attackers who have no part in a job: before they have proved anything, and as members that it does not need."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable

import msgspec
from fuzz_frames import Corpus, Frame, Mutator
from fuzz_jobs import TOKEN, Cluster

from rallypoint.core import protocol as messages
from rallypoint.core.view import Member
from rallypoint.errors import AccessDenied, LinkError, RallypointError
from rallypoint.net import handshake
from rallypoint.net.certificates import TlsFiles
from rallypoint.net.channel import Channel, Sealer
from rallypoint.net.frames import Header, Kind, pack
from rallypoint.net.handshake import COORDINATOR, PROOF_BYTES, _Transcript, introduce, role_token, ticket_for
from rallypoint.net.tcp import TcpConnection, split_address
from rallypoint.net.tls import TlsConnection
from rallypoint.net.transport import Connection, InprocConnection, _Pipe

FROM_WORKERS = (Kind.PUSH, Kind.INITIAL, Kind.STATE, Kind.FOLLOW, Kind.UNFOLLOW, Kind.FETCH, Kind.WANT, Kind.PULL_ROWS,
                Kind.CODEC_STATE, Kind.RECALL, Kind.PULL_WORDS)  # fmt: skip
FROM_SERVERS = (Kind.REPLICATE, Kind.MEASURES, Kind.CHOICE, Kind.PROVE, Kind.STATE, Kind.ACK)
ENDS_THE_JOB = ("GiveUp", "Leaving", "Release")  # a member that is believed may say so
PATIENCE_S = 20.0
_BURST = 60  # frames over one connection, at most
_SHORTLY_S = 0.1  # for an answer to a piece that was changed: the listener may wait for the rest of it


class Stranger:
    """Throws mutated frames at the listeners of a running job. `corpus` has real frames of such a job.

    `thrown` counts them. After each burst the connection's other side must close it: LinkError of a time-out if not.
    """

    def __init__(self, cluster: Cluster, corpus: Corpus, seed: int) -> None:
        self.cluster, self.corpus = cluster, corpus
        self.rng = random.Random(seed)
        self.mutator = Mutator(self.rng, corpus)
        roles = ("worker", "server", "observer")
        self.transports = {role: cluster.transport_of(role) for role in roles}
        self.thrown = 0
        self.connections = 0
        self.standby: Member | None = None  # this attacker as a member that stands by
        self._membership: Channel | None = None

    def join(self) -> None:
        """Become a member of the job, honestly: it has no use for one more worker, so this one stands by."""
        connection = self._connect(None)
        hello = messages.Hello("worker", "standby", "here", to=COORDINATOR, near=self.cluster.near)
        _, keys = introduce(connection, hello, TOKEN)
        channel = self._membership = Channel(connection, "the coordinator", keys)
        proposal = messages.decode(self.corpus.frames("Propose")[0].payload)
        channel.send_message(proposal)
        while self.standby is None:
            message = messages.decode(channel.receive_bytes(channel.receive_header()))
            if isinstance(message, messages.NewView):
                self.standby = next((one for one in message.view.workers if one.id == "standby"), None)
        for views in (listener._views for listener in self.cluster.listeners):
            with views._changed:  # not `wait_for`, which gives up as soon as for a mutated frame's view
                has_come = lambda views=views: views._fence.has_come(message.view.number)  # noqa: E731
                assert views._changed.wait_for(has_come, PATIENCE_S), "a listener does not hear of the stranger"

    def close(self) -> None:
        """End the membership, if there is one."""
        if self._membership is not None:
            self._membership.close()

    # ---- before the proof ----

    def greet_badly(self, server: int | None) -> None:
        """One connection with a mutated greeting: to a server or an aggregator, or (None) to the coordinator."""
        if self.cluster.certificates is not None and self.rng.random() < 0.5:
            self._shake_badly(server)
            return
        hello = self._hello(server)
        connection = self._connect(server, hello.role)
        try:
            self._greet_badly(connection, hello)
        except RallypointError:  # it has closed already, or sent a refusal
            pass
        finally:
            self._must_close(connection)

    def _shake_badly(self, server: int | None) -> None:
        """One connection with TLS on which one piece is changed: of the handshake, or a record after it."""
        self.thrown += 1
        self.connections += 1
        host, port = split_address(self._address(server))
        stream = _Changing(socket.create_connection((host, port), PATIENCE_S), "a listener", self.rng)
        stream.set_timeout(_SHORTLY_S)
        assert self.cluster.certificates is not None
        connection = TlsConnection(stream, TlsFiles(self.cluster.certificates, "worker"), listener=False)
        try:
            with contextlib.suppress(RallypointError):
                connection.send(self.rng.randbytes(self.rng.randrange(1, 400)))
                connection.recv_into(memoryview(bytearray(1 << 16)))
        finally:
            self._must_close(connection)

    def _greet_badly(self, connection: Connection, hello: messages.Hello) -> None:
        rng = self.rng
        keys = handshake.token_keys(role_token(TOKEN, hello.role))
        transcript = _Transcript(connection, keys)
        transcript.receive(transcript.receive_header(), proof=False)
        data = messages.encode(hello)
        match rng.randrange(4):
            case 0:  # something else, with a right proof behind it
                self.thrown += 1
                said = self.mutator._changed(msgspec.msgpack.decode(data))
                transcript.send(Kind.HELLO, said, keys.dialer)
            case 1:  # any real frame, sealed or not
                self._send(connection, self.mutator.mutate(self.corpus.choose(rng)))
            case _:  # its own greeting, changed behind the proof
                frame = Frame(Header(Kind.HELLO, length=len(data) + PROOF_BYTES), data + rng.randbytes(PROOF_BYTES))
                self._send(connection, rng.choice([self.mutator.mutate, self.mutator.lie])(frame))

    def _send(self, connection: Connection, frame: Frame) -> None:
        self.thrown += 1
        data = bytearray(pack(frame.header) + frame.payload)
        if self.rng.random() < 0.3:
            data[self.rng.randrange(48)] = self.rng.randrange(256)
        if self.rng.random() < 0.2:
            del data[self.rng.randrange(len(data)) :]
        connection.send(bytes(data))

    def _hello(self, server: int | None) -> messages.Hello:
        nonce = self.rng.randbytes(32)
        if server is None:
            role = self.rng.choice(["worker", "server", "observer"])
            return messages.Hello(role, f"stranger{self.connections}", "nowhere", to=COORDINATOR, nonce=nonce)
        me = self.cluster.listeners[server]._gate.me
        return messages.Hello("worker", "worker0", "nowhere", to=(me.role, me.id, me.incarnation), nonce=nonce)

    # ---- after the proof ----

    def at_the_coordinator(self) -> None:
        """Join as somebody new whose model is not the job's, or as an observer; then say what members say."""
        role = self.rng.choice(["worker", "worker", "worker", "observer"])
        connection = self._connect(None, role)
        try:
            hello = messages.Hello(role, f"stranger{self.connections}", "nowhere", to=COORDINATOR)
            _, keys = introduce(connection, hello, TOKEN)
            sealer = Sealer(keys, macs=not connection.secured.binding)
            names = [name for name in self.corpus.kinds if isinstance(name, str) and name not in ENDS_THE_JOB]
            for _ in range(self.rng.randrange(1, _BURST)):
                self._throw(connection, sealer, self.mutator.mutate(self.corpus.choose(self.rng, names)))
        except RallypointError:
            pass
        finally:
            self._must_close(connection)

    def at_a_server(self, server: int, member: Member, role: str) -> None:
        """Come with a member's ticket, and send what its role sends."""
        connection = self._connect(server, role)
        try:
            sealer = Sealer(self._enter(connection, server, member, role), macs=not connection.secured.binding)
            kinds = [kind for kind in self.corpus.kinds if kind in (FROM_WORKERS if role == "worker" else FROM_SERVERS)]
            kinds = kinds or self.corpus.kinds  # servers of this job have nothing to say to each other
            gently = self.rng.random() < 0.8
            for _ in range(self.rng.randrange(1, _BURST)):
                model = self.corpus.choose(self.rng, kinds)
                self._throw(connection, sealer, self.mutator.mutate(model, gently=gently and self.rng.random() < 0.97))
        except (AccessDenied, LinkError):
            pass
        finally:
            self._must_close(connection)

    def _enter(self, connection: Connection, server: int, member: Member, role: str) -> handshake.LinkKeys:
        me, view = self.cluster.listeners[server]._gate.me, self.cluster.listeners[server]._views.number
        hello = messages.Hello(
            role, member.id, "nowhere", incarnation=member.incarnation, view=view,
            to=(me.role, me.id, me.incarnation),
        )  # fmt: skip
        return introduce(connection, hello, ticket=ticket_for(me.secret, role, member.id, member.incarnation))[1]

    def _throw(self, connection: Connection, sealer: Sealer, frame: Frame) -> None:
        if not self._is_harmless(frame.header):
            return
        self.thrown += 1
        payload = memoryview(frame.payload)
        connection.send(sealer.seal(frame.header, payload), payload)

    def _is_harmless(self, header: Header) -> bool:
        """False for what the real server of this name may say, so that the job ends otherwise."""
        return header.kind is not Kind.MEASURES or header.step < 2

    # ---- connections ----

    def _connect(self, server: int | None, role: str = "worker") -> Connection:
        self.connections += 1
        self._discard()
        connection = self.transports[role].connect(self._address(server), PATIENCE_S)
        connection.set_timeout(PATIENCE_S)
        return connection

    def _discard(self) -> None:
        """Read what has come for this member: a link that nobody reads breaks, and its member is waited for."""
        if self._membership is not None:
            with contextlib.suppress(OSError):
                while _raw(self._membership.connection).recv(1 << 16, socket.MSG_DONTWAIT):
                    pass

    def _address(self, server: int | None) -> str:
        return self.cluster.coordinator.address if server is None else self.cluster.listeners[server].address

    def _must_close(self, connection: Connection) -> None:
        """We send no more; the other side has to close, whatever it has had."""
        raw = _raw(connection)
        if raw.fileno() < 0:
            return  # TLS's handshake has failed here, and has closed it
        try:
            with contextlib.suppress(OSError):
                raw.settimeout(PATIENCE_S)
                raw.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while raw.recv(1 << 16):
                    pass
        finally:
            connection.close()


def _raw(connection: Connection) -> socket.socket:
    stream = connection._stream if isinstance(connection, TlsConnection) else connection
    assert isinstance(stream, TcpConnection)
    return stream._socket


class _Changing(TcpConnection):
    """A stream of which one piece is changed on its way out: TLS's first words, its last, or a record after it."""

    def __init__(self, sock: socket.socket, peer: str, rng: random.Random) -> None:
        super().__init__(sock, peer)
        self.rng, self.left = rng, rng.randrange(3)

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        data = bytearray(head + bytes(payload or b""))
        if self.left == 0:
            self._change(data)
        self.left -= 1
        super().send(bytes(data))

    def _change(self, data: bytearray) -> None:
        rng, at = self.rng, self.rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                del data[at:]
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 600))
            case 2:
                data[3:5] = rng.randbytes(2)  # the length of TLS's record
            case 3:
                data[5:] = rng.randbytes(len(data))
            case _:
                for _ in range(rng.randrange(1, 9)):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


class _Answered(InprocConnection):
    """A dialer's connection to somebody who answers its greeting at once, on the same thread."""

    answer: Callable[[], None]

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        InprocConnection.send(self, head, payload)
        self.answer()


class Liar:
    """A listener with the token, or the dialer's ticket, whose side of the greeting is mutated."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.rng, self.corpus, self.thrown = random.Random(seed), corpus, 0
        self.mutator = Mutator(self.rng, corpus)

    def greet(self) -> None:
        """One greeting. Anything but a RallypointError in the dialer is a fault."""
        rng = self.rng
        to, ticket = rng.choice([(COORDINATOR, b""), (("server", "server0", 3), b"a ticket")])
        keys = handshake.token_keys("" if ticket else role_token(TOKEN, "worker"), ticket)
        there, here = _Pipe(), _Pipe()
        dialer, listener = _Answered(there, here, "a liar"), InprocConnection(here, there, "a dialer")
        transcript = _Transcript(listener, keys)

        def answer() -> None:
            transcript.receive(transcript.receive_header())
            message = rng.choice([messages.Welcome(), messages.Refused("no")])
            self._say(transcript, Kind.REFUSE if isinstance(message, messages.Refused) else Kind.WELCOME, message)
            listener.close()

        dialer.answer = answer
        with contextlib.suppress(RallypointError):
            self._say(transcript, Kind.CHALLENGE, messages.Challenge(rng.randbytes(32), *to), true=0.7)
            listener.set_timeout(0.0)
            dialer.set_timeout(0.0)
            introduce(dialer, messages.Hello("worker", "worker0", "nowhere", to=to), TOKEN, ticket)

    def _say(self, transcript: _Transcript, kind: Kind, message: messages.Message, *, true: float = 0.0) -> None:
        rng, key = self.rng, None if kind is Kind.CHALLENGE else transcript.keys.listener
        if rng.random() < true:
            transcript.send(kind, message, key)
            return
        self.thrown += 1
        data = messages.encode(message)
        if rng.random() < 0.6:  # something else, with a right proof behind it
            transcript.send(kind, self.mutator._changed(msgspec.msgpack.decode(data)), key)
            return
        data += b"" if key is None else bytes(PROOF_BYTES)
        frame = self.mutator.mutate(Frame(Header(kind, length=len(data)), data))
        transcript.connection.send(pack(frame.header), memoryview(frame.payload))
