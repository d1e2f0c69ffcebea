"""A coordinator's connections, which do not fill its inbox; its owner's clock; proposals, which are checked once."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from rallypoint.coordinator import connections as checks
from rallypoint.coordinator import inbox
from rallypoint.coordinator.connections import MOST_WAITING, Checks, Connections
from rallypoint.coordinator.inbox import Owner
from rallypoint.core.protocol import Beat, Hello, Message, Propose, Resize, Say, Welcome, decode, encode
from rallypoint.errors import ProtocolError
from rallypoint.net.channel import SEALED_BYTES, Channel
from rallypoint.net.handshake import COORDINATOR, Identity, introduce
from rallypoint.net.transport import InprocTransport
from support.beside import until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # its modules import one another by name

from scale_cluster import Size, record_for


def test_of_one_connection_only_so_many_messages_wait_for_the_owner() -> None:
    came: list[inbox.Event | inbox.Barrier] = []
    transport = InprocTransport()
    connections = Connections(
        transport, "gate", Identity("coordinator", ""), put=came.append, refusal=lambda hello: "", welcome=Welcome()
    )
    connection = transport.connect("gate", 1.0)
    _, keys = introduce(connection, Hello("observer", "eyes", "here", to=COORDINATOR), "")
    channel = Channel(connection, "the coordinator", keys)
    for _ in range(3 * MOST_WAITING):
        channel.send_message(Resize(2))
    for blocks in (1, 2, 3):
        until(lambda: len(came) == 1 + blocks * (MOST_WAITING + 1))  # noqa: B023
        messages = [event for event in came if isinstance(event, inbox.Received)]
        assert len(messages) == blocks * MOST_WAITING
        barrier = came[-1]
        assert isinstance(barrier, inbox.Barrier)
        barrier.reached()
    channel.close()
    until(lambda: isinstance(came[-1], inbox.Closed))
    connections.close()


def test_a_frame_that_was_changed_on_the_way_is_no_end_of_its_member() -> None:
    came: list[inbox.Event | inbox.Barrier] = []
    transport = InprocTransport()
    connections = Connections(
        transport, "gate", Identity("coordinator", ""), put=came.append, refusal=lambda hello: "", welcome=Welcome()
    )
    connection = transport.connect("gate", 1.0)
    introduce(connection, Hello("observer", "eyes", "here", to=COORDINATOR), "")
    connection.send(bytes(SEALED_BYTES))
    until(lambda: bool(came) and isinstance(came[-1], inbox.Closed))
    closed = came[-1]
    assert isinstance(closed, inbox.Closed)
    assert (closed.reason, closed.how) == ("a frame from it was changed on the way", inbox.End.LOST)
    connection.close()
    connections.close()


# ---- All workers of a job propose the same record: it is checked once, and a changed one is checked again ----


def proposal(workers: int = 2) -> Message:
    """A proposal as it comes from the network."""
    return decode(encode(Propose(record_for(Size(workers=workers, servers=1)))))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages that were checked in full."""
    seen: list[Message] = []
    whole = checks.checked

    def checked(message: Message, sender: Hello) -> Message:
        seen.append(message)
        return whole(message, sender)

    monkeypatch.setattr(checks, "checked", checked)
    return seen


def test_the_same_record_from_many_workers_is_checked_once(counted: list[Message]) -> None:
    check = Checks()
    for number in range(5):
        check.checked(proposal(), Hello("worker", f"w{number}", "host", ""))
    assert len(counted) == 1


def test_another_record_is_checked_again(counted: list[Message]) -> None:
    check, sender = Checks(), Hello("worker", "w0", "host", "")
    check.checked(proposal(2), sender)
    check.checked(proposal(3), sender)
    assert len(counted) == 2


def test_a_record_that_is_not_sound_is_refused_each_time_also_after_a_sound_one() -> None:
    check, sender = Checks(), Hello("worker", "w0", "host", "")
    sound = proposal()
    assert isinstance(sound, Propose)
    wrong = Propose(msgspec.structs.replace(sound.record, rounds=sound.record.rounds + 1))
    check.checked(sound, sender)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="something else than its settings"):
            check.checked(wrong, sender)


def test_who_may_not_propose_is_refused_with_a_record_that_is_known_to_be_sound() -> None:
    check = Checks()
    check.checked(proposal(), Hello("worker", "w0", "host", ""))
    with pytest.raises(ProtocolError, match="a Propose message from server s0"):
        check.checked(proposal(), Hello("server", "s0", "host", ""))
    check.checked(Beat(), Hello("server", "s0", "host", ""))


# ---- The owner's clock: ticks come although events never stop, and after the signs of life before them ----


PATIENCE_S = 60.0


def test_a_flood_of_events_does_not_stop_the_clock() -> None:
    ticks: list[inbox.Event] = []
    enough = threading.Event()

    def handle(event: inbox.Event) -> None:
        if isinstance(event, inbox.Ticked):
            ticks.append(event)
            if len(ticks) == 5:
                enough.set()
        elif not enough.is_set():
            owner.put(event)  # there is always another one

    owner = Owner(handle, 0.001)
    owner.start()
    owner.put(Say("again"))
    try:
        assert enough.wait(PATIENCE_S), f"{len(ticks)} ticks"
    finally:
        enough.set()
        owner.stop()


def test_what_has_come_before_a_tick_falls_due_is_handled_before_it() -> None:
    handled: list[str] = []
    busy, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def handle(event: inbox.Event) -> None:
        if isinstance(event, inbox.Ticked):
            handled.append("tick")
            if "a sign of life" in handled:
                over.set()
        elif isinstance(event, Say):
            handled.append(event.text)
            if event.text == "long work":
                busy.set()
                assert go_on.wait(PATIENCE_S)

    owner = Owner(handle, 0.01)
    owner.start()
    owner.put(Say("long work"))
    assert busy.wait(PATIENCE_S)
    began = time.monotonic()
    for _ in range(3):
        owner.put(Say("a sign of life"))
    while time.monotonic() < began + 0.02:  # until the next tick is due
        pass
    go_on.set()
    assert over.wait(PATIENCE_S)
    owner.stop()
    after = handled[handled.index("long work") + 1 :]
    assert after[:4] == [*["a sign of life"] * 3, "tick"]
