"""A follower that reads slowly, or not at all, costs its server a bounded amount of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rallypoint.config import record_of, resolve
from rallypoint.coordinator.service import CoordinatorService
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import AllReduce, Async, Mode, Sync
from rallypoint.core.protocol import Hello, NewView, Propose
from rallypoint.core.view import ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind, wants
from rallypoint.net.handshake import COORDINATOR, introduce, ticket_for
from rallypoint.net.tcp import TcpTransport
from rallypoint.server.held import newest_is_enough
from rallypoint.server.reducer import Reducer
from rallypoint.server.service import ServerService
from support.beside import PATIENCE_S

FIRST = ViewNumber()
SHARDS, WORDS, STEPS = 4, 1 << 18, 40
MODEL = 4 * SHARDS * WORDS  # bytes


def record(sync: Mode) -> JobRecord:
    settings = {"replicas": 2, "batch": 1, "steps": STEPS, "network.shard_bytes": 4 * WORDS, "sync": sync}
    return record_of(resolve(settings), build_layout([TensorSpec("w", (SHARDS * WORDS,), "float32", 0)], 4 * WORDS))


class Cluster:
    """A coordinator and a server with links of TCP; the test plays the workers, of which one is a slow follower."""

    def __init__(self, sync: Mode) -> None:
        self._stack = ExitStack()
        try:
            self._start(sync)
        except BaseException:
            self.close()
            raise

    def _start(self, sync: Mode) -> None:
        coordinator = CoordinatorService(terms=Terms(servers=1, heartbeat=10 * PATIENCE_S))
        coordinator.start()
        self._stack.callback(coordinator.close)
        self.server = ServerService(id="server0", coordinator=coordinator.address)
        self.server.start()
        self._stack.callback(self.server.close)
        for id in ("worker0", "worker1"):
            member = self.enter(coordinator.address, id)
            member.send_message(Propose(record(sync)))
            while not isinstance(message := member.receive_message(member.receive_header()), NewView):
                pass
            self.view = message.view

    def enter(self, address: str, id: str, view: ViewNumber = FIRST) -> Channel:
        connection = TcpTransport().connect(address, PATIENCE_S)
        hello, known = Hello("worker", id, "here", to=COORDINATOR), b""
        if view != FIRST:
            me = self.server._gate.me
            incarnation = next(worker.incarnation for worker in self.view.workers if worker.id == id)
            to, known = ("server", "server0", me.incarnation), ticket_for(me.secret, "worker", id, incarnation)
            hello = Hello("worker", id, "here", incarnation=incarnation, view=view, to=to)
        _, keys = introduce(connection, hello, "", known)
        connection.set_timeout(PATIENCE_S)
        channel = Channel(connection, id, keys)
        self._stack.callback(channel.close)
        return channel

    @property
    def reducer(self) -> Reducer:
        assert self.server._reducer is not None
        return self.server._reducer

    def push(self, channel: Channel, kind: Kind, step: int) -> None:
        """Send every shard a contribution (or its first values), and read the credit for each."""
        payload = memoryview(bytes(4 * WORDS))
        for shard in range(SHARDS):
            channel.send(
                Header(kind, self.view.number, shard=shard, step=step, weight=1.0, length=len(payload)), payload
            )
        for _ in range(SHARDS):
            assert channel.receive_header().kind is Kind.CREDIT

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(Sync(quorum=1))
    yield cluster
    cluster.close()


def test_of_each_shard_only_the_newest_version_waits_for_a_follower_that_does_not_read(cluster: Cluster) -> None:
    fast = cluster.enter(cluster.server._gate.address, "worker0", cluster.view.number)
    cluster.push(fast, Kind.INITIAL, 0)
    idle = cluster.enter(cluster.server._gate.address, "worker1", cluster.view.number)
    idle.connection.limit_in_flight(64 << 10)
    idle.send(Header(Kind.FOLLOW, cluster.view.number))
    assert idle.receive_header().kind is Kind.VERSION  # it follows; from now on it reads nothing
    (follower,) = cluster.reducer.shell.followers
    waiting, made = [], []
    for step in range(STEPS):
        cluster.push(fast, Kind.PUSH, step)
        waiting.append(follower.waiting_bytes)
        made.append(cluster.reducer.job.pool.made)
    assert max(waiting) <= MODEL, "one version of the model, however many were made meanwhile"
    assert max(made) <= 6 * SHARDS, "buffers: two versions of each shard, what comes in, what waits, what is being sent"
    # It reads again: it gets, of each shard, the last version of all; and what was already on its way before that.
    newest: dict[int, int] = {}
    while newest != dict.fromkeys(range(SHARDS), STEPS):
        idle.receive_bytes(Header(Kind.VERSION, length=4 * WORDS))
        header = idle.receive_header()
        newest[header.shard] = header.step


def test_of_the_answers_to_a_streaming_worker_that_does_not_read_only_each_shard_s_newest_waits() -> None:
    """Each is another version, so each holds a buffer of its own."""
    cluster = Cluster(Async())
    try:
        fast = cluster.enter(cluster.server._gate.address, "worker0", cluster.view.number)
        cluster.push(fast, Kind.INITIAL, 0)
        idle = cluster.enter(cluster.server._gate.address, "worker1", cluster.view.number)
        idle.connection.limit_in_flight(64 << 10)
        waiting = []
        for step in range(STEPS):
            cluster.push(fast, Kind.PUSH, step)
            for shard in range(SHARDS):
                idle.send(Header(Kind.WANT, cluster.view.number, shard=shard, wants=wants(1)))
            if step == 0:
                assert idle.receive_header().kind is Kind.VERSION  # from now on it reads nothing
            channel = cluster.reducer.shell.workers["worker1"]
            waiting.append(channel.waiting_bytes)
        assert max(waiting) <= MODEL, "one version of each shard, however often it asks"
        assert cluster.reducer.job.pool.made <= 7 * SHARDS
    finally:
        cluster.close()


def test_where_workers_step_the_optimizer_they_miss_no_version() -> None:
    """Each version is the mean gradient of one step there."""
    assert not newest_is_enough(resolve({"sync": AllReduce()}))
    assert all(newest_is_enough(resolve({"sync": sync})) for sync in (Sync(), Sync(quorum=1), Async()))
