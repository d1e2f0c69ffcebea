"""Connections share what their process's port is measured to carry."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from rallypoint.core.plan.port import PACE, PortPacer, Sent
from rallypoint.errors import LinkError
from rallypoint.net.kernel import SO_MAX_PACING_RATE, sent_of
from rallypoint.net.sampling import Port
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import LEAST_PACE, Connection, Limits
from support.netlab import Netlab

PATIENCE_S = 60.0
LAB_MBIT = 50.0


class Link:
    """A connection, as a port knows it."""

    def __init__(self, *, local: bool = False, tells: bool = True) -> None:
        self.local, self.tells, self.paces = local, tells, list[int]()

    def sent(self) -> Sent | None:
        return Sent(0, 0.0, waits=False) if self.tells else None

    def pace(self, rate: int) -> None:
        self.paces.append(rate)

    @property
    def now(self) -> int:
        return self.paces[-1] if self.paces else 0


class Knowing(PortPacer):
    """Finds 1,000,000 bytes a second at its first look, and tells the test."""

    def __init__(self) -> None:
        super().__init__()
        self.rested, self.parts = threading.Event(), list[float]()

    def look(self, now: float, sent: Mapping[Any, Sent]) -> float:
        self.rate, self.parts = 1e6, sorted(one.part for one in sent.values())
        return 1e6

    def rest(self) -> None:
        self.rested.set()


def until_paced(*links: Link) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not all(link.now for link in links):
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_each_gets_its_part_one_that_comes_later_too_and_the_thread_ends_with_the_last() -> None:
    pacer = Knowing()
    port, one, other, late = Port(pacer), Link(), Link(), Link()
    port.share(one, 0.25)
    port.share(other, 0.75)
    until_paced(one, other)
    assert (one.now, other.now) == (250_000, 750_000)
    port.share(late, 0.5)
    assert late.now == 500_000
    port.share(one, 0.1)
    assert one.now == 100_000
    port.share(one, 0.001)
    assert one.now == LEAST_PACE
    for link in (one, other):
        port.share(link, 0.0)
        assert link.now == 0
    assert not pacer.rested.is_set()
    port.share(late, 0.0)
    assert pacer.rested.wait(PATIENCE_S)
    port.share(late, 0.0)  # once more: as when a connection is closed twice


def test_the_pacer_is_told_the_parts_and_where_a_system_tells_nothing_the_thread_ends_for_good() -> None:
    pacer = Knowing()
    port, one, other = Port(pacer), Link(), Link()
    port.share(one, 0.25)
    until_paced(one)
    assert pacer.parts == [0.25]
    port.share(one, 0.0)
    assert pacer.rested.wait(PATIENCE_S)
    blinded = Knowing()
    blind, silent = Port(blinded), Link(tells=False)
    blind.share(silent, 0.5)
    assert blinded.rested.wait(PATIENCE_S)
    blind.share(other, 0.5)
    assert not [thread for thread in threading.enumerate() if thread.name == "port"]
    assert other.now == 0


def test_while_one_stays_on_the_host_nobody_is_paced() -> None:
    pacer = Knowing()
    port, far, near = Port(pacer), Link(), Link(local=True)
    port.share(far, 0.5)
    until_paced(far)
    port.share(near, 0.5)
    assert (far.now, near.now) == (0, 0)
    assert pacer.rested.wait(PATIENCE_S)
    port.share(near, 0.0)
    until_paced(far)
    port.share(far, 0.0)


def test_connections_of_one_host_start_no_thread() -> None:
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near, far = transport.connect(listener.address, 5.0), listener.accept()
    for end in (near, far):
        end.share_port(0.5)
    assert not [thread for thread in threading.enumerate() if thread.name == "port"]
    for end in (near, far, listener):
        end.close()
    near.share_port(0.5)  # a closed one


class Told:
    """A connection that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def limit_in_flight(self, nbytes: int) -> None:
        self.calls.append(("in flight", nbytes))

    def pace(self, rate: int) -> None:
        self.calls.append(("pace", rate))

    def share_port(self, part: float) -> None:
        self.calls.append(("part", part))


def told(limits: Limits, before: Limits | None = None) -> list[tuple[str, float]]:
    connection: Any = Told()
    limits.set_on(connection, before)
    return list(connection.calls)


def test_a_pace_that_was_given_counts_and_not_the_port() -> None:
    assert Limits.of(0, 80.0, measured=True) == Limits(pace=10_000_000)
    assert Limits.of(0, 0.0, measured=True) == Limits(part=1.0)
    assert Limits.of(0, 0.0) == Limits()


def test_who_changes_between_both_ends_with_the_later_one() -> None:
    given, measured = Limits(pace=1000), Limits(part=0.5)
    assert told(measured, given) == [("pace", 0), ("part", 0.5)]
    assert told(given, measured) == [("part", 0.0), ("pace", 1000)]
    assert told(measured, measured) == []
    assert told(Limits(), measured) == [("part", 0.0)]


