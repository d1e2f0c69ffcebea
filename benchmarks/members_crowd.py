"""Members that are only sockets, for `members.py`: hundreds in one process and one thread, with a selector.

Each has a connection to the coordinator with the real greeting, and its frames are sealed and checked as a member's
are. What only a member's own processor would have to do is left out: the first member of a process makes views of what
comes, the others only look up which view it is.
"""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe

import msgspec

from rallypoint.core.protocol import Applied, Beat, Hello, Message, NewView, Propose, Report, ViewChange, decode, encode
from rallypoint.core.view import View, ViewNumber
from rallypoint.errors import RallypointError
from rallypoint.net.channel import SEALED_BYTES, Opener, Sealer
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import COORDINATOR, LinkKeys, introduce, role_token
from rallypoint.net.member import ViewReceiver
from rallypoint.net.tcp import TcpTransport
from scale_cluster import Size, named, record_for

TOKEN, PATIENCE_S = "a token of the benchmark's", 300.0
_PIECE = 1 << 20
_BETWEEN = 8  # so many members join before what came to the others is read


class Came(msgspec.Struct, frozen=True):
    """A member has read a view: its number, when (monotonic seconds), bytes of the message."""

    number: tuple[int, int]
    when: float
    nbytes: int


class Sizes(msgspec.Struct, frozen=True):
    """A process has made this view: so many members are in it."""

    number: tuple[int, int]
    members: int


class _Numbered(msgspec.Struct):
    number: ViewNumber


class _Rest(msgspec.Struct):
    rest: _Numbered


class _Glance(msgspec.Struct):
    """What tells views apart, of any message."""

    type: str
    view: _Numbered | None = None
    change: _Rest | None = None


_glance = msgspec.msgpack.Decoder(_Glance)


@dataclass(slots=True)
class Fake:
    """One member."""

    name: str
    socket: socket.socket
    sealer: Sealer
    opener: Opener
    head: Header | None = None
    data: bytearray = field(default_factory=bytearray)

    def send(self, *data: bytes) -> None:
        """Send these encoded messages."""
        frames = [self.sealer.seal(Header(Kind.CONTROL, length=len(one)), memoryview(one)) + one for one in data]
        self.socket.sendall(b"".join(frames))

    def messages(self, piece: memoryview) -> list[bytearray]:
        """The payloads that are whole with this piece of the stream."""
        self.data += piece
        found = list[bytearray]()
        while True:
            if self.head is None:
                if len(self.data) < SEALED_BYTES:
                    return found
                with memoryview(self.data) as whole:
                    self.head = self.opener.open(whole[:SEALED_BYTES])
                del self.data[:SEALED_BYTES]
            if len(self.data) < self.head.length:
                return found
            payload = self.data[: self.head.length]
            del self.data[: self.head.length]
            self.opener.verify(memoryview(payload))
            if self.head.kind is not Kind.CONTROL:
                raise RallypointError(f"{self.name}: the coordinator ends the connection: {bytes(payload)!r}")
            found.append(payload)
            self.head = None


