"""Who knows the token but has no part in the job cannot change it: one test for each way that was found."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from rallypoint.config import record_of, resolve
from rallypoint.coordinator.inbox import Barrier
from rallypoint.coordinator.service import CoordinatorService
from rallypoint.core import protocol
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import BoundedStaleness, Mode, Sync
from rallypoint.core.protocol import Aborted, Admitted, Beat, Done, Hello, Message, NewView, Propose, Refused, Report
from rallypoint.core.shard.events import EVERYTHING
from rallypoint.core.view import ViewNumber
from rallypoint.errors import LinkError, RallypointError, UnprovenPeer
from rallypoint.net.channel import Channel, Sealer
from rallypoint.net.frames import Header, Kind, wants
from rallypoint.net.handshake import COORDINATOR, introduce, job_secret, ticket_for
from rallypoint.net.transport import InprocTransport
from rallypoint.server.inbox import Wake
from rallypoint.server.reducer import Reducer
from rallypoint.server.service import ServerService
from rallypoint.store.record import ShardRecord, encode_record
from support.beside import until
from support.gathering import Roles
from support.transports import receive

PATIENCE_S = 10.0
WORDS = 16


def reducer(job: Job, server: int = 0) -> Reducer:
    """A server's reducer: the job has begun."""
    found = job.servers[server]._reducer
    assert found is not None
    return found


class Job(Roles):
    """A running job of one worker, whose part the test plays, and two servers.

    `replication` is 1 (no backups) for a mode that has none. LinkError with the coordinator's sentence when it refuses
    the job; nothing runs on then.
    """

    def __init__(self, proposed: JobRecord | None = None, *, replication: int = 2) -> None:
        super().__init__(servers=2, replication=replication)
        self.add_servers(2)
        self.channels: list[Channel] = []
        self.record = proposed or record()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        self.member = self.enter(self.coordinator.address, "worker", "worker0")
        self.member.send_message(Propose(self.record))
        while not isinstance(message := self.member.receive_message(self.member.receive_header()), NewView):
            if isinstance(message, Refused | Aborted):
                raise LinkError(message.reason)
            if isinstance(message, Admitted):
                self.admitted = message
        self.view, self.tickets = message.view, message.tickets
        for server in self.servers:  # as the member itself they wait until they have heard of the view
            self.enter(server._gate.address, "worker", "worker0").send(Header(Kind.FOLLOW, self.view.number))
            until(lambda server=server: server._reducer is not None and len(server._reducer.shell.followers) == 1)  # type: ignore[misc]

    def enter(self, address: str, role: str, id: str) -> Channel:
        proof = self._proof(address, role, id)
        connection = self.transport.connect(address, PATIENCE_S)
        _, keys = introduce(connection, *proof)
        connection.set_timeout(PATIENCE_S)
        channel = Channel(connection, id, keys)
        self.channels.append(channel)
        return channel

    def _proof(self, address: str, role: str, id: str) -> tuple[Hello, str, bytes]:
        """What this member says and has for whoever listens there. A stranger has stolen a server's secret."""
        for server in self.servers:
            if server._gate.address == address:
                until(lambda server=server: bool(server._gate.me.secret))  # type: ignore[misc]
                me = server._gate.me
                members = self.view.servers if role == "server" else self.view.workers
                incarnation = next((member.incarnation for member in members if member.id == id), 7)
                to = ("server", me.id, me.incarnation)
                hello = Hello(role, id, "here", incarnation=incarnation, view=self.view.number, to=to)
                return hello, "", ticket_for(me.secret, role, id, incarnation)
        return Hello(role, id, "here", to=COORDINATOR), "", b""

    def stranger_says(self, *messages: Message) -> None:
        """A worker with another model comes, and says all this in one breath: it is there before a refusal."""
        connection = self.transport.connect(self.coordinator.address, PATIENCE_S)
        with contextlib.suppress(RallypointError):
            _, keys = introduce(connection, Hello("worker", "stranger", "here", to=COORDINATOR), "")
            connection.set_timeout(PATIENCE_S)
            sealer, breath = Sealer(keys), b""
            for data in map(protocol.encode, (Propose(record(9)), *messages)):
                breath += sealer.seal(Header(Kind.CONTROL, length=len(data)), memoryview(data)) + data
            connection.send(breath)
            while True:
                receive(connection, 1)
        connection.close()
        self.settle()

    def settle(self) -> None:
        """Until those who own the machines have handled what has come: their inboxes answer in order."""
        handled = threading.Event()
        self.coordinator._owner.put(Barrier(handled.set))
        while not handled.wait(0.05):
            assert self.coordinator._owner.is_alive(), "the coordinator's owner is dead"
        waits = []
        for server in self.servers:
            server._owner.put(Wake(handled := threading.Event()))
            waits.append((handled, server._owner.thread))
        for handled, thread in waits:
            while not handled.wait(0.05):
                assert thread.is_alive(), f"the owner '{thread.name}' is dead"

    def version(self, server: int, shard: int) -> int:
        machine = reducer(self, server).machine.machine(shard)
        return machine.version

    def runs(self) -> bool:
        return not self.coordinator._over.is_set() and self.coordinator._shell.machine.phase.value == "running"

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        super().close()


