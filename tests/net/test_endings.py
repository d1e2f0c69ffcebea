"""How a connection ended: closed by a process, reset, or neither (a time-out says nothing about the process)."""

from __future__ import annotations

import math
import socket
import struct

import pytest

from rallypoint.errors import LinkClosed, LinkError, LinkReset
from rallypoint.net import tcp
from rallypoint.net.tcp import ENDED, TcpConnection, state_of


@pytest.fixture
def ends() -> tuple[TcpConnection, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    return TcpConnection(here, "the peer"), there


def _ending(connection: TcpConnection) -> LinkError:
    with pytest.raises(LinkError) as raised:
        connection.recv_into(memoryview(bytearray(1)))
    connection.close()
    return raised.value


def test_a_peer_that_closes_or_dies_has_closed_it(ends: tuple[TcpConnection, socket.socket]) -> None:
    here, there = ends
    there.close()
    assert type(_ending(here)) is LinkClosed


@pytest.mark.parametrize("sends", [False, True])
def test_a_reset_says_so_also_if_the_sending_thread_was_told_of_it(
    ends: tuple[TcpConnection, socket.socket], sends: bool
) -> None:
    here, there = ends
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    if sends:
        with pytest.raises(LinkError):
            here.send(b"x")  # this takes the socket's error with it
    assert type(_ending(here)) is LinkReset


@pytest.mark.parametrize(("answered", "kind"), [(0.9, LinkReset), (3.1, LinkError), (math.inf, LinkError)])
def test_a_reset_by_a_system_that_had_not_answered_for_seconds_is_no_death(
    ends: tuple[TcpConnection, socket.socket], answered: float, kind: type[LinkError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its TCP had given the connection up while the network did not carry."""
    here, there = ends
    monkeypatch.setattr(tcp, "state_of", lambda sock: (ENDED, answered))
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    assert type(_ending(here)) is kind


def test_the_system_tells_how_long_ago_the_other_one_has_answered(ends: tuple[TcpConnection, socket.socket]) -> None:
    here, there = ends
    established, seconds = state_of(here._socket)
    there.close()
    assert (established, here._socket.recv(1)) == (1, b"")
    assert 0.0 <= seconds < 60.0
    here.close()
    assert state_of(here._socket) == (0, math.inf)


def test_a_time_out_is_neither(ends: tuple[TcpConnection, socket.socket]) -> None:
    here, there = ends
    here.set_timeout(0.01)
    assert type(_ending(here)) is LinkError
    there.close()