def test_the_part_of_a_link_is_an_equal_one_unless_another_is_known() -> None:
    assert Limits(part=1.0).shared(4).part == 0.25
    assert Limits(part=1.0).shared(4, 0.4).part == 0.4
    assert Limits().shared(4, 0.4).part == 0.0


def _sends_until_paced(ends: list[Connection], peers: list[Connection]) -> list[int]:
    """Send on all of them at once until the kernel has a pace for each. Returns those, in bytes a second."""
    payload, stop = memoryview(bytes(64 << 10)), threading.Event()

    def send(end: Connection) -> None:
        while not stop.is_set():
            end.send(b"", payload)
        end.finish()

    def receive(peer: Any) -> None:
        room = memoryview(bytearray(1 << 20))
        with contextlib.suppress(LinkError):  # the stream has ended
            while True:
                peer.recv_some(room)

    threads = [threading.Thread(target=send, args=(end,)) for end in ends]
    threads += [threading.Thread(target=receive, args=(peer,)) for peer in peers]
    for thread in threads:
        thread.start()
    paces: list[int] = []
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not all(0 < pace < 1 << 31 for pace in paces or [0]):
        time.sleep(0.05)
        paces = [end._socket.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) for end in ends]  # type: ignore[attr-defined]
    stop.set()
    for thread in threads:
        thread.join()
    return paces


@pytest.mark.netns
def test_links_of_a_port_of_50_mbit_are_paced_at_their_parts_of_it() -> None:
    with Netlab(hosts=3, rate_mbit=LAB_MBIT) as lab:
        accepting: list[Any] = [None, None]

        def accept(index: int, ready: list[threading.Event], addresses: list[str]) -> None:
            lab.hosts[1 + index].enter()
            listener = TcpTransport().listen(f"{lab.hosts[1 + index].address}:0")
            addresses[index] = listener.address
            ready[index].set()
            accepting[index] = listener.accept()
            listener.close()

        found: list[int] = []

        def dial() -> None:
            lab.hosts[0].enter()
            ready, addresses = [threading.Event(), threading.Event()], ["", ""]
            listening = [threading.Thread(target=accept, args=(index, ready, addresses)) for index in range(2)]
            for thread in listening:
                thread.start()
            assert all(event.wait(PATIENCE_S) for event in ready)
            transport = TcpTransport()
            ends = [transport.connect(address, PATIENCE_S) for address in addresses]
            for thread in listening:
                thread.join()
            ends[0].share_port(0.25)
            ends[1].share_port(0.75)
            found.extend(_sends_until_paced(ends, accepting))
            for end in (*ends, *accepting):
                end.close()

        (dialing := threading.Thread(target=dial)).start()
        dialing.join()
    carried = LAB_MBIT * 1e6 / 8 * 1448 / 1514  # headers take the rest
    assert found[0] == pytest.approx(0.25 * PACE * carried, rel=0.1)
    assert found[1] == pytest.approx(3 * found[0], rel=0.001)


class Telling:
    """A socket of which the kernel says this: struct tcp_info of linux/tcp.h, up to tcpi_sndbuf_limited."""

    def __init__(self, told: bytes) -> None:
        self.told = told

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self.told[:nbytes]


def test_the_time_in_which_a_window_or_a_buffer_was_what_held_back_does_not_count() -> None:
    words = [0] * 24  # of 32 bits, after 8 bytes
    longs = [0, 0, 5000, 0]  # tcpi_pacing_rate, tcpi_max_pacing_rate, tcpi_bytes_acked, tcpi_bytes_received
    more = [0, 0, 7, 0, 0, 0]  # tcpi_segs_out, tcpi_segs_in, tcpi_notsent_bytes, tcpi_min_rtt, ...
    rates = [0, 9_000_000, 1_000_000, 500_000]  # tcpi_delivery_rate, then busy, window, buffer in microseconds
    told = struct.pack("=8x24I4Q6I4Q", *words, *longs, *more, *rates)
    sock: Any = Telling(told)
    assert sent_of(sock) == Sent(5000, 7.5, waits=True)
    cut: Any = Telling(told[:150])
    assert sent_of(cut) is None


def test_the_kernel_says_what_was_acknowledged() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("TCP_INFO as here is Linux's")
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near, far = transport.connect(listener.address, 5.0), listener.accept()
    near.send(b"x" * 1000)
    far.recv_into(memoryview(bytearray(1000)))
    deadline = time.monotonic() + PATIENCE_S
    while (sent := near.sent()) is None or sent.acknowledged < 1000:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert 1000 <= sent.acknowledged <= 1001  # a kernel counts the first packet of the connection too
    for end in (near, far, listener):
        end.close()
    assert near.sent() is None