def job_of(make: Callable[[], Job]) -> Any:
    """A fixture: a job, of whose log nothing is shown."""

    @pytest.fixture
    def job(caplog: pytest.LogCaptureFixture) -> Iterator[Job]:
        caplog.set_level(logging.CRITICAL, logger="rallypoint")
        job = make()
        yield job
        job.close()

    return job


def record(words: int = 4 * WORDS, sync: Mode | None = None) -> JobRecord:
    settings = {
        "replicas": 2, "batch": 1, "steps": 9, "clip": 1.0, "network.shard_bytes": 4 * WORDS, "sync": sync or Sync()
    }
    config = resolve(settings)
    layout = build_layout([TensorSpec("w", (words, 1), "float32", 0)], shard_bytes=4 * WORDS)
    return record_of(config, layout)


job = job_of(Job)


@pytest.mark.parametrize(
    "message",
    [protocol.GiveUp("for fun"), Done(), protocol.Leaving(), Report(0, 0, 0.0, 1.0, 1), Propose(record())],
    ids=lambda message: type(message).__name__,
)
def test_a_refused_member_is_not_listened_to(job: Job, message: Message) -> None:
    if isinstance(message, (Done, Report)):  # not refused for speaking of a past that is void
        message = msgspec.structs.replace(message, generation=job.view.generation)
    job.stranger_says(message)
    assert job.runs()
    assert "stranger" not in job.coordinator._shell.machine.course.members.workers
    assert job.coordinator._shell.announcer.tally.missing() == (0, [0, 1])


@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_stranger_is_shown_out_of_a_server(job: Job, role: str) -> None:
    shard = job.view.shards_of("server0")[0]
    stranger = job.enter(job.servers[0]._gate.address, role, "stranger")
    payload = memoryview(bytes(4 * WORDS))
    stranger.send(Header(Kind.INITIAL, job.view.number, shard=shard, length=len(payload)), payload)
    assert f"{role} stranger is not in view {job.view.number}" in refusal(stranger)
    job.settle()
    assert job.version(0, shard) == -1


@pytest.mark.parametrize(("role", "id"), [("worker", "worker0"), ("server", "server1")])
@pytest.mark.parametrize("known", [bytes(32), b"of its own"], ids=["zeros", "another member's"])
def test_a_token_holder_cannot_come_to_a_server_as_a_member(job: Job, role: str, id: str, known: bytes) -> None:
    """Else it could end that member's own connection, and push in its name."""
    hello, token, _ = job._proof(job.servers[0]._gate.address, role, id)
    own = ticket_for(job.servers[0]._gate.me.secret, "worker", "stranger", 9) if known == b"of its own" else known
    connection = job.transport.connect(job.servers[0]._gate.address, PATIENCE_S)
    with pytest.raises(UnprovenPeer, match=f"refuses {role} {id} without proving"):
        introduce(connection, hello, token, own)
    connection.close()
    job.settle()
    assert len(reducer(job).shell.workers) == 1, "the member's own connection stands"


def test_a_member_is_told_its_own_secret_and_tickets_alone(job: Job) -> None:
    secret = job_secret(job.coordinator._journal.secret, "")
    assert job.admitted.secret == ticket_for(secret, "worker", "worker0", job.admitted.incarnation)
    assert job.tickets.keys() == {"server0", "server1"}
    for server in job.servers:
        me = server._gate.me
        assert me.secret == ticket_for(secret, "server", server.id, me.incarnation)
        assert job.tickets[server.id] == ticket_for(me.secret, "worker", "worker0", job.admitted.incarnation)
    known = {job.admitted.secret, *job.tickets.values(), *(server._gate.me.secret for server in job.servers)}
    assert len(known) == 5