@dataclass(slots=True)
class Crowd:
    """The members of one process. The first of them makes views."""

    address: str
    size: Size
    beat: float  # seconds between two heartbeats
    pipe: Pipe
    fakes: dict[str, Fake] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    whole: ViewReceiver = field(default_factory=ViewReceiver)
    view: View | None = None
    watching: str = ""
    due: float = 0.0  # the next heartbeats
    scratch: memoryview = field(default_factory=lambda: memoryview(bytearray(_PIECE)))

    def run(self) -> None:
        """Do what the pipe says until it says "over"."""
        self.selector.register(self.pipe, selectors.EVENT_READ)
        while True:
            self._beat()
            if self._read(self.due - time.monotonic()) and not self._obey(*self.pipe.recv()):
                return

    def _beat(self) -> None:
        if (now := time.monotonic()) >= self.due:
            self.due = now + self.beat
            for fake in self.fakes.values():
                fake.send(encode(Beat()))

    def _obey(self, order: str, told: tuple[str, ...] | int) -> bool:
        if order == "over":
            return False
        if isinstance(told, int):
            self._step(told)
        elif order == "join":
            self._join(told)
        elif order == "propose":
            proposal = encode(Propose(record_for(self.size)))
            for name, fake in self.fakes.items():
                if name.startswith("worker"):
                    fake.send(proposal)
        elif order == "kill":
            for name in told:
                fake = self.fakes.pop(name)
                self.selector.unregister(fake.socket)
                fake.socket.close()
        self.pipe.send(order)
        return True

    # ---- what members say ----

    def _join(self, names: tuple[str, ...]) -> None:
        self.watching = names[0]
        for number, name in enumerate(names):
            sock, keys = _entered(self.address, name)
            self.fakes[name] = fake = Fake(name, sock, Sealer(keys), Opener(keys, "the coordinator"))
            self.selector.register(sock, selectors.EVENT_READ, fake)
            if number % _BETWEEN == 0:
                self._read(0.0)
                self._beat()

    def _step(self, number: int) -> None:
        """Each worker reports its replicas of this step, each server has applied it."""
        assert self.view is not None
        generation = self.view.generation
        for worker, own in self.view.assigned(number).items():
            if (fake := self.fakes.get(worker)) is not None:
                fake.send(*(encode(Report(number, replica, 1.0, 1.0, 1, 0.5, generation)) for replica in own))
        for server in self.view.servers:
            if (fake := self.fakes.get(server.id)) is not None:
                fake.send(encode(Applied(number, self.size.workers, time.time(), {}, generation)))

    # ---- what they hear ----

    def _read(self, seconds: float) -> bool:
        """Wait for so long until something comes; read it. Returns True if there is an order."""
        ordered, told = False, list[Came | Sizes]()
        for key, _ in self.selector.select(max(0.0, seconds)):
            if key.data is None:
                ordered = True
                continue
            fake: Fake = key.data
            nbytes = fake.socket.recv_into(self.scratch, 0, socket.MSG_DONTWAIT)
            if not nbytes:
                raise RallypointError(f"{fake.name}: the coordinator closed the connection")
            for payload in fake.messages(self.scratch[:nbytes]):
                told += self._came(fake.name, payload)
        if told:
            self.pipe.send(told)
        return ordered

    def _came(self, name: str, payload: bytearray) -> list[Came | Sizes]:
        now, glance = time.monotonic(), _glance.decode(payload)
        of = glance.view or (glance.change.rest if glance.change is not None else None)
        if of is None:
            return []
        number = of.number.epoch, of.number.count
        told: list[Came | Sizes] = [Came(number, now, len(payload) + SEALED_BYTES)]
        if name == self.watching:
            self.view = self.whole.take(_view_in(decode(payload))).view
            told.append(Sizes(number, len(self.view.workers) + len(self.view.servers)))
        return told


def _view_in(message: Message) -> NewView | ViewChange:
    """The message, which brings a view: whole, or as a difference."""
    assert isinstance(message, NewView | ViewChange)
    return message


def _entered(address: str, name: str) -> tuple[socket.socket, LinkKeys]:
    """Connect a member, with the greeting."""
    role, _, number = name.partition("-")
    connection = TcpTransport().connect(address, PATIENCE_S)
    listening = "" if role == "worker" else f"127.0.0.1:{20000 + int(number)}"
    hello = Hello(role, name, f"host-{name}", listening, to=COORDINATOR, process=name.encode())
    _, keys = introduce(connection, hello, role_token(TOKEN, role))
    sock = connection._socket.dup()
    sock.settimeout(PATIENCE_S)
    connection._end()  # only its object: the duplicate keeps the stream
    return sock, keys


def crowd(pipe: Pipe, address: str, size: Size, beat: float) -> None:
    """A process of members: obeys orders that come through the pipe, and says what came."""
    try:
        Crowd(address, size, beat, pipe).run()
    except (RallypointError, OSError) as error:
        pipe.send(error)


def members_of(size: Size, processes: int) -> list[tuple[str, ...]]:
    """The names of all members, dealt to so many processes; the last workers are in the last ones."""
    names = [named("server", i) for i in range(size.servers)] + [named("worker", i) for i in range(size.workers)]
    return [tuple(names[first::processes]) for first in range(processes)]
