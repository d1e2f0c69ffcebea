"""Who knows the token but has no part in the job cannot change it: one test for each way that was found."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from rallypoint.config import resolve
from rallypoint.coordinator.service import CoordinatorService
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.errors import RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind, pack
from rallypoint.net.handshake import introduce
from rallypoint.net.inproc import InprocTransport
from rallypoint.net.messages import Done, GiveUp, Message, Prepared, Propose, Report, encode
from rallypoint.net.transport import Connection
from rallypoint.server.service import ServerService
from rallypoint.testing.contracts import receive

PATIENCE_S = 10.0
WORDS = 16


class Eager:
    """A connection that sends these messages in one breath with its greeting: they are there before a refusal."""

    def __init__(self, inner: Connection, messages: tuple[Message, ...]) -> None:
        self._inner, self._messages = inner, messages
        self.peer = inner.peer
        self.recv_into, self.set_timeout, self.close = inner.recv_into, inner.set_timeout, inner.close

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        data = bytearray(head + bytes(payload or b""))
        for message in map(encode, self._messages):
            data += pack(Header(Kind.CONTROL, length=len(message))) + message
        self._inner.send(bytes(data))


class Job:
    """A running job of one worker, whose part the test plays, and two servers."""

    def __init__(self) -> None:
        self.transport = InprocTransport()
        self.coordinator = CoordinatorService(workers=1, servers=2, bind="coordinator:0", transport=self.transport)
        self.coordinator.start()
        self.servers = [
            ServerService(id=id, coordinator=self.coordinator.address, bind="server:0", transport=self.transport)
            for id in ("server0", "server1")
        ]
        for server in self.servers:
            server.start()
        self.channels: list[Channel] = []
        layout = build_layout([TensorSpec("w", (4 * WORDS, 1), "float32", 0)], shard_bytes=4 * WORDS)
        config = resolve({"replicas": 2, "batch": 1, "steps": 9, "clip": 1.0, "shard_bytes": 4 * WORDS})
        self.record = JobRecord(msgspec.to_builtins(config), layout)
        self.member = self.enter(self.coordinator.address, "worker", "worker0")
        self.member.send_message(Propose(self.record))
        assert self.member.receive_bytes(self.member.receive_header())  # Start: it runs
        self.view = self.coordinator._machine.view

    def enter(self, address: str, role: str, id: str) -> Channel:
        connection = self.transport.connect(address, PATIENCE_S)
        introduce(connection, "", role=role, id=id, host="here")
        connection.set_timeout(PATIENCE_S)
        channel = Channel(connection, id)
        self.channels.append(channel)
        return channel

    def stranger_says(self, *messages: Message) -> None:
        """A worker too many comes, and talks until it is shown out."""
        connection = Eager(self.transport.connect(self.coordinator.address, PATIENCE_S), messages)
        connection.set_timeout(PATIENCE_S)
        with contextlib.suppress(RallypointError):
            introduce(connection, "", role="worker", id="stranger", host="here")
            while True:
                receive(connection, 1)
        connection.close()
        self.settle()

    def settle(self) -> None:
        """Until the coordinator's owner has handled what has come: its inbox answers in order."""
        handled = threading.Event()
        self.coordinator._inbox.put(handled.set)
        while not handled.wait(0.05):
            assert self.coordinator._thread.is_alive(), "the coordinator's owner is dead"

    def runs(self) -> bool:
        return not self.coordinator._over.is_set() and self.coordinator._machine.phase.value == "running"

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for server in self.servers:
            server.close()
        self.coordinator.close()


@pytest.fixture
def job(caplog: pytest.LogCaptureFixture) -> Iterator[Job]:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")
    job = Job()
    yield job
    job.close()