def measures(*shards: int) -> bytes:
    return msgspec.msgpack.encode([(shard, (1.0,), ()) for shard in shards])


NESTED = b"\x91\x94\x01\xca\0\0\0\0\x90" + b"\x91" * 200_000


@pytest.mark.parametrize(("role", "kind", "fields", "payload", "sentence"), [
    ("server", Kind.MEASURES, {}, measures(100, 101), "measures of a step or of a shard that this job does not have"),
    ("server", Kind.MEASURES, {"step": 2**32 - 1}, measures(0, 1, 2, 3), "measures of a step or of a shard that this"),
    ("server", Kind.MEASURES, {}, NESTED, "measures that cannot be read"),
    ("worker", Kind.MEASURES, {}, b"", "a MEASURES frame from a worker"),
    ("worker", Kind.PUSH, {"step": 9}, bytes(4 * WORDS), "a contribution to step 9 of shard {shard}, which has 9"),
    ("worker", Kind.WANT, {"shard": 99, "wants": wants(0)}, b"", "shard 99 of a job that has 4"),
], ids=["unknown shards", "no such step", "nested", "a worker's", "after the last step", "no such shard"])  # fmt: skip
def test_a_frame_that_no_member_sends_closes_its_connection_alone(
    job: Job, role: str, kind: Kind, fields: dict[str, int], payload: bytes, sentence: str
) -> None:
    shard = job.view.shards_of("server0")[0]
    peer = job.enter(job.servers[0]._gate.address, role, f"{role}{int(role == 'server')}")
    header = Header(kind, job.view.number, shard=shard, weight=1.0, length=len(payload))._replace(**fields)
    peer.send(header, memoryview(payload) if payload else None)
    assert sentence.format(shard=shard) in refusal(peer)
    job.settle()
    assert job.runs()
    clip = reducer(job).machine._clip
    assert clip._verdicts == {}


def test_following_twice_is_following(job: Job) -> None:
    peer = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    for _ in range(5):
        peer.send(Header(Kind.FOLLOW))
    payload = memoryview(bytes(4 * WORDS))
    peer.send(Header(Kind.PUSH, ViewNumber(), weight=1.0, length=len(payload)), payload)  # stale: answered at once
    assert peer.receive_header().kind is Kind.CREDIT
    job.settle()
    followers = reducer(job).shell.followers
    assert len(followers) == 1  # what the worker's older connection followed has ended with it
    peer.close()
    until(lambda: not followers)  # its end is the end of its following


# ---- what a worker may contribute ------------------------------------------------------------------------------


def standby(job: Job) -> Channel:
    """A worker that stands by: its connection to the first server."""
    member = job.enter(job.coordinator.address, "worker", "worker1")
    member.send_message(Propose(job.record))
    while not isinstance(message := member.receive_message(member.receive_header()), NewView):
        pass
    job.view = message.view
    assert "worker1" not in job.view.contributors
    return job.enter(job.servers[0]._gate.address, "worker", "worker1")


def test_a_standby_contributes_nothing_and_begins_nothing(job: Job) -> None:
    """Without an assignment, and without a backup task. Its connection stays: a contribution may be late."""
    peer = standby(job)
    shard, payload = job.view.shards_of("server0")[0], memoryview(bytes(4 * WORDS))
    for kind in (Kind.INITIAL, Kind.PUSH):
        peer.send(Header(kind, job.view.number, shard=shard, weight=1.0, length=len(payload)), payload)
        assert peer.receive_header().kind is Kind.CREDIT
    job.settle()
    assert job.version(0, shard) == -1
    worker = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    worker.send(Header(Kind.INITIAL, job.view.number, shard=shard, length=len(payload)), payload)
    until(lambda: job.version(0, shard) == 0)
    assert worker.receive_header().kind is Kind.CREDIT
    for sender, added in ((peer, 0), (worker, 1)):
        sender.send(Header(Kind.PUSH, job.view.number, shard=shard, weight=1.0, length=len(payload)), payload)
        assert sender.receive_header().kind is Kind.CREDIT
        job.settle()
        machine = reducer(job).machine.machine(shard)
        assert machine.added == added


# ---- what only the shard's own primary may say (I10) -----------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.REPLICATE, Kind.STATE])
def test_a_server_does_not_write_into_shards_of_others(job: Job, kind: Kind) -> None:
    own = job.view.shards_of("server0")[0]
    payload = memoryview(bytes(4 * WORDS) if kind is Kind.REPLICATE else state(own))
    peer = job.enter(job.servers[0]._gate.address, "server", "server1")
    peer.send(Header(kind, job.view.number, shard=own, length=len(payload), weight=1.0), payload)
    assert peer.flush(PATIENCE_S)
    peer.send(Header(Kind.FETCH))  # the last word: what came before it is in the inbox once it is refused
    assert "a FETCH frame from another server" in refusal(peer)
    job.settle()
    assert job.version(0, own) == -1
    assert job.runs()


