"""A member's beats say how fast servers take what it sends, from what TCP has counted."""

from __future__ import annotations

import math
import socket
import threading

import msgspec
import pytest

from rallypoint.core.protocol import MOST_PACED, Beat, decode, encode
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.errors import ProtocolError
from rallypoint.net.sampling import Pacing
from rallypoint.net.tcp import TcpTransport
from rallypoint.observe.usage import LinkPace, Traffic

MIB = 1 << 20
VIEW = View(
    ViewNumber(1, 1), ViewNumber(1, 1), (Member("w0", "h"),), (Member("s0", "h", "a:1"), Member("s1", "h", "b:1")), (),
    {},
)


class Counters:
    """The connections of a transport that send what a test says."""

    def __init__(self) -> None:
        self.traffic, self.paces = Traffic(), dict[int, LinkPace]()
        self.pacing = Pacing(self.traffic)

    def open(self, address: str) -> int:
        number = len(self.paces)
        self.paces[number] = LinkPace()
        self.traffic.opened(address, pace=lambda: self.paces[number])
        return number

    def send(self, connection: int, nbytes: int, busy: float) -> None:
        before = self.paces[connection]
        self.paces[connection] = LinkPace(before.acknowledged + nbytes, before.busy + busy)

    def say(self, now: float, me: str = "w0") -> dict[str, tuple[float, float]]:
        return self.pacing.since_last(VIEW, me, now)


def test_a_worker_says_what_each_server_took_and_for_how_much_of_the_time() -> None:
    links = Counters()
    slow, fast, elsewhere = links.open("a:1"), links.open("b:1"), links.open("c:1")
    assert links.say(10.0) == {}
    links.send(slow, MIB, 1.0)
    links.send(fast, MIB, 0.5)
    links.send(elsewhere, MIB, 0.5)
    assert links.say(12.0) == {"s0": (MIB / 2, 0.5), "s1": (MIB / 2, 0.25)}
    assert links.say(14.0) == {}


def test_little_says_nothing_and_nothing_is_busy_for_longer_than_there_was_time() -> None:
    links = Counters()
    first, second = links.open("a:1"), links.open("b:1")
    links.say(0.0)
    links.send(first, 1000, 0.5)
    links.send(second, MIB, 9.0)
    assert links.say(1.0) == {"s1": (MIB, 1.0)}


def test_a_server_says_of_itself_what_it_has_sent_to_all_who_follow_it() -> None:
    links = Counters()
    one, other = links.open(""), links.open("")
    links.say(0.0, "s1")
    links.send(one, MIB, 0.4)
    links.send(other, MIB, 0.5)
    assert links.say(1.0, "s1") == {"s1": (2 * MIB, 0.5)}
    links.send(one, MIB, 0.4)
    assert links.say(2.0, "w0") == {}  # who is no server has nobody who follows


def test_a_connection_that_is_new_counts_from_its_first_beat_on() -> None:
    links = Counters()
    links.say(0.0)
    links.send(links.open("a:1"), MIB, 0.5)
    assert links.say(1.0) == {}


def test_tcp_counts_what_was_acknowledged() -> None:
    transport = TcpTransport()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        connection = transport.connect(address, timeout=10.0)
        accepted, _ = listener.accept()

        def read() -> None:
            left = 4 * MIB
            while left:
                left -= len(accepted.recv(min(left, MIB)))

        (reader := threading.Thread(target=read)).start()
        connection.send(b"", memoryview(bytes(4 * MIB)))
        reader.join()
        (pace,) = transport.traffic.paces().values()
        connection.close()
        accepted.close()
    if not pace.acknowledged:
        pytest.skip("this system does not tell")
    assert pace.acknowledged > MIB
    assert pace.busy >= 0  # in ticks of the kernel: loopback may take less than one


@pytest.mark.parametrize(
    "paced",
    [
        {"s0": (-1.0, 0.5)}, {"s0": (1.0, 1.5)}, {"s0": (1e16, 0.5)}, {"s0": (math.inf, 0.5)}, {"s\nx": (1.0, 0.5)},
        {f"s{index}": (1.0, 0.5) for index in range(MOST_PACED + 1)},
    ],
)  # fmt: skip
def test_a_beat_that_cannot_be_is_refused(paced: dict[str, tuple[float, float]]) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(Beat(paced=paced)))
    assert decode(encode(Beat(paced={"s0": (1.0, 0.5)}))) == Beat(paced={"s0": (1.0, 0.5)})
