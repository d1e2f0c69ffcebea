"""A member's link to the coordinator: signs of life, coordinators that come and go, words that wait for the next."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from msgspec.structs import replace as replace_struct

from rallypoint.core import protocol
from rallypoint.core.protocol import Admitted, Beat, Challenge, Done, GiveUp, Hello, Knows, Message, Say, Welcome
from rallypoint.core.view import View, ViewNumber
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError
from rallypoint.net import member
from rallypoint.net.channel import Channel
from rallypoint.net.frames import HEADER_BYTES, Header, Kind, pack
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Identity, ticket_for
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection, InprocTransport, Listener, Transport
from support.beside import raising, until
from support.transports import Beside, receive

PATIENCE_S = 60.0
TOKEN = "a token that nobody guesses"
SECRET = b"the secret of this coordinator"
LONG = 1000.0  # a heartbeat that never comes, so that only what a test is about is heard


@dataclass
class Coordinator:
    """The other side: says only what the test says, and keeps what it hears."""

    transport: Transport
    address: str = "127.0.0.1:0"
    token: str = TOKEN
    heartbeat: float = LONG
    joined: queue.SimpleQueue[tuple[Channel, Hello]] = field(default_factory=queue.SimpleQueue)
    living: float = 60.0
    heard: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    ended: queue.SimpleQueue[Channel] = field(default_factory=queue.SimpleQueue)
    reads: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.reads.set()
        me = Identity("coordinator", "", self.token, secret=SECRET)
        self.gate = Gate(self.transport, self.address, me, self._welcome, self._serve)
        self.address = self.gate.address

    def _welcome(self, hello: Hello) -> Welcome:
        return Welcome(heartbeat=self.heartbeat, living=self.living)

    def member(self) -> tuple[Channel, Hello]:
        return self.joined.get(timeout=PATIENCE_S)

    def hear(self) -> Message:
        return self.heard.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.gate.close()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        self.joined.put((channel, hello))
        try:
            while True:
                self.reads.wait(PATIENCE_S)
                self.heard.put(protocol.decode(channel.receive_bytes(channel.receive_header())))
        finally:
            self.ended.put(channel)


class Member:
    """This side: a link, and what it has called."""

    def __init__(self, coordinator: Coordinator, role: str = "worker", token: str = TOKEN) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.admissions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[RallypointError] = queue.SimpleQueue()
        self.links: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.says_when_admitted: list[Message] = []
        self.link = CoordinatorLink(
            transport=coordinator.transport, address=coordinator.address, me=Identity(role, "worker0", token),
            handlers=Handlers(self.messages.put, self.lost.put, self._on_admitted, on_link=self.links.put),
            listening_at="127.0.0.1:7",
        )  # fmt: skip
        self.link.start()

    def _on_admitted(self, new: bool) -> None:
        for message in self.says_when_admitted:
            self.link.send(message)
        self.admissions.put(new)


@pytest.fixture(params=["tcp", "inproc"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return TcpTransport() if request.param == "tcp" else InprocTransport()


@pytest.fixture
def coordinator(transport: Transport) -> Iterator[Coordinator]:
    coordinator = Coordinator(transport)
    yield coordinator
    coordinator.close()


@pytest.fixture
def me(coordinator: Coordinator) -> Iterator[Member]:
    me = Member(coordinator)
    yield me
    me.link.close()


def admission(incarnation: int) -> Admitted:
    """The coordinator's word that admits worker0."""
    return Admitted(incarnation, ticket_for(SECRET, "worker", "worker0", incarnation))


def admit(coordinator: Coordinator, me: Member, incarnation: int) -> tuple[Channel, bool]:
    """The member's next joining is accepted: its channel, and whether it takes itself for somebody new."""
    channel, _ = coordinator.member()
    channel.send_message(admission(incarnation))
    return channel, me.admissions.get(timeout=PATIENCE_S)


def until_lost(me: Member) -> None:
    """Until the link has noticed that the coordinator is away: from then on what is said waits."""
    until(lambda: not me.link.admitted)


