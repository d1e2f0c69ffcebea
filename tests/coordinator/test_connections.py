"""A coordinator's connections: one that never stops talking does not fill the inbox."""

from __future__ import annotations

from rallypoint.coordinator import inbox
from rallypoint.coordinator.connections import MOST_WAITING, Connections
from rallypoint.core.protocol import Hello, Resize, Welcome
from rallypoint.net.channel import SEALED_BYTES, Channel
from rallypoint.net.handshake import COORDINATOR, Identity, introduce
from rallypoint.net.transport import InprocTransport
from support.beside import until


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
