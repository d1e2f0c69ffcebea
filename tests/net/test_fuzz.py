"""Ten thousand bad frames thrown at a running job change not one byte of what it learns (I9)."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
import torch

from rallypoint.coordinator.service import CoordinatorService
from rallypoint.core import protocol as messages
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.optimizer import AdamW
from rallypoint.core.protocol import encode
from rallypoint.core.view import ViewNumber
from rallypoint.errors import AccessDenied, LinkError
from rallypoint.net.channel import SEALED_BYTES, Opener, Sealer
from rallypoint.net.frames import HEADER_BYTES, PROTOCOL, SKIP, Header, Kind, pack, unpack
from rallypoint.net.handshake import COORDINATOR, LinkKeys, introduce, ticket_for
from rallypoint.net.tcp import TcpConnection, TcpTransport
from rallypoint.server.service import ServerService
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash

TOKEN = "a token that nobody guesses"
FRAMES = 10_000
STEPS = 25
REPLICAS = 2
FIRST_STEPS = 3  # the fuzz begins after these, so there are old steps to repeat
SERVERS = ("server0", "server1")
PATIENCE_S = 20.0


@dataclass
class Cluster:
    """A job of one worker, on threads and TCP, whose worker takes a step each time it may."""

    may_step: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(FIRST_STEPS))
    stepped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    weights: str = ""
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.coordinator = CoordinatorService(
            terms=Terms(servers=len(SERVERS), heartbeat=10 * PATIENCE_S), token=TOKEN
        )
        self.coordinator.start()
        self.servers = [ServerService(id=id, coordinator=self.coordinator.address, token=TOKEN) for id in SERVERS]
        for server in self.servers:
            server.start()
        self.worker = threading.Thread(target=self._work, name="the worker")
        self.worker.start()
        for _ in range(FIRST_STEPS + 1):  # it stands before the step that it may not take
            assert self.stepped.acquire(timeout=PATIENCE_S)

    @property
    def ports(self) -> dict[str, str]:
        """Who listens where."""
        return {
            "coordinator": self.coordinator.address,
            **{server.id: server._gate.address for server in self.servers},
        }

    def close(self) -> None:
        """End the job, finished or not."""
        self.coordinator.abort("the test is over")
        self.may_step.release(STEPS)
        self.worker.join(PATIENCE_S)
        for server in self.servers:
            server.close()
        self.coordinator.close()

    def finish(self) -> str:
        """Let the worker run to its end: the weights' hash."""
        self.may_step.release(STEPS)
        self.worker.join(PATIENCE_S)
        assert not self.worker.is_alive(), "the job hangs"
        if self.error is not None:
            raise self.error
        return self.weights

    def _work(self) -> None:
        try:
            with Job(id="worker0", coordinator=self.coordinator.address, token=TOKEN) as job:
                torch.manual_seed(1)
                model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
                data = [(torch.randn(16), torch.randn(4)) for _ in range(40)]
                run = job.train(
                    model, data, replicas=REPLICAS, batch=4, steps=STEPS, optimizer=AdamW(lr=1e-2), clip=0.5,
                    **{"network.shard_bytes": 512},
                )  # fmt: skip
                for micro in run:
                    if micro.replica == 0:
                        self.stepped.release()
                        assert self.may_step.acquire(timeout=10 * PATIENCE_S)
                    with micro:
                        x, y = micro.batch
                        micro.backward(torch.nn.functional.mse_loss(model(x), y))
            self.weights = weights_hash(model)
        except BaseException as error:
            self.error = error


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.close()


