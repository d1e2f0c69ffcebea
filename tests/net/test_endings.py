"""How a connection ended: closed by a process, reset, or neither (a time-out says nothing about the process)."""

from __future__ import annotations

import socket
import struct

import pytest

from rallypoint.errors import LinkClosed, LinkError, LinkReset
from rallypoint.net.tcp import TcpConnection


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


def test_a_reset_says_so(ends: tuple[TcpConnection, socket.socket]) -> None:
    here, there = ends
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    assert type(_ending(here)) is LinkReset


def test_a_reset_that_the_sending_thread_was_told_of_is_no_closing(ends: tuple[TcpConnection, socket.socket]) -> None:
    here, there = ends
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    with pytest.raises(LinkError):
        here.send(b"x")  # this takes the socket's error with it
    assert type(_ending(here)) is LinkReset


def test_a_time_out_is_neither(ends: tuple[TcpConnection, socket.socket]) -> None:
    here, there = ends
    here.set_timeout(0.01)
    assert type(_ending(here)) is LinkError
    there.close()
