"""A link is lost when the other machine is gone, and not because a process there does not read for a while."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rallypoint.errors import LinkClosed, LinkError, LinkReset
from rallypoint.net import tcp
from rallypoint.net.tcp import ENDED, TcpConnection, TcpTransport, state_of
from support.netlab import Netlab

PATIENCE_S = 30.0
MUCH = 16 << 20  # more than the kernels of both ends take


def test_a_reader_that_does_not_read_for_longer_than_a_dead_machine_takes_loses_no_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that waits for a view, a script that holds the interpreter's lock: the kernel answers meanwhile."""
    monkeypatch.setattr(tcp, "DEAD_AFTER_S", 1.0)
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near, far = transport.connect(listener.address, PATIENCE_S), listener.accept()
    failures: list[BaseException] = []

    def end(receives: bool) -> None:
        try:
            if receives:
                near.recv_into(memoryview(bytearray(2)))
            else:
                near.send(b"x", memoryview(bytearray(MUCH)))
        except LinkError as error:
            failures.append(error)

    threads = [threading.Thread(target=end, args=(receives,), daemon=True) for receives in (False, True)]
    for thread in threads:
        thread.start()
    time.sleep(3.5)  # the limit, and three looks of each thread
    got = memoryview(bytearray(1 + MUCH))
    far.recv_into(got)
    far.send(b"ok")
    for thread in threads:
        thread.join(PATIENCE_S)
    for one in (near, far, listener):
        one.close()
    assert failures == []


@pytest.fixture
def cut_off() -> Iterator[tuple[Any, Any]]:
    """The ends of a connection between two hosts, and what cuts the network between them."""
    with Netlab(hosts=2) as lab:
        ends: dict[str, Any] = {}
        ready = threading.Event()

        def accept() -> None:
            lab.hosts[1].enter()
            listener = ends["listener"] = TcpTransport().listen(f"{lab.hosts[1].address}:0")
            ready.set()
            ends["far"] = listener.accept()

        def dial() -> None:
            lab.hosts[0].enter()
            assert ready.wait(PATIENCE_S)
            ends["near"] = TcpTransport().connect(ends["listener"].address, PATIENCE_S)

        threads = [threading.Thread(target=accept), threading.Thread(target=dial)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        yield ends["near"], lambda: lab.hosts[1].cut(lab.hosts[0])
        for name in ("near", "far", "listener"):
            ends[name].close()


@pytest.mark.some("nothing")
@pytest.mark.netns
@pytest.mark.parametrize("sends", ["nothing", "a little", "more than is read"])
def test_a_machine_that_is_gone_is_noticed_whatever_was_on_its_way(cut_off: tuple[Any, Any], sends: str) -> None:
    """By keepalives, by what stays unacknowledged, by unanswered probes of a full window."""
    near, cut = cut_off
    failures: list[BaseException] = []

    def send() -> None:
        try:
            near.send(b"x", memoryview(bytearray(MUCH)))
        except LinkError as error:
            failures.append(error)

    sending = threading.Thread(target=send, daemon=True)
    if sends == "more than is read":
        sending.start()
        time.sleep(0.5)  # the window is full
    cut()
    if sends == "a little":
        near.send(b"x")
    began = time.monotonic()
    with pytest.raises(LinkError, match="broke"):
        near.recv_some(memoryview(bytearray(1)))
    assert time.monotonic() - began < 12.0
    if sends == "more than is read":
        sending.join(PATIENCE_S)
        assert len(failures) == 1


# ---- How a connection ended: closed by a process, reset, or neither (a time-out says nothing about the process) ----


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
