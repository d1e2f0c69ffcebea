"""A coordinator in this process and members that say what a test says: words, waits, ends, pauses, a full disk."""

from __future__ import annotations

import errno
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.config import record_of, resolve
from rallypoint.coordinator import announcer, inbox, journal, service
from rallypoint.coordinator import events as events_module
from rallypoint.coordinator.events import EventLog
from rallypoint.coordinator.inbox import Barrier
from rallypoint.coordinator.journal import Journal
from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core import protocol
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Phase
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Aborted, Finished, Message, NewView, Propose, Report, Say, Skipped, StepDone
from rallypoint.core.view import View
from rallypoint.errors import AccessDenied, AddressInUse, DataError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import COORDINATOR, Identity, introduce, job_secret, ticket_for
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.transport import InprocTransport
from rallypoint.store import files
from rallypoint.store.files import end_threads
from rallypoint.watch.follow import Log
from support.beside import raising, until

PATIENCE_S = 60.0
LONG = 1000.0  # a heartbeat that never comes: nobody is given up for the test's silence
REPLICAS, STEPS = 2, 3


def record(**settings: Any) -> JobRecord:
    config = resolve({"replicas": REPLICAS, "batch": 1, "steps": STEPS, "network.shard_bytes": 64, **settings})
    return record_of(config, build_layout([TensorSpec("w", (32, 1), "float32", 0)], 64))


@dataclass
class Member:
    """A link to the coordinator, and what has come over it."""

    link: CoordinatorLink
    heard: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    lost: queue.SimpleQueue[RallypointError] = field(default_factory=queue.SimpleQueue)

    def next(self, kind: type[Message], passing: Callable[[Any], bool] = lambda message: True) -> Any:
        """The next message of this kind; others are passed over."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                message = self.heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no {kind.__name__} message has come")
            if isinstance(message, kind) and passing(message):
                return message


class House:
    """A coordinator over the in-process transport, and whoever a test brings in."""

    def __init__(self) -> None:
        self.transport = InprocTransport()
        self.members: list[Member] = []
        self.channels: list[Channel] = []
        self.services: list[CoordinatorService] = []

    def open(
        self, *, join_info: JoinInfo | None = None, announced: Callable[[object], None] | None = None, **terms: Any
    ) -> CoordinatorService:
        self.coordinator = CoordinatorService(
            terms=Terms(**{"heartbeat": LONG, **terms}), bind="coordinator:1", transport=self.transport,
            join_info=join_info, announced=announced,
        )  # fmt: skip
        self.coordinator.start()
        self.services.append(self.coordinator)
        return self.coordinator

    def enter(self, role: str, id: str) -> Member:
        member = Member(None)  # type: ignore[arg-type]
        member.link = CoordinatorLink(
            transport=self.transport, address=self.coordinator.address, me=Identity(role, id),
            handlers=Handlers(member.heard.put, member.lost.put), listening_at=f"{id}:0",
        )  # fmt: skip
        member.link.start()
        self.members.append(member)
        if role == "observer":  # nothing tells it that it is heard of: what is announced before is not for it
            until(lambda: {channel.name for channel in self.coordinator._shell.announcer.observers} >= {id})
        return member

    def call(self, role: str, id: str, incarnation: int = 0) -> Channel:
        """A bare connection: it has said hello, and nothing speaks for it."""
        connection = self.transport.connect(self.coordinator.address, PATIENCE_S)
        known = job_secret(self.coordinator._journal.secret, "")
        secret = ticket_for(known, role, id, incarnation) if incarnation else b""
        hello = protocol.Hello(role, id, "here", incarnation=incarnation, to=COORDINATOR)
        _, keys = introduce(connection, hello, "", secret)
        connection.set_timeout(PATIENCE_S)
        self.channels.append(Channel(connection, id, keys))
        return self.channels[-1]

    def begin(self, **settings: Any) -> tuple[Member, Member, View]:
        """A job of one server and one worker that runs: both, and the view."""
        server, worker = self.enter("server", "server0"), self.enter("worker", "worker0")
        worker.link.send(Propose(record(**settings)))
        return server, worker, worker.next(NewView).view

    def finish(self, worker: Member, view: View) -> None:
        worker.link.send(protocol.Done(view.generation))

    def settle(self) -> None:
        """Until the owner's thread has handled what had come."""
        handled = threading.Event()
        self.coordinator._owner.put(Barrier(handled.set))
        assert handled.wait(PATIENCE_S)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for member in self.members:
            member.link.close()
        for coordinator in self.services:
            coordinator.close()