@pytest.mark.parametrize(
    ("words", "damage", "sentence"),
    [
        (WORDS, 1, "a shard's state that cannot be read"),
        (WORDS - 1, 0, "that does not fit this job's layout"),
        (WORDS + 1, 0, "that does not fit this job's layout"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(job: Job, words: int, damage: int, sentence: str) -> None:
    theirs = job.view.shards_of("server1")[0]
    data = state(theirs, words)
    peer = job.enter(job.servers[0]._gate.address, "server", "server1")
    peer.send(Header(Kind.STATE, job.view.number, shard=theirs, length=len(data) - damage), memoryview(data)[damage:])
    assert sentence in refusal(peer)
    job.settle()
    assert job.runs()


def test_what_was_said_before_a_roll_back_is_void(job: Job) -> None:
    shard = job.view.shards_of("server0")[0]
    worker = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    payload = memoryview(bytes(4 * WORDS))
    old = ViewNumber(job.view.generation.epoch, job.view.generation.count - 1)
    worker.send(Header(Kind.INITIAL, old, shard=shard, length=len(payload)), payload)
    assert worker.receive_header().kind is Kind.CREDIT
    job.settle()
    assert job.version(0, shard) == -1
    worker.send(Header(Kind.INITIAL, job.view.number, shard=shard, length=len(payload)), payload)
    until(lambda: job.version(0, shard) == 0)


# ---- wishes ----------------------------------------------------------------------------------------------------


streaming_job = job_of(lambda: Job(record(sync=BoundedStaleness(1))))


def with_wish(job: Job, kind: Kind, shard: int, wish: int) -> tuple[Header, memoryview]:
    payload = memoryview(bytes(4 * WORDS if kind is Kind.PUSH else 0))
    return Header(kind, job.view.number, shard=shard, weight=1.0, length=len(payload), wants=wish), payload


@pytest.mark.parametrize("kind", [Kind.WANT, Kind.PUSH])
@pytest.mark.parametrize("wish", [wants(0), wants(EVERYTHING)])
def test_a_wish_in_an_aligned_job_closes_that_connection_only(job: Job, kind: Kind, wish: int) -> None:
    shard = job.view.shards_of("server0")[0]
    worker = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    worker.send(*with_wish(job, kind, shard, wish))
    assert f"a wish for {wish}" in refusal(worker)
    job.settle()
    assert job.runs()
    assert job.version(0, shard) == -1


@pytest.mark.parametrize(("kind", "wish"), [
    (Kind.WANT, wants(2)), (Kind.WANT, 2**32 - 1), (Kind.WANT, wants(None)), (Kind.PUSH, wants(2)),
])  # fmt: skip
def test_a_wish_for_a_replica_that_there_is_not_closes_that_connection_only(
    streaming_job: Job, kind: Kind, wish: int
) -> None:
    job, shard = streaming_job, streaming_job.view.shards_of("server0")[0]
    worker = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    worker.send(*with_wish(job, kind, shard, wish))
    assert f"a wish for {wish}" in refusal(worker)
    job.settle()
    assert job.runs()
    again = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    payload = memoryview(bytes(4 * WORDS))
    again.send(Header(Kind.INITIAL, job.view.number, shard=shard, length=len(payload)), payload)
    again.send(*with_wish(job, Kind.WANT, shard, wants(1)))
    answer = version(again)
    assert (answer.shard, answer.step, answer.base, answer.wanted) == (shard, 0, 0, 1)


def test_a_wish_on_a_connection_that_was_replaced_does_not_count(streaming_job: Job) -> None:
    job, shard = streaming_job, streaming_job.view.shards_of("server0")[0]
    old = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    old.send(*with_wish(job, Kind.WANT, shard, wants(0)))
    until(lambda: wanted(job, shard) == ["worker0"])
    new = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    new.send(*with_wish(job, Kind.WANT, shard, wants(1)))
    old.close()
    payload = memoryview(bytes(4 * WORDS))
    new.send(Header(Kind.INITIAL, job.view.number, shard=shard, length=len(payload)), payload)
    assert version(new).wanted == 1
    job.settle()
    assert wanted(job, shard) == []


def test_whoever_is_gone_wants_nothing(streaming_job: Job) -> None:
    job, shard = streaming_job, streaming_job.view.shards_of("server0")[0]
    worker = job.enter(job.servers[0]._gate.address, "worker", "worker0")
    worker.send(*with_wish(job, Kind.WANT, shard, wants(0)))
    until(lambda: wanted(job, shard) == ["worker0"])
    worker.close()
    until(lambda: wanted(job, shard) == [])


def wanted(job: Job, shard: int) -> list[str]:
    """Who wants something of a shard of server 0."""
    machine = reducer(job).machine.machine(shard)
    return sorted(machine.wants)


def version(channel: Channel) -> Header:
    """The next version that comes."""
    while (header := channel.receive_header()).kind is not Kind.VERSION:
        channel.receive_bytes(header)
    channel.receive_bytes(header)
    return header


@pytest.mark.parametrize(("workers", "servers"), [(-1, 0), (0, -1), (10**9, 0), (0, 10**9)])
def test_a_wish_for_an_impossible_number_of_processes_reaches_nobody(job: Job, workers: int, servers: int) -> None:
    observer = job.enter(job.coordinator.address, "observer", "eyes")
    observer.send_message(protocol.Resize(workers, servers))
    said = refusal(observer)
    out_of_range = "a control message that cannot be read: Expected `int` >= 0"
    assert out_of_range in said or f"a wish for {workers} workers and {servers} servers" in said
    job.settle()
    assert job.runs()


@pytest.mark.some("1-server-worker0", "2-server-worker0", "3-server-worker0", "777-server-worker0")
@pytest.mark.parametrize(("role", "id"), [("worker", "server0"), ("server", "worker0"), ("worker", "worker0")])
@pytest.mark.parametrize("incarnation", [1, 2, 3, 777])
def test_a_guessed_incarnation_does_not_take_a_members_place(job: Job, role: str, id: str, incarnation: int) -> None:
    connection = job.transport.connect(job.coordinator.address, PATIENCE_S)
    with pytest.raises(UnprovenPeer, match=f"refuses {role} {id} without proving"):
        introduce(connection, Hello(role, id, "here", "here:1", incarnation, to=COORDINATOR), "", b"a guess")
    job.settle()
    job.member.send_message(Beat())
    assert job.runs()
    assert set(job.coordinator._shell.members) == {"server0", "server1", "worker0"}


def test_a_proposal_without_settings_does_not_end_the_coordinator() -> None:
    transport = InprocTransport()
    coordinator = CoordinatorService(terms=Terms(), bind="coordinator:0", transport=transport)
    coordinator.start()
    server = ServerService(id="server0", coordinator=coordinator.address, bind="server:0", transport=transport)
    server.start()
    connection = transport.connect(coordinator.address, PATIENCE_S)
    _, keys = introduce(connection, Hello("worker", "worker0", "here", to=COORDINATOR), "")
    channel = Channel(connection, "coordinator", keys)
    channel.send_message(Propose(JobRecord({}, build_layout([TensorSpec("w", (4,), "float32", 0)]), 1)))
    assert "a job record whose settings are not resolved" in refusal(channel)
    alive = coordinator._owner.is_alive()
    for thing in (channel, server, coordinator):
        thing.close()
    assert alive


def state(shard: int, words: int = WORDS) -> bytes:
    """A shard's whole state, as a primary sends it to its backup."""
    values = np.ones(words, dtype=np.float32)
    return encode_record(ShardRecord(shard, 0, {"master": values, "wire-0": values}, {}), "none")


def refusal(channel: Channel) -> str:
    """The sentence with which the other side closes this connection, whatever it says before."""
    while (header := channel.receive_header()).kind is not Kind.REFUSE:
        channel.receive_bytes(header)
    return protocol.expect(channel.receive_bytes(header), Refused).reason


def test_a_stale_update_from_a_server_gets_no_credit_and_its_link_stays(job: Job) -> None:
    """Servers give each other no credits: a peer would take one for a protocol error, and all states would go again."""
    peer = job.enter(job.servers[0]._gate.address, "server", "server1")
    payload = memoryview(bytes(4 * WORDS))
    peer.send(Header(Kind.REPLICATE, ViewNumber(), weight=1.0, length=len(payload)), payload)
    peer.send(Header(Kind.FETCH))  # the last word: what is answered before it comes before its refusal
    assert peer.receive_header().kind is Kind.REFUSE
