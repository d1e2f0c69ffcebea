"""What a transport counts: the bytes of its connections, also of those that are gone."""

from __future__ import annotations

import pytest

from rallypoint.errors import LinkError
from rallypoint.net.tcp import TcpTransport
from rallypoint.observe.usage import Traffic


def test_what_ended_is_kept_and_counted_once() -> None:
    traffic = Traffic()
    one, other = traffic.opened(), traffic.opened()
    one.sent, one.received, other.sent = 5, 7, 100
    assert traffic.totals() == (105, 7)
    traffic.closed(one)
    traffic.closed(one)
    assert traffic.totals() == (105, 7)
    other.sent += 1
    assert traffic.totals() == (106, 7)


def test_tcp_counts_both_ways_and_keeps_the_count_of_a_closed_connection() -> None:
    here, there = TcpTransport(), TcpTransport()
    listener = there.listen("127.0.0.1:0")
    connection = here.connect(listener.address, 10.0)
    accepted = listener.accept()
    try:
        connection.send(b"head", memoryview(b"payload"))
        accepted.recv_into(memoryview(bytearray(11)))
        accepted.send(b"ok")
        connection.recv_into(memoryview(bytearray(2)))
    finally:
        connection.close()
        with pytest.raises(LinkError):
            accepted.recv_into(memoryview(bytearray(1)))
        accepted.close()
        listener.close()
    assert here.traffic.totals() == (11, 2)
    assert there.traffic.totals() == (2, 11)
    assert not here.traffic._open
    assert not there.traffic._open