@pytest.fixture
def house(caplog: pytest.LogCaptureFixture) -> Iterator[House]:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")
    house = House()
    yield house
    house.close()


def refusal(channel: Channel) -> str:
    """The sentence with which the coordinator closes this connection, whatever it says before."""
    while (header := channel.receive_header()).kind is not Kind.REFUSE:
        channel.receive_bytes(header)
    return protocol.expect(channel.receive_bytes(header), protocol.Refused).reason


# ---- who comes in, and what they may say -----------------------------------------------------------------------


def test_a_role_that_does_not_exist_is_refused_by_name(house: House) -> None:
    house.open()
    with pytest.raises(AccessDenied, match="there is no role gambler"):
        house.call("gambler", "g")


def test_a_member_that_sends_tensors_is_shown_out_and_gone_for_the_job(house: House) -> None:
    house.open(workers_start=2)
    eyes = house.enter("observer", "eyes")
    _, worker = house.enter("server", "server0"), house.enter("worker", "worker0")
    other = house.call("worker", "worker1")
    other.send_message(Propose(record()))
    worker.link.send(Propose(record()))
    worker.next(NewView)
    other.send(Header(Kind.PUSH))
    assert "a PUSH frame from worker worker1" in refusal(other)
    said = eyes.next(Say)
    assert said.text == "worker1 is gone: it broke the protocol: a PUSH frame from worker worker1"
    assert [member.id for member in worker.next(NewView).view.workers] == ["worker0"]


@pytest.mark.parametrize(
    ("role", "message"),
    [("server", Propose(record())), ("worker", protocol.CaughtUp({})), ("worker", protocol.Resize(2)),
     ("observer", protocol.Done()),
     ("observer", protocol.GiveUp("for fun"))],
    ids=["server proposes", "worker is in step", "worker resizes", "observer is done", "observer gives up"],
)
def test_a_message_out_of_its_role_closes_that_connection_alone(house: House, role: str, message: Message) -> None:
    house.open(workers_start=2)
    _, worker = house.enter("server", "server0"), house.enter("worker", "worker0")
    stranger = house.call(role, "stranger")
    stranger.send_message(message)
    assert f"a {type(message).__name__} message from {role} stranger" in refusal(stranger)
    house.settle()
    assert worker.lost.empty()
    assert not house.coordinator._over.is_set()


def test_a_process_that_comes_again_before_it_was_missed_takes_the_place_of_its_old_connection(house: House) -> None:
    """Its link broke unnoticed, as when a switch dies: no end has come to us."""
    house.open(workers_start=2)
    first = house.call("worker", "worker0")
    admitted = first.receive_message(first.receive_header())
    assert isinstance(admitted, protocol.Admitted)
    again = house.call("worker", "worker0", incarnation=admitted.incarnation)
    assert isinstance(again.receive_message(again.receive_header()), protocol.Admitted)
    until(lambda: first.connection._incoming._ended)  # type: ignore[attr-defined]
    house.settle()
    assert set(house.coordinator._shell.members) == {"worker0"}, "the old connection's end is not its end"


# ---- words for those who watch -----------------------------------------------------------------------------------