def test_of_what_it_says_to_a_coordinator_that_does_not_read_only_so_much_waits(
    coordinator: Coordinator, me: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, _ = admit(coordinator, me, 3)
    coordinator.reads.clear()
    monkeypatch.setattr(me.link._channel._outbox._backlog, "most", 100_000)
    most = 0
    while not me.link._channel._last_word:
        me.link.send(Say("x" * 400))
        most = max(most, me.link._channel.waiting_bytes)
    assert most < 100_000
    coordinator.reads.set()  # it reads all that was on its way, and then that the connection is ended
    while isinstance(said := coordinator.hear(), Say | Knows):  # what it knows is said by another thread meanwhile
        pass
    assert isinstance(said, protocol.Refused)
    channel.connection.close()
    _, again = coordinator.member()
    assert again.incarnation == 3


def test_a_process_has_one_name_on_all_of_its_connections_and_no_other_has_it(
    coordinator: Coordinator, me: Member
) -> None:
    channel, first = coordinator.member()
    channel.connection.close()  # before it has heard that it is admitted
    _, again = coordinator.member()
    assert (again.incarnation, again.process) == (0, first.process)
    other = Member(coordinator)
    assert len(coordinator.member()[1].process) == len(first.process) > 8
    assert other.link._process != first.process
    other.link.close()


def test_it_joins_and_hands_over_what_comes_in_order(coordinator: Coordinator, me: Member) -> None:
    channel, hello = coordinator.member()
    assert (hello.role, hello.id, hello.address, hello.incarnation) == ("worker", "worker0", "127.0.0.1:7", 0)
    channel.send_message(admission(3))
    assert me.admissions.get(timeout=PATIENCE_S) is True, "it had no birth number: it is new"
    for text in "abc":
        channel.send_message(Say(text))
    assert [me.messages.get(timeout=PATIENCE_S) for _ in "abc"] == [Say("a"), Say("b"), Say("c")]
    assert me.link.incarnation == 3


def test_the_last_reports_are_sent_again_over_the_next_link_before_what_waits(
    coordinator: Coordinator, me: Member
) -> None:
    """The link may have been broken already when they were sent."""
    generation = ViewNumber(1, 2)

    def report(step: int, replica: int = 0) -> protocol.Report:
        return protocol.Report(step, replica, 1.0, 1.0, 1, generation=generation)

    channel, _ = admit(coordinator, me, 3)
    for said in (report(4), report(5), report(5, 1), report(6)):
        me.link.send(said)
        assert coordinator.hear() == said
    channel.connection.close()
    until_lost(me)
    me.link.send(report(7))  # it waits
    channel, anew = admit(coordinator, me, 3)
    assert anew is False
    assert coordinator.hear() == Knows()
    again = [replace_struct(report(6), repeated=True)]
    assert [coordinator.hear() for _ in range(2)] == [*again, report(7)]
    channel.connection.close()
    until_lost(me)
    assert admit(coordinator, me, 4)[1] is True  # given up meanwhile: nothing of it counts
    me.link.send(Say("the next"))
    assert [coordinator.hear() for _ in range(2)] == [Knows(), Say("the next")]


def test_an_error_while_it_connects_again_is_told_and_leaves_no_member_that_lives_and_hears_nothing(
    coordinator: Coordinator, me: Member, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    channel, _ = admit(coordinator, me, 3)
    monkeypatch.setattr(me.link, "_join", raising(KeyError("of whatever kind")))
    channel.connection.close()
    lost = me.lost.get(timeout=PATIENCE_S)
    assert "the link to it has failed: KeyError('of whatever kind')" in str(lost)
    me.link._thread.join(PATIENCE_S)
    assert not me.link._thread.is_alive()
    assert not me.link.admitted  # it gives no sign of life any more
    assert caplog.records[-1].exc_info is not None


def test_an_error_in_what_a_sign_of_life_would_tell_keeps_none_of_them_away(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = Coordinator(transport, heartbeat=0.02)
    me = Member(coordinator)
    monkeypatch.setattr(me.link, "_handlers", replace(me.link._handlers, beat=raising(KeyError("of whatever kind"))))
    admit(coordinator, me, 3)
    beats = 0
    while beats < 3:
        beats += isinstance(coordinator.hear(), Beat)
    assert sum("signs of life" in record.message for record in caplog.records) == 1
    me.link.close()
    coordinator.close()


def test_it_gives_signs_of_life_once_it_is_admitted(transport: Transport) -> None:
    coordinator = Coordinator(transport, heartbeat=0.02)
    me = Member(coordinator)
    channel, _ = coordinator.member()
    me.link.send(Say("before anything else"))
    channel.send_message(Say("not admitted yet"))
    assert me.messages.get(timeout=PATIENCE_S) == Say("not admitted yet")
    assert coordinator.heard.empty(), "whoever is not admitted has nothing to say"
    channel.send_message(admission(1))
    assert [coordinator.hear() for _ in range(4)] == [Say("before anything else"), Beat(), Beat(), Beat()]
    me.link.close()
    coordinator.close()


@pytest.mark.parametrize("driver", ["broken", "stuck"])
def test_a_machine_that_cannot_be_read_silences_nobody(
    transport: Transport, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No free file descriptor for /proc, or a GPU's driver that does not answer."""
    tried, let_go = threading.Event(), threading.Event()

    class Sampler:
        def sample(self, now: float) -> None:
            tried.set()
            if driver == "stuck":
                let_go.wait(PATIENCE_S)
            raise OSError("Too many open files")

    monkeypatch.setattr(member, "sampler_for", lambda *args: Sampler())
    coordinator = Coordinator(transport, heartbeat=0.02)
    me = Member(coordinator)
    admit(coordinator, me, 1)
    assert tried.wait(PATIENCE_S)
    while not coordinator.heard.empty():
        coordinator.hear()
    assert [coordinator.hear() for _ in range(20)] == [Beat()] * 20
    me.link.close()
    let_go.set()
    coordinator.close()


def test_an_observer_gives_no_signs_of_life_and_may_speak_at_once(transport: Transport) -> None:
    coordinator = Coordinator(transport, heartbeat=0.004)
    me = Member(coordinator, role="observer")
    me.link.send(Say("one"))
    assert coordinator.hear() == Say("one")
    channel, _ = coordinator.member()
    before = me.link._channel
    channel.connection.close()  # and one that is lost comes back
    coordinator.member()
    until(lambda: me.link._channel is not before)
    me.link.send(Say("two"))
    assert coordinator.hear() == Say("two")
    me.link.close()
    coordinator.close()


def test_an_observer_is_told_when_its_link_breaks_and_when_it_is_made_again(transport: Transport) -> None:
    coordinator = Coordinator(transport)
    me = Member(coordinator, role="observer")
    channel, _ = coordinator.member()
    assert me.links.empty(), "the first link is no news"
    channel.connection.close()
    coordinator.member()
    assert [me.links.get(timeout=PATIENCE_S) for _ in range(2)] == [False, True]
    me.link.send(Say("again"))
    assert coordinator.hear() == Say("again")
    me.link.close()
    coordinator.close()


def test_what_is_said_before_the_admission_waits_for_it(coordinator: Coordinator, me: Member) -> None:
    channel, _ = coordinator.member()
    me.says_when_admitted = [Say("first of all")]
    me.link.send(Say("one"))
    me.link.send(Say("two"))
    channel.send_message(admission(1))
    me.admissions.get(timeout=PATIENCE_S)
    me.link.send(Say("three"))
    assert [coordinator.hear() for _ in range(4)] == [Say("one"), Say("two"), Say("first of all"), Say("three")]


def test_a_coordinator_that_comes_back_at_its_address_finds_its_member_again(
    coordinator: Coordinator, me: Member
) -> None:
    admit(coordinator, me, incarnation=4)
    coordinator.close()
    until_lost(me)
    me.link.send(Say("said to nobody"))
    again = Coordinator(coordinator.transport, coordinator.address)
    channel, hello = again.member()
    assert hello.incarnation == 4
    channel.send_message(admission(4))
    assert me.admissions.get(timeout=PATIENCE_S) is False, "the same process as before"
    assert again.hear() == Knows(None), "before anything else: which view it knows"
    assert again.hear() == Say("said to nobody")
    me.link.send(Done())
    assert again.hear() == Done()
    me.link.close()
    again.close()


def test_a_member_that_comes_back_says_the_newest_view_that_it_was_sent(coordinator: Coordinator, me: Member) -> None:
    channel, _ = admit(coordinator, me, incarnation=4)
    older, newest = (View(ViewNumber(1, n), ViewNumber(1, 1), (), (), (), {}) for n in (2, 3))
    for view in (newest, older):
        channel.send_message(news := protocol.NewView(view, proof=str(view.number).encode()))
        assert me.messages.get(timeout=PATIENCE_S) == news
    coordinator.close()
    until_lost(me)
    again = Coordinator(coordinator.transport, coordinator.address)
    again.member()
    assert again.hear() == Knows(newest, str(newest.number).encode()), "with the proof that came with it"
    me.link.close()
    again.close()


def test_as_somebody_new_what_the_former_one_said_is_dropped(coordinator: Coordinator, me: Member) -> None:
    admit(coordinator, me, incarnation=4)
    coordinator.close()
    until_lost(me)
    me.link.send(Say("by the former one"))
    me.says_when_admitted = [Say("by the new one")]
    again = Coordinator(coordinator.transport, coordinator.address)
    assert admit(again, me, incarnation=9)[1] is True
    assert again.hear() == Knows(None)
    assert again.hear() == Say("by the new one")
    me.link.send(Done())
    assert again.hear() == Done()
    assert me.link.incarnation == 9
    me.link.close()
    again.close()


def test_given_up_by_mistake_it_comes_back_as_somebody_new(coordinator: Coordinator, me: Member) -> None:
    channel, _ = admit(coordinator, me, incarnation=1)
    channel.refuse("given up: no sign of life for 3.1 s")
    assert admit(coordinator, me, incarnation=2)[1] is True
    assert me.lost.empty()
    assert me.messages.empty()


def test_a_refusal_before_the_admission_is_handed_over(coordinator: Coordinator, me: Member) -> None:
    channel, _ = coordinator.member()
    channel.refuse("the id worker0 is taken")
    assert me.messages.get(timeout=PATIENCE_S).reason == "the id worker0 is taken"  # type: ignore[union-attr]


@pytest.fixture
def impatient(coordinator: Coordinator) -> Iterator[Member]:
    """A member that the coordinator has told to go on without one for a moment only."""
    coordinator.living = 0.1
    me = Member(coordinator)
    yield me
    me.link.close()


def test_who_must_not_come_back_is_told_so_once(coordinator: Coordinator, impatient: Member) -> None:
    me = impatient
    admit(coordinator, me, incarnation=1)
    coordinator.close()
    other = Coordinator(coordinator.transport, coordinator.address, token="the token of another job")
    assert isinstance(error := me.lost.get(timeout=PATIENCE_S), AccessDenied)
    assert "without proving that it knows the job token" in str(error)
    me.link._thread.join(PATIENCE_S)
    assert not me.link._thread.is_alive()
    other.close()


def test_a_coordinator_that_stays_away_is_given_up(coordinator: Coordinator, impatient: Member) -> None:
    admit(coordinator, impatient, incarnation=1)
    coordinator.close()
    assert isinstance(impatient.lost.get(timeout=PATIENCE_S), LinkError)


def test_a_corrupt_frame_is_no_farewell_it_comes_back_before_it_closes(coordinator: Coordinator, me: Member) -> None:
    """A member that closes its connection has left: this one has not."""
    channel, _ = admit(coordinator, me, incarnation=1)
    sealed = bytearray(channel._sealer.seal(Header(Kind.CONTROL, length=4), memoryview(b"four")))
    sealed[60] ^= 1
    channel.connection.send(bytes(sealed), memoryview(b"four"))
    again, hello = coordinator.member()
    assert hello.incarnation == 1
    assert coordinator.ended.empty(), "the first connection still stands"
    again.send_message(admission(1))
    assert me.admissions.get(timeout=PATIENCE_S) is False
    assert coordinator.ended.get(timeout=PATIENCE_S) is channel
    assert me.lost.empty()


def test_what_is_no_message_ends_it(coordinator: Coordinator, me: Member) -> None:
    channel, _ = admit(coordinator, me, incarnation=1)
    channel.send(Header(Kind.CREDIT))
    assert isinstance(error := me.lost.get(timeout=PATIENCE_S), ProtocolError)
    assert "a CREDIT frame from the coordinator" in str(error)


def test_a_coordinator_that_is_not_there_is_waited_for(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    first = Coordinator(transport)
    first.close()
    late: list[Coordinator] = []
    real, tries = transport.connect, 0

    def connect(address: str, timeout: float) -> Connection:
        nonlocal tries
        tries += 1
        if tries == 3:
            late.append(Coordinator(transport, address))
        return real(address, timeout)

    transport.connect = connect  # type: ignore[method-assign]
    me = Member(first)  # which knows its address only
    late[0].member()
    assert tries == 3
    (said,) = caplog.messages
    assert said.startswith("nobody ")
    assert said.endswith("trying again for 30 s: the coordinator may not have been started yet, or its job is over")
    me.link.close()
    late[0].close()


def test_a_wrong_token_is_told_at_once_and_denied_when_nothing_better_comes(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(member, "NEWCOMER_TIMEOUT_S", 0.3)
    with pytest.raises(AccessDenied, match=r"either the token here is wrong \(--token-file or RALLYPOINT_TOKEN\)"):
        Member(coordinator, token="another")
    warned = [entry.message for entry in caplog.records if "trying again for" in entry.message]
    assert len(warned) == 1, "one line, though it tries more than once"


@dataclass
class Squatter:
    """Listens at a coordinator's address without the token, and tells everybody what it likes."""

    listener: Listener
    says: Message
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self.listener.close()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        kind = Kind.WELCOME if isinstance(self.says, Welcome) else Kind.REFUSE
        while True:
            try:
                connection = self.listener.accept()
            except LinkError:
                return
            with contextlib.suppress(LinkError):
                for name, message in ((Kind.CHALLENGE, Challenge(bytes(32), "coordinator")), (kind, self.says)):
                    data = protocol.encode(message) + bytes(0 if name is Kind.CHALLENGE else 32)
                    connection.send(pack(Header(name, length=len(data))), memoryview(data))
                    if name is Kind.CHALLENGE:
                        head = receive(connection, HEADER_BYTES)
                        receive(connection, int.from_bytes(head[40:44], "little"))
                data = protocol.encode(protocol.Finished("worker0"))  # what made a member save its model, once
                connection.send(pack(Header(Kind.CONTROL, length=len(data))), memoryview(data))
            connection.close()
            self.came.release()


@pytest.mark.parametrize("says", [Welcome(folder="/home/victim"), protocol.Refused("never come back", final=True)])
def test_squatter_a_member_keeps_waiting_for_the_coordinator_of_its_job(
    coordinator: Coordinator, me: Member, says: Message
) -> None:
    admit(coordinator, me, incarnation=4)
    welcome = me.link.welcome
    coordinator.close()
    squatter = Squatter(coordinator.transport.listen(coordinator.address), says)
    for _ in range(2):
        assert squatter.came.acquire(timeout=PATIENCE_S)
    assert me.link.welcome == welcome, "nothing of what he says is taken"
    squatter.close()
    again = Coordinator(coordinator.transport, coordinator.address)
    channel, hello = again.member()
    assert hello.incarnation == 4
    channel.send_message(admission(4))
    assert me.admissions.get(timeout=PATIENCE_S) is False, "the same member as before"
    assert me.messages.empty()
    assert me.lost.empty()
    again.close()


def test_squatter_a_newcomer_is_not_let_in_by_one(transport: Transport) -> None:
    absent = Coordinator(transport)
    absent.close()
    squatter = Squatter(transport.listen(absent.address), Welcome(folder="/home/victim"))
    joining: list[Member] = []
    with Beside(lambda: joining.append(Member(absent))):
        for _ in range(2):
            assert squatter.came.acquire(timeout=PATIENCE_S)
        assert joining == []
        squatter.close()
        again = Coordinator(transport, absent.address)
        again.member()
    joining[0].link.close()
    again.close()


def test_closing_says_what_is_queued_and_is_no_loss(coordinator: Coordinator, me: Member) -> None:
    channel, _ = admit(coordinator, me, incarnation=1)
    for number in range(100):
        me.link.send(Say(str(number)))
    channel.send_message(protocol.Finished())
    me.link.close()
    assert [coordinator.hear() for _ in range(100)] == [Say(str(number)) for number in range(100)]
    assert me.lost.empty()
    assert not me.link._thread.is_alive()
    assert not me.link._beat_thread.is_alive()


def test_closing_waits_a_while_for_the_coordinator_to_hear_why_a_member_gives_up(
    coordinator: Coordinator, me: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_FAREWELL_S", PATIENCE_S)
    admit(coordinator, me, incarnation=1)
    coordinator.close()
    until_lost(me)
    me.link.send(GiveUp("the loss is nan"))
    (closing := threading.Thread(target=me.link.close)).start()
    again = Coordinator(coordinator.transport, coordinator.address)
    try:
        channel, _ = again.member()
        channel.send_message(admission(1))
        assert [again.hear(), again.hear()] == [Knows(), GiveUp("the loss is nan")]
    finally:
        closing.join()
        again.close()


def test_closing_waits_no_longer_for_a_coordinator_that_stays_away(
    coordinator: Coordinator, me: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_FAREWELL_S", 0.1)
    admit(coordinator, me, incarnation=1)
    coordinator.close()
    until_lost(me)
    me.link.send(GiveUp("the loss is nan"))
    me.link.close()
    assert not me.link._thread.is_alive()


@pytest.mark.parametrize("there", [True, False], ids=["the coordinator is there", "it is away"])
def test_closing_joins_in_every_state(coordinator: Coordinator, me: Member, there: bool) -> None:
    admit(coordinator, me, incarnation=1)
    if not there:
        coordinator.close()
        until_lost(me)
    me.link.close()
    me.link.close()
    assert not me.link._thread.is_alive()
    assert me.lost.empty()


def test_a_coordinator_that_dies_while_it_lets_a_newcomer_in_is_waited_for(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the connection and the welcome: the next one takes the newcomer."""
    connect, cut = coordinator.transport.connect, 0

    def dies(address: str, timeout: float) -> Connection:
        nonlocal cut
        connection = connect(address, timeout)
        cut += 1
        if cut < 3:
            connection.close()
        return connection

    monkeypatch.setattr(coordinator.transport, "connect", dies)
    me = Member(coordinator)
    coordinator.member()
    assert cut == 3
    me.link.close()


def test_a_newcomer_does_not_wait_for_ever_for_one_that_lets_nobody_in(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "JOIN_TIMEOUT_S", 0.1)
    connect = coordinator.transport.connect

    def dies(address: str, timeout: float) -> Connection:
        connection = connect(address, timeout)
        connection.close()
        return connection

    monkeypatch.setattr(coordinator.transport, "connect", dies)
    with pytest.raises(LinkError):
        Member(coordinator)


@pytest.mark.parametrize("fault", [KeyError("a bug"), LinkError("not this link"), ValueError("a setting")])
def test_a_message_that_cannot_be_acted_on_is_a_loss_and_not_a_silence(
    coordinator: Coordinator, me: Member, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """With its thread gone and its signs of life going on, everybody would wait for this member for ever."""
    me.link._handlers = replace(me.link._handlers, on_message=raising(fault))
    channel, _ = admit(coordinator, me, incarnation=1)
    channel.send_message(Say("something"))
    assert isinstance(error := me.lost.get(timeout=PATIENCE_S), ProtocolError)
    assert str(error) == f"its Say message could not be acted on: {fault!r}"
    assert [entry.message for entry in caplog.records] == ["a Say message could not be acted on"]
    me.link._thread.join(PATIENCE_S)
    assert not me.link._thread.is_alive()