class Fuzzer:
    """Throws frames at a running job's ports; every connection ends with a frame for which it must be closed."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.rng, self.damage = random.Random(seed), random.Random(seed + 1)
        self.keys: LinkKeys | None = None  # of the connection, once it is greeted
        self.ports = cluster.ports
        self.listening = {server.id: server._gate for server in cluster.servers}
        self.transport = TcpTransport()
        reducer, view = cluster.servers[0]._reducer, cluster.servers[0]._views.view
        assert reducer is not None
        assert view is not None
        record, self.view = reducer.job.record, view
        self.layout = record.layout
        other = build_layout([TensorSpec("another", (99,), "float32", 0)], shard_bytes=512)
        self.another_model = msgspec.structs.replace(record, layout=other)
        self.thrown = 0
        self.connections = 0

    def connection(self) -> None:
        """One more connection, with all its frames."""
        self.connections += 1
        self.keys = None
        who = self.rng.choice([*self.ports])
        connection = self.transport.connect(self.ports[who], PATIENCE_S)
        try:
            connection.set_timeout(PATIENCE_S)
            if self.rng.random() < 0.35:
                self._before_the_handshake(connection)
            elif who == "coordinator":
                self._at_the_coordinator(connection)
            elif self.rng.random() < 0.5:
                self._at_a_server_as_a_server(connection, who)
            else:
                self._at_a_server_as_a_worker(connection, who)
            self._must_be_closed(connection)
        finally:
            connection.close()

    # ---- roles ----

    def _before_the_handshake(self, connection: TcpConnection) -> None:
        frames: list[Callable[[], bytes]] = [
            self._noise, self._truncated, self._oversized, self._impossible, self._refused_greeting,
            lambda: self._frame(self._kind(without={Kind.HELLO})),
            lambda: self._frame(Kind.HELLO, self.rng.randbytes(self.rng.randrange(200))),
        ]  # fmt: skip
        self._throw(connection, self.rng.choice(frames)(), last=True)

    def _at_the_coordinator(self, connection: TcpConnection) -> None:
        role = self.rng.choice(["worker", "server", "observer", "king"])
        id = self.rng.choice(["worker0", "server0", f"stranger{self.connections}"])
        if not self._enter(connection, "", role, id):
            return
        if role == "observer":
            self._throw(connection, self._frame(self._kind()), last=True)
            return
        if role == "worker":  # refused for that, and not listened to from then on
            self._throw(connection, self._frame(Kind.CONTROL, encode(messages.Propose(self.another_model))))
        for _ in range(self.rng.randrange(4)):
            message = self._stale_message() if role == "worker" else self._pointless_message()
            self._throw(connection, self._frame(Kind.CONTROL, encode(message)))
        self._throw(connection, self._bad_control(), last=True)

    def _at_a_server_as_a_worker(self, connection: TcpConnection, who: str) -> None:
        id = self.rng.choice(["worker0", f"stranger{self.connections}"])
        if not self._enter(connection, who, "worker", id):
            return
        for _ in range(self.rng.randrange(40)):
            self._throw(connection, self._harmless(who))
        bad: list[Callable[[], bytes]] = [
            self._noise, self._truncated, self._oversized, self._impossible,
            lambda: self._frame(self._kind(without={Kind.PUSH, Kind.INITIAL, Kind.FOLLOW, Kind.UNFOLLOW, Kind.FETCH})),
            lambda: self._bad_contribution(who, stranger=id != "worker0"), lambda: self._wish(who),
        ]  # fmt: skip
        self._throw(connection, self.rng.choice(bad)(), last=True)

    def _at_a_server_as_a_server(self, connection: TcpConnection, who: str) -> None:
        peer = next(server for server in SERVERS if server != who)
        id = self.rng.choice([peer, f"stranger{self.connections}"])
        if not self._enter(connection, who, "server", id):
            return
        for _ in range(self.rng.randrange(20)):
            self._throw(connection, self._old_measures(peer))
            self._throw(connection, self._replica_of_nobody(peer))
        bad: list[Callable[[], bytes]] = [
            self._noise, self._truncated, self._oversized, self._impossible,
            self._unknown_measures, lambda: self._bad_replica(who),
            lambda: self._frame(self._kind(without={Kind.MEASURES, Kind.REPLICATE, Kind.STATE})),
            lambda: self._frame(
                self.rng.choice([Kind.MEASURES, Kind.STATE]), b"\xc1" + self.rng.randbytes(self.rng.randrange(60))
            ),
        ]  # fmt: skip
        self._throw(connection, self.rng.choice(bad)(), last=True)

    # ---- frames that a role may send, and that change nothing ----

    def _harmless(self, who: str) -> bytes:
        kind = self.rng.choice([Kind.FETCH, Kind.FOLLOW, Kind.UNFOLLOW, Kind.PUSH, Kind.INITIAL])
        if kind in (Kind.FETCH, Kind.FOLLOW, Kind.UNFOLLOW):
            shard, step = self.rng.randrange(2 * len(self.layout.shards)), self.rng.randrange(9)
            return pack(Header(kind, self.view.number, shard=shard, step=step))
        shard = self.layout.shards[self.rng.randrange(len(self.layout.shards))]  # whether it is held here or not
        header = Header(
            kind, self.view.number, shard=shard.index, replica=self.rng.randrange(REPLICAS if shard.group >= 0 else 1),
            step=self.rng.randrange(FIRST_STEPS), weight=self.rng.random() + 0.01, length=shard.nbytes,
        )  # fmt: skip
        return pack(header) + self.rng.randbytes(shard.nbytes)

    def _old_measures(self, peer: str) -> bytes:
        shards = self.rng.sample(self.view.shards_of(peer), k=min(2, len(self.view.shards_of(peer))))
        return self._measures([(shard, self.rng.random(), (0,)) for shard in shards], self.rng.randrange(FIRST_STEPS))

    def _replica_of_nobody(self, peer: str) -> bytes:
        """An update of a shard that the sender does own, for a server that is not its backup."""
        shard = self.layout.shards[self.rng.choice(self.view.shards_of(peer))]
        header = Header(
            Kind.REPLICATE, self.view.number, shard=shard.index, step=self.rng.randrange(STEPS), length=shard.nbytes,
            weight=1.0,
        )  # fmt: skip
        return pack(header) + self.rng.randbytes(shard.nbytes)

    def _unknown_measures(self) -> bytes:
        unknown = [(len(self.layout.shards) + self.rng.randrange(99), self.rng.random(), (1,)) for _ in range(3)]
        return self._measures(unknown, self.rng.randrange(STEPS))

    def _measures(self, measures: list[tuple[int, float, tuple[int, ...]]], step: int) -> bytes:
        data = msgspec.msgpack.encode(measures)
        return pack(Header(Kind.MEASURES, self.view.number, step=step, length=len(data))) + data

    # ---- frames for which a connection must be closed ----

    def _noise(self) -> bytes:
        return b"\0" + self.rng.randbytes(HEADER_BYTES - 1 + self.rng.randrange(100))

    def _truncated(self) -> bytes:
        whole = self._frame(Kind.PUSH, self.rng.randbytes(64))
        return whole[: self.rng.randrange(1, HEADER_BYTES)]

    def _oversized(self) -> bytes:
        return self._header(self._kind(), length=self.rng.randrange((456 << 20) + 1, 2**32))

    def _impossible(self) -> bytes:
        encoded = {Kind.PUSH, Kind.VERSION, Kind.CODEC_STATE}  # these may name a codec
        data = bytearray(self._frame(self._kind(without=encoded)))
        match self.rng.randrange(5):
            case 0:
                data[4] = self.rng.choice([0, 1, PROTOCOL - 1, PROTOCOL + 1, 255])  # protocol
            case 1:
                data[5] = self.rng.choice([0, 7, 15, 99, 255])  # kind
            case 2:
                data[6] |= 1 << self.rng.randrange(3, 8)  # flags
            case 3:
                data[7] = self.rng.randrange(1, 256)  # codec
            case _:
                data[32:40] = struct.pack("<d", self.rng.choice([float("nan"), float("inf"), float("-inf")]))
        return bytes(data)

    def _refused_greeting(self) -> bytes:
        hello = messages.Hello("worker", "worker0", "here", to=COORDINATOR, nonce=bytes(32))
        return self._frame(Kind.HELLO, encode(hello) + self.rng.randbytes(32))

    def _bad_control(self) -> bytes:
        if self.rng.random() < 0.5:
            return self._frame(self._kind(without={Kind.CONTROL}))
        return self._frame(Kind.CONTROL, b"\xc1" + self.rng.randbytes(self.rng.randrange(100)))

    def _bad_contribution(self, who: str, *, stranger: bool) -> bytes:
        shard, length, flags = self.rng.choice(self.view.shards_of(who)), 0, 0
        step, replica, weight = STEPS + 10, 0, 1.0  # a step that nobody has begun
        wants = 0
        match self.rng.randrange(8 if stranger else 7):
            case 0:
                shard = self.rng.choice([len(self.layout.shards), 2**32 - 1])
            case 1:
                length = self.rng.choice([-4, 1, 4, 1000])
            case 2:
                weight = -self.rng.random()
            case 3:
                replica, step = self.rng.randrange(REPLICAS, 2**32), 0
            case 4:
                step = self.rng.randrange(STEPS + 1, 2**32)
            case 5:
                flags = SKIP
            case 6:
                wants = self.rng.choice([1, 2, REPLICAS + 2, self.rng.randrange(1, 2**32)])
            case _:
                step, weight = self.rng.randrange(FIRST_STEPS, STEPS), 1e6
        nbytes = self.layout.shards[shard].nbytes + length if shard < len(self.layout.shards) else 64
        header = Header(
            Kind.PUSH, self.view.number, shard=shard, replica=replica, step=step, weight=weight, length=nbytes,
            flags=flags, wants=wants,
        )  # fmt: skip
        return pack(header) + self.rng.randbytes(nbytes)

    def _wish(self, who: str) -> bytes:
        """In an aligned job nobody asks, be the replica one of the job's or not."""
        kind, shard = self.rng.choice([Kind.WANT, Kind.WAIT]), self.rng.choice(self.view.shards_of(who))
        wish = self.rng.choice([0, 1, 2, REPLICAS + 1, self.rng.randrange(2**32)])
        return pack(Header(kind, self.view.number, shard=shard, base=self.rng.randrange(STEPS), wants=wish))

    def _bad_replica(self, who: str) -> bytes:
        """An update for a backup, too long, too short, or of a shard that there is not."""
        shard = self.layout.shards[self.rng.choice(self.view.shards_of(who))]
        index, length = self.rng.choice([(shard.index, 4), (shard.index, shard.nbytes + 4), (2**31, 64)])
        header = Header(Kind.REPLICATE, self.view.number, shard=index, step=FIRST_STEPS, length=length)
        return pack(header) + self.rng.randbytes(length)

    def _stale_message(self) -> messages.Message:
        """Something that would end or change the job, were it said by a member."""
        return self.rng.choice(
            [
                messages.Done(self.view.generation), messages.GiveUp("fuzz"), messages.Finished(),
                    messages.Aborted("fuzz"),
                messages.Report(self.rng.randrange(2**40), self.rng.randrange(3), 0.0, 1.0, 1,
                    generation=self.view.generation),
                messages.NewView(self.view), messages.Skipped(1, (0,)), messages.Leaving(),
            ]
        )  # fmt: skip

    def _pointless_message(self) -> messages.Message:
        """Something that a new server may say, and that is about nothing of its own."""
        shard = self.rng.randrange(2 * len(self.layout.shards))
        paired = self.view.paired.get(shard, self.view.number)
        return self.rng.choice(
            [
                messages.Done(self.view.generation), messages.Leaving(), messages.Beat(),
                    messages.CaughtUp({shard: paired}),
                messages.Stored("step-00000009-9", {"x.shards": 9}, {shard: ("x.shards", 0, 9, "00")}),
                messages.NotStored("step-00000009-9", "fuzz", 2**40),
                messages.Evaluated(3, ViewNumber(), {"fuzz": 1.0}),
                messages.Propose(self.another_model),
            ]
        )  # fmt: skip

    # ---- bytes ----

    def _kind(self, without: set[Kind] | None = None) -> Kind:
        return self.rng.choice(sorted(set(Kind) - (without or set())))

    def _frame(self, kind: Kind, payload: bytes = b"") -> bytes:
        return self._header(kind, length=len(payload)) + payload

    def _header(self, kind: Kind, **fields: int) -> bytes:
        random_fields = {"shard": self.rng.randrange(2**32), "replica": self.rng.randrange(2**32)}
        view = ViewNumber(self.rng.randrange(2**32), self.rng.randrange(2**32))
        return pack(Header(kind, view, weight=self.rng.uniform(-9, 9), **{**random_fields, **fields}))

    def _enter(self, connection: TcpConnection, server: str, role: str, id: str) -> bool:
        """Come to a server with the ticket that a member of this name has; to the coordinator ("") as somebody new."""
        hello, known = messages.Hello(role, id, "nowhere", to=COORDINATOR), b""
        if server:
            me = self.listening[server].me
            members = self.view.servers if role == "server" else self.view.workers
            incarnation = next((member.incarnation for member in members if member.id == id), 7)
            to = ("server", server, me.incarnation)
            hello = messages.Hello(role, id, "nowhere", incarnation=incarnation, to=to)
            known = ticket_for(me.secret, role, id, incarnation)
        try:
            _, keys = introduce(connection, hello, TOKEN, known)
        except (AccessDenied, LinkError):  # a member may be refused here: taken id, unknown role, the job is full
            self.thrown += 1
            return False
        connection.set_timeout(PATIENCE_S)
        self.keys, self.sealer = keys, Sealer(keys)
        return True

    def _throw(self, connection: TcpConnection, data: bytes, *, last: bool = False) -> None:
        self.thrown += 1
        with contextlib.suppress(LinkError):  # closed already, for the frame before
            connection.send(self._sealed(data, last=last))
            if last and len(data) < HEADER_BYTES:
                with contextlib.suppress(OSError):
                    connection._socket.shutdown(socket.SHUT_WR)  # so that a truncated frame is seen as one

    def _sealed(self, data: bytes, *, last: bool) -> bytes:
        """The frame as somebody sends it who knows the token; now and then the last one is damaged on its way."""
        if self.keys is None or len(data) < HEADER_BYTES:
            return data
        head, payload = data[:HEADER_BYTES], memoryview(data[HEADER_BYTES:])
        macs, tag = self.sealer._macs, self.sealer._tags.copy()
        number, self.sealer._count = self.sealer._count, self.sealer._count + 1
        head += macs.encrypt(number.to_bytes(12, "little"), b"", payload) if macs and payload else bytes(16)
        tag.update(number.to_bytes(8, "little") + head)
        whole = bytearray(head + tag.digest() + payload)
        if last and self.damage.random() < 0.2:
            whole[self.damage.randrange(SEALED_BYTES)] ^= 1 << self.damage.randrange(8)
        return bytes(whole)

    def _must_be_closed(self, connection: TcpConnection) -> None:
        """Read until the other side has closed; whatever it says before is made of frames."""
        raw, stream = connection._socket, bytearray()
        try:
            while chunk := raw.recv(1 << 16):
                stream += chunk
        except TimeoutError:
            pytest.fail("a connection with a bad frame was not closed")
        except ConnectionError:
            return  # closed, with our bytes unread
        opener = None if self.keys is None else Opener(self.keys, "it")
        head = HEADER_BYTES if opener is None else SEALED_BYTES
        while len(stream) >= head:
            start = memoryview(bytes(stream[:head]))
            header = unpack(start) if opener is None else opener.open(start)
            assert header.kind in (Kind.CHALLENGE, Kind.REFUSE, Kind.CREDIT, Kind.VERSION, Kind.CONTROL, Kind.WELCOME)
            del stream[: head + header.length]


def test_ten_thousand_bad_frames_change_no_byte(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")  # a line for each, otherwise
    with running() as cluster:
        undisturbed = cluster.finish()
    with running() as cluster:
        fuzzer = Fuzzer(cluster, seed=20260131)
        steps_left = STEPS - FIRST_STEPS - 1
        while fuzzer.thrown < FRAMES:
            fuzzer.connection()
            if (STEPS - FIRST_STEPS - 1) - fuzzer.thrown * (STEPS - FIRST_STEPS) // FRAMES < steps_left:
                steps_left -= 1
                cluster.may_step.release()  # the job goes on in the middle of it
        assert cluster.finish() == undisturbed
        assert cluster.coordinator.wait() is None