def test_an_observer_that_comes_late_is_told_the_plan_and_then_every_step(house: House) -> None:
    house.open()
    server, worker, view = house.begin()
    server.next(protocol.Prepare)
    eyes = house.enter("observer", "eyes")
    plan = eyes.next(protocol.Planned)
    assert (plan.steps, plan.replicas, plan.shards, plan.workers) == (STEPS, REPLICAS, 2, ("worker0",))
    for replica, loss in ((0, 1.0), (1, 4.0)):
        worker.link.send(Report(0, replica, loss, 1.0 + 2 * replica, 5, generation=view.generation))
    assert eyes.next(StepDone) == StepDone(0, (1.0 + 3 * 4.0) / 4, 10, lr=0.001)
    worker.link.send(Report(0, 1, 9.0, 1.0, 5, generation=view.generation))  # again: not counted, but told
    for replica in (0, 1):
        worker.link.send(Report(1, replica, 2.0, 1.0, 5, generation=view.generation))
    assert eyes.next(StepDone) == StepDone(1, 2.0, 10, again=1, lr=0.001)


def test_what_members_say_of_the_run_reaches_those_who_watch_and_the_log(house: House, tmp_path: Path) -> None:
    house.open(join_info=JoinInfo(folder=str(tmp_path)))
    eyes = house.enter("observer", "eyes")
    server, worker, view = house.begin()
    worker.link.send(protocol.Evaluated(1, view.generation, {"val_loss": 0.5}))
    assert eyes.next(protocol.Metrics).values == {"val_loss": 0.5}
    assert house.coordinator._shell.evaluations.of(1) == {"val_loss": 0.5}, "for that version's snapshot"
    server.link.send(Skipped(1, (0,)))
    assert eyes.next(Skipped) == Skipped(1, (0,))
    server.link.send(protocol.Applied(1, 2, 12.5, {"worker0": 0.25}))
    until(lambda: "Applied" in (tmp_path / "events.jsonl").read_text())
    events = [msgspec.json.decode(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    kinds = [event["type"] for event in events]
    assert [kind for kind in kinds if kind in ("Planned", "Metrics", "Skipped", "Applied")] == [
        "Planned", "Metrics", "Skipped", "Applied",
    ]  # fmt: skip
    assert events[kinds.index("Applied")]["replicas"] == 2
    assert [event["t"] for event in events] == sorted(event["t"] for event in events)


def test_an_error_of_who_only_looks_on_ends_no_job(house: House, tmp_path: Path) -> None:
    asked: list[object] = []

    def fails(message: object) -> None:
        asked.append(message)
        raise KeyError("a figure that is not there")

    house.open(join_info=JoinInfo(folder=str(tmp_path)), announced=fails)
    eyes = house.enter("observer", "eyes")
    server, worker, view = house.begin()
    for step in range(STEPS):
        for replica in range(REPLICAS):
            worker.link.send(Report(step, replica, 2.0, 1.0, 5, generation=view.generation))
        assert eyes.next(StepDone).step == step
    server.link.send(protocol.Applied(STEPS - 1, REPLICAS, 1.0, generation=view.generation))
    house.finish(worker, view)
    assert house.coordinator.wait() is None
    assert len(asked) == 1
    until(lambda: "Applied" in (tmp_path / "events.jsonl").read_text())


# ---- nothing waits without a name (I8) ---------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """Sentences come at every tick."""
    monkeypatch.setattr(announcer, "SILENCE_S", 0.0)
    monkeypatch.setattr(service, "tick_seconds", lambda terms: 0.02)
    return 0.0


def test_a_member_s_own_words_about_a_wait_do_not_make_it_seem_shorter(house: House) -> None:
    house.open()
    _, worker, view = house.begin()
    eyes = house.enter("observer", "eyes")
    waiting_since = house.coordinator._shell.announcer.last_news
    worker.link.send(Say("worker0 is waiting for version 1, 5 s so far"))
    eyes.next(Say)
    assert house.coordinator._shell.announcer.last_news == waiting_since
    for replica in (0, 1):
        worker.link.send(Report(0, replica, 1.0, 1.0, 1, generation=view.generation))
    eyes.next(StepDone)
    assert house.coordinator._shell.announcer.last_news > waiting_since


def test_the_first_weights_are_waited_for_by_name(house: House, impatient: float, tmp_path: Path) -> None:
    house.open(snapshots=True, join_info=JoinInfo(snapshots=str(tmp_path)))
    eyes = house.enter("observer", "eyes")
    house.begin()
    eyes.next(protocol.Waiting, lambda waiting: "waiting for the first weights to be stored" in waiting.text)


# ---- the end -----------------------------------------------------------------------------------------------------


def test_a_coordinator_that_follows_another_waits_for_its_port_and_the_first_does_not(
    house: House, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="rallypoint")
    squatter = house.transport.listen("coordinator:1")  # any program's free port may be that of a dead coordinator
    with pytest.raises(AddressInUse):
        house.open(join_info=JoinInfo(folder=str(tmp_path)))
    assert not caplog.records
    (starting := threading.Thread(target=lambda: house.open(earlier=1))).start()
    sentence = "the name coordinator:1 is in use"
    until(lambda: any(sentence in record.getMessage() for record in caplog.records))
    squatter.close()
    starting.join(PATIENCE_S)
    assert sum("trying again for 60 s" in record.getMessage() for record in caplog.records) == 1, "it is said once"
    _, worker, view = house.begin()
    house.finish(worker, view)
    assert house.coordinator.wait() is None


def test_a_coordinator_whose_journal_is_of_an_earlier_one_waits_for_its_port_too(
    house: House, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    about = JoinInfo(folder=str(tmp_path))
    first = house.open(join_info=about)
    house.begin()
    house.settle()
    first.close()
    caplog.set_level(logging.WARNING, logger="rallypoint")
    squatter = house.transport.listen("coordinator:1")
    later = CoordinatorService(
        terms=Terms(heartbeat=LONG), bind="coordinator:1", transport=house.transport, join_info=about
    )
    (starting := threading.Thread(target=later.start)).start()
    until(lambda: any("trying again for 60 s" in record.getMessage() for record in caplog.records))
    squatter.close()
    starting.join(PATIENCE_S)
    house.services = [later]
    assert later.address == "coordinator:1"


def test_the_last_word_reaches_everybody_and_whoever_comes_after_it(house: House) -> None:
    coordinator = house.open()
    eyes = house.enter("observer", "eyes")
    server, worker, view = house.begin()
    house.finish(worker, view)
    for member in (worker, server, eyes):
        assert member.next(Finished) == Finished("worker0")
    assert coordinator.wait() is None
    late = house.call("worker", "worker9")
    assert late.receive_message(late.receive_header()) == Finished("worker0")


def test_a_process_that_comes_under_a_taken_name_after_the_end_hears_of_the_end(house: House) -> None:
    coordinator = house.open()
    _, worker, _ = house.begin()
    coordinator.abort("somebody pulled the plug")
    worker.next(Aborted)
    other = house.call("worker", "worker0")
    assert other.receive_message(other.receive_header()) == Aborted("somebody pulled the plug")


def test_a_fault_of_its_own_ends_the_job_with_a_sentence(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = house.open()
    server, worker, _ = house.begin()
    monkeypatch.setattr(ClusterMachine, "handle", raising(KeyError("a bug")))
    worker.link.send(protocol.Leaving())
    assert server.next(Aborted) == Aborted("the coordinator failed: KeyError: 'a bug'")
    assert coordinator.wait() == "the coordinator failed: KeyError: 'a bug'"


# ---- a full disk -------------------------------------------------------------------------------------------------


def test_a_job_outlives_the_disk_that_its_log_is_on(
    house: House, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    caplog.set_level(logging.WARNING, logger="rallypoint")
    coordinator = house.open(join_info=JoinInfo(folder=str(tmp_path)))
    eyes = house.enter("observer", "eyes")
    _, worker, view = house.begin()
    worker.link.send(Say("still here"))
    assert eyes.next(Say, lambda said: said.text == "still here")
    house.finish(worker, view)
    assert eyes.next(Finished) == Finished("worker0")
    assert coordinator.wait() is None
    assert [entry.message for entry in caplog.records if "events.jsonl" in entry.message] == [
        f"{tmp_path}/events.jsonl cannot be written, the job goes on: No space left on device"
    ]


def test_a_log_whose_disk_gets_room_again_goes_on_and_counts_what_it_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="rallypoint")
    clock = Clock()
    monkeypatch.setattr(events_module, "time", clock)
    log, room = EventLog(str(tmp_path)), [5]
    write = os.write

    def little_room(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(descriptor, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(events_module.os, "write", little_room)
    for number in range(3):  # the first is torn, the others are not tried
        log.write(Say(f"lost {number}"))
    log._lines.join()
    clock.ahead, room[0] = 1.5, 10_000
    log.write(Say("room"))
    end_threads(log.stop())
    torn, whole = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert len(torn) == 5
    assert msgspec.json.decode(whole)["text"] == "room"
    assert [entry.message.rpartition("jsonl ")[2] for entry in caplog.records] == [
        "cannot be written, the job goes on: No space left on device", "is written again: 3 events are missing",
    ]  # fmt: skip


def test_a_log_whose_last_line_is_torn_loses_nothing_of_the_next_coordinator(tmp_path: Path) -> None:
    """The disk was full, or the machine lost its power: the first event, the plan, stood on the same line."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":1.0,"type":"Say","text":"whole"}\n{"t":1.5,"ty')
    for text in ("first", "second"):
        log = EventLog(str(tmp_path))
        log.write(Say(text))
        end_threads(log.stop())
    assert [event[0] for event in Log(tmp_path).piece() or ()] == [Say("whole"), Say("first"), Say("second")]
    assert path.read_bytes().count(b"\n") == 4


@pytest.mark.slow
def test_a_journal_that_cannot_be_written_ends_a_job_that_has_not_begun(house: House, tmp_path: Path) -> None:
    """Nothing is lost yet, and the next coordinator would not know that there is a job."""
    coordinator = house.open(join_info=JoinInfo(folder=str(tmp_path)))
    server, worker, view = house.begin()
    pages = coordinator._journal._db.execute("pragma page_count").fetchone()[0]
    coordinator._journal._db.execute(f"pragma max_page_count = {pages}")
    before = coordinator._shell.machine.view
    for number in range(1, 400):  # every newcomer is a view: at some time the next one has no room
        house.call("worker", f"worker{number}").send_message(Propose(record()))
        house.settle()
        if coordinator._over.is_set():
            break
    reason = coordinator.wait()
    assert reason == (
        f"the coordinator failed: the journal {tmp_path}/journal.sqlite cannot be written (database or disk is full)"
    )
    assert worker.next(Aborted) == Aborted(reason)
    assert server.next(Aborted) == Aborted(reason)
    assert view.number <= before.number


def test_a_disk_that_is_full_at_the_very_end_does_not_lose_the_model(house: House, tmp_path: Path) -> None:
    """The last version is on the workers: they are told to go home, journal or not."""
    coordinator = house.open(join_info=JoinInfo(folder=str(tmp_path)))
    eyes = house.enter("observer", "eyes")
    server, worker, view = house.begin()
    house.settle()

    def full(state: ClusterState) -> None:
        raise DataError(f"the journal {tmp_path}/journal.sqlite cannot be written (database or disk is full)")

    coordinator._journal.save = full  # type: ignore[method-assign]
    house.finish(worker, view)
    for member in (worker, server):
        assert member.next(Finished) == Finished("worker0")
    assert coordinator.wait() is None
    said = eyes.next(Say, lambda said: "journal" in said.text).text
    assert "cannot be written (database or disk is full): the job goes on, and its members keep" in said


def ends_in_time(coordinator: CoordinatorService) -> bool:
    """Close it; False if that waits for the disk."""
    (closes := threading.Thread(target=coordinator.close)).start()
    closes.join(PATIENCE_S)
    return not closes.is_alive()


def test_a_job_goes_on_and_can_be_ended_while_the_journal_s_disk_hangs(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal, "PATIENCE_S", 0.01)
    monkeypatch.setattr(files, "END_PATIENCE_S", 0.01)
    caplog.set_level(logging.WARNING, logger="rallypoint")
    coordinator = house.open(join_info=JoinInfo(folder=str(tmp_path)), workers_max=2)
    eyes = house.enter("observer", "eyes")
    server, worker, view = house.begin()
    worker.link.send(Report(0, 0, 1.0, 1.0, 1, generation=view.generation))
    until(lambda: coordinator._shell._kept)  # it has begun, and the journal knows
    house.settle()
    answers = threading.Event()
    save = coordinator._journal.save
    monkeypatch.setattr(coordinator._journal, "save", lambda state: (answers.wait(), save(state)))
    try:
        other = house.enter("worker", "worker1")
        other.link.send(Propose(record()))
        assert other.next(NewView), "a view is published without the disk"
        said = eyes.next(Say, lambda said: "journal" in said.text).text
        assert "cannot be written (its disk has not answered for 0.01 s): the job goes on" in said
        coordinator.abort("somebody wants it so")
        for member in (server, worker, other):
            assert member.next(Aborted) == Aborted("somebody wants it so")
        assert coordinator.wait() == "somebody wants it so"
        server.link.close()
        assert ends_in_time(coordinator), "the end of the job waits for the disk"
    finally:
        answers.set()
    assert [entry.message for entry in caplog.records] == [
        f"given up: the journal {tmp_path}/journal.sqlite. The job is over, and the store has not answered for 0.01 s"
    ]


def test_a_job_goes_on_and_can_be_ended_while_nothing_can_be_added_to_its_log(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log is a pipe that nobody reads: a write to it hangs."""
    monkeypatch.setattr(files, "END_PATIENCE_S", 0.01)
    caplog.set_level(logging.WARNING, logger="rallypoint")
    os.mkfifo(tmp_path / "events.jsonl")
    reader = os.open(tmp_path / "events.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    try:
        coordinator = house.open(join_info=JoinInfo(folder=str(tmp_path)))
        eyes = house.enter("observer", "eyes")
        server, worker, view = house.begin()
        for _ in range(100):  # more than a pipe holds
            coordinator.say("words " * 1000)
        coordinator.say("the last of many")
        assert eyes.next(Say, lambda said: said.text == "the last of many")
        house.finish(worker, view)
        assert server.next(Finished) == Finished("worker0")
        server.link.close()
        assert ends_in_time(coordinator), "the end of the job waits for the log"
    finally:
        os.close(reader)  # a write to it fails now
    assert (
        f"given up: the event log {tmp_path}/events.jsonl. The job is over, and the store has not answered for 0.01 s"
    ) in [entry.message for entry in caplog.records]


def test_a_log_whose_disk_hangs_keeps_some_events_and_counts_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="rallypoint")
    monkeypatch.setattr(events_module, "_MOST_WAITING", 3)
    entered, answers, write = threading.Event(), threading.Event(), os.write

    def hangs(descriptor: int, data: bytes) -> int:
        entered.set()
        assert answers.wait(PATIENCE_S)
        return write(descriptor, data)

    monkeypatch.setattr(events_module.os, "write", hangs)
    log = EventLog(str(tmp_path))
    log.write(Say("0"))
    assert entered.wait(PATIENCE_S)
    for number in range(1, 6):
        log.write(Say(str(number)))
    answers.set()
    end_threads(log.stop())
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["text"] for line in lines] == ["0", "1", "2", "3"]
    assert [entry.message.rpartition("jsonl ")[2] for entry in caplog.records] == [
        "cannot be written, the job goes on: its disk does not answer", "is written again: 2 events are missing",
    ]  # fmt: skip


def test_a_coordinator_killed_at_any_moment_of_its_start_leaves_a_journal_to_go_on_from(
    house: House, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    house.open(join_info=JoinInfo(folder=str(tmp_path / "run")))
    _, _, view = house.begin()
    house.settle()
    before = house.coordinator._journal.load()
    house.close()
    house.__init__()  # type: ignore[misc]
    moments: list[Path] = []

    class Watched(Journal):
        """What is on the disk before each statement: a SIGKILL there would leave it so."""

        def __init__(self, folder: str) -> None:
            super().__init__(folder)
            self._db.set_trace_callback(lambda _: self.keep())

        def keep(self) -> None:
            moments.append(tmp_path / f"killed{len(moments)}")
            shutil.copytree(tmp_path / "run", moments[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoordinatorService, "_journal_of", Watched)
        house.open(join_info=JoinInfo(folder=str(tmp_path / "run")))
        house.close()
        house.__init__()  # type: ignore[misc]
    assert len(moments) > 4
    assert before is not None
    for moment in moments:
        again = house.open(join_info=JoinInfo(folder=str(moment)))
        machine = again._shell.machine
        assert (machine.view, machine.record) == (view, before.record)
        assert machine.phase is Phase.RUNNING
        state = again._journal.load()
        assert state.epoch > before.epoch
        house.close()
        house.__init__()  # type: ignore[misc]


# ---- pauses ------------------------------------------------------------------------------------------------------


class Clock:
    """The real one, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_a_coordinator_that_was_paused_gives_nobody_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped and continued, or kept waiting by a disk: it was deaf, they were not silent."""
    clock = Clock()
    monkeypatch.setattr(service, "time", clock)
    monkeypatch.setattr(inbox, "time", clock)
    coordinator = house.open(heartbeat=4.0)
    server, worker, view = house.begin()
    clock.ahead = 100.0
    ticked = coordinator._shell.machine.course.now
    until(lambda: coordinator._shell.machine.course.now > ticked)
    house.settle()
    assert coordinator._shell.machine.view == view
    assert set(coordinator._shell.members) == {"server0", "worker0"}
    assert server.lost.empty()
    assert worker.lost.empty()
    assert coordinator._shell.machine.course.now - ticked < 4.0


def test_a_member_that_is_silent_for_a_heartbeat_is_given_up_all_the_same(house: House) -> None:
    house.open(heartbeat=0.4, workers_start=2)
    silent = house.call("worker", "worker0")  # it has said hello, and gives no sign of life
    assert "given up: no sign of life for 0." in refusal(silent)


def test_a_server_s_account_that_comes_after_the_last_word_is_written_down(house: House, tmp_path: Path) -> None:
    coordinator = house.open(join_info=JoinInfo(folder=str(tmp_path)))
    server, worker, view = house.begin()
    house.finish(worker, view)
    assert server.next(Finished) == Finished("worker0")
    (closes := threading.Thread(target=coordinator.close)).start()
    server.link.send(protocol.Accounted(6, 0, 0, 0))
    server.link.close()  # as a server does when the job is over
    closes.join(PATIENCE_S)
    assert "Accounted" in (tmp_path / "events.jsonl").read_text()


def test_whoever_closes_a_coordinator_waits_for_servers_without_looking_at_the_clock(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = house.open()
    server, worker, view = house.begin()
    house.finish(worker, view)
    assert server.next(Finished) == Finished("worker0")
    waits, looked = threading.Event(), threading.Event()
    hear_out = coordinator._hear_servers_out

    def waiting(deadline: float) -> None:
        waits.set()
        hear_out(deadline)

    class NoSleep(Clock):
        def sleep(self, seconds: float) -> None:
            looked.set()
            time.sleep(seconds)

    monkeypatch.setattr(coordinator, "_hear_servers_out", waiting)
    monkeypatch.setattr(service, "time", NoSleep())
    monkeypatch.setattr(service, "_FAREWELL_S", LONG)
    (closes := threading.Thread(target=coordinator.close)).start()
    assert waits.wait(PATIENCE_S)
    looked.wait(0.1)  # without the mend it looks at once; with it there is nothing to wait for
    server.link.close()
    closes.join(PATIENCE_S)
    assert not closes.is_alive()
    assert not looked.is_set()