@pytest.mark.parametrize(
    "message",
    [
        GiveUp("for fun"),
        Done(),
        Report(0, 0, 0.0, 1.0, 1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_refused_member_is_not_listened_to(job: Job, message: Message) -> None:
    job.stranger_says(message)
    assert job.runs()
    assert job.coordinator._tally is not None
    assert job.coordinator._tally.missing() == (0, [0, 1])


def test_a_server_is_not_done_for_the_workers(job: Job) -> None:
    job.servers[0]._link.send(Done())
    assert job.servers[0]._link._channel.flush(PATIENCE_S)
    wait_a_little(lambda: not job.runs())
    assert job.runs()


def test_proposing_twice_does_not_start_the_job_again(job: Job) -> None:
    job.member.send_message(Propose(job.record))
    wait_a_little(lambda: job.coordinator._machine.view is not job.view)
    assert job.coordinator._machine.view is job.view


def test_a_stranger_does_not_contribute(job: Job) -> None:
    assert job.view is not None
    shard = job.view.shards_of("server0")[0]
    with contextlib.suppress(RallypointError):
        stranger = job.enter(job.servers[0]._gate.address, "worker", "stranger")
        payload = memoryview(bytes(4 * WORDS))
        stranger.send(Header(Kind.INITIAL, job.view.number, shard=shard, length=len(payload)), payload)
        while stranger.receive_header().kind is not Kind.CREDIT:
            pass
        assert job.servers[0]._reducer._owned[shard].machine.version == -1


def test_measures_of_unknown_shards_do_not_end_the_job(job: Job) -> None:
    data = memoryview(msgspec.msgpack.encode([(shard, 1.0, ()) for shard in range(100, 104)]))
    with contextlib.suppress(RallypointError):
        peer = job.enter(job.servers[0]._gate.address, "server", "server1")
        peer.send(Header(Kind.MEASURES, job.servers[0]._number, length=len(data), step=0), data)
        assert peer.flush(PATIENCE_S)
    wait_a_little(lambda: not job.runs())
    assert job.runs()


def test_a_strangers_measures_do_not_decide(job: Job) -> None:
    data = memoryview(msgspec.msgpack.encode([(shard, 1.0, ()) for shard in range(4)]))
    with contextlib.suppress(RallypointError):
        peer = job.enter(job.servers[0]._gate.address, "server", "stranger")
        peer.send(Header(Kind.MEASURES, job.servers[0]._number, length=len(data), step=2**40), data)
        assert peer.flush(PATIENCE_S)
    clip = job.servers[0]._reducer._clip
    assert clip is not None
    wait_a_little(lambda: clip._decided >= 0)
    assert clip._decided == -1


def test_deeply_nested_measures_are_a_protocol_error(job: Job) -> None:
    data = memoryview(b"\x91\x94\x01\xca\0\0\0\0\x90" + b"\x91" * 200_000)
    peer = job.enter(job.servers[0]._gate.address, "server", "server1")
    peer.send(Header(Kind.MEASURES, job.servers[0]._number, length=len(data)), data)
    assert peer.receive_header().kind is Kind.REFUSE


def test_following_twice_is_following(job: Job) -> None:
    peer = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    followers = job.servers[0]._reducer._followers
    for _ in range(5):
        peer.send(Header(Kind.FOLLOW))
    assert peer.flush(PATIENCE_S)
    wait_a_little(lambda: len(followers) > 1)
    assert len(followers) == 1


def test_a_server_that_says_prepared_again_changes_nothing(job: Job) -> None:
    job.servers[0]._link.send(Prepared())
    assert job.servers[0]._link._channel.flush(PATIENCE_S)
    job.settle()
    assert job.runs()


def test_a_message_from_an_observer_closes_its_connection(job: Job) -> None:
    observer = job.enter(job.coordinator.address, "observer", "eyes")
    data = encode(GiveUp("for fun"))
    observer.send(Header(Kind.CONTROL, length=len(data)), memoryview(data))
    receive_until_refused(observer)
    assert job.runs()


def test_reports_that_weigh_nothing_do_not_end_the_coordinator(job: Job) -> None:
    for replica in range(2):
        job.member.send_message(Report(0, replica, 0.0, 0.0, 1))
    receive_until_refused(job.member)
    job.settle()


def test_a_proposal_without_settings_does_not_end_the_coordinator() -> None:
    transport = InprocTransport()
    coordinator = CoordinatorService(workers=1, servers=1, bind="coordinator:0", transport=transport)
    coordinator.start()
    server = ServerService(id="server0", coordinator=coordinator.address, bind="server:0", transport=transport)
    server.start()
    connection = transport.connect(coordinator.address, PATIENCE_S)
    introduce(connection, "", role="worker", id="worker0", host="here")
    channel = Channel(connection, "coordinator")
    channel.send_message(Propose(JobRecord({}, build_layout([TensorSpec("w", (4,), "float32", 0)]))))
    receive_until_refused(channel)
    alive = coordinator._thread.is_alive()
    for thing in (channel, server, coordinator):
        thing.close()
    assert alive


def receive_until_refused(channel: Channel) -> None:
    while (header := channel.receive_header()).kind is not Kind.REFUSE:
        channel.receive_bytes(header)


def wait_a_little(happened: Callable[[], bool]) -> None:
    """Give what must not happen half a second to happen."""
    deadline = time.monotonic() + 0.5
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
