"""A channel sends in order of urgency, says once when bytes may be reused, and ends cleanly."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from rallypoint.errors import LinkError, ProtocolError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.inproc import InprocTransport
from rallypoint.net.messages import Done, Refused, Say, decode, expect
from rallypoint.testing.contracts.transports import Beside

PATIENCE_S = 20.0


class Stuck:
    """A connection whose sends wait until `release`; it notes what was sent, and fails on demand."""

    peer = "stuck"

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.entered = threading.Semaphore(0)
        self.release = threading.Semaphore(0)
        self.broken = False

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self.entered.release()
        assert self.release.acquire(timeout=PATIENCE_S)
        if self.broken:
            raise LinkError("broken")
        self.sent.append(int.from_bytes(head[16:20], "little"))

    def recv_into(self, view: memoryview) -> None:
        raise LinkError("nothing comes")

    def set_timeout(self, seconds: float | None) -> None:
        pass

    def close(self) -> None:
        self.broken = True
        for _ in range(100):
            self.release.release()


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    transport = InprocTransport()
    listener = transport.listen("x")
    near, far = Channel(transport.connect("x", 1.0), "far"), Channel(listener.accept(), "near")
    yield near, far
    for thing in (near, far, listener):
        thing.close()


def frame(number: int) -> Header:
    return Header(Kind.FETCH, shard=number)


def test_frames_and_payloads_arrive(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    near.send(Header(Kind.PUSH, shard=7, length=5), memoryview(b"12345"))
    header = far.receive_header()
    assert (header.kind, header.shard) == (Kind.PUSH, 7)
    place = bytearray(5)
    far.receive_into(memoryview(place))
    assert place == b"12345"


def test_messages_arrive(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    near.send_message(Say("a"))
    near.send_message(Done())
    assert decode(far.receive_bytes(far.receive_header())) == Say("a")
    assert decode(far.receive_bytes(far.receive_header())) == Done()


def test_urgent_frames_overtake_bulk_ones() -> None:
    stuck = Stuck()
    channel = Channel(stuck, "x")
    channel.send(frame(0))
    assert stuck.entered.acquire(timeout=PATIENCE_S)  # frame 0 is under way: nothing overtakes it
    for number in (1, 2):
        channel.send(frame(number))
    for number in (10, 11):
        channel.send(frame(number), urgent=True)
    for _ in range(5):
        stuck.release.release()
    assert channel.flush(PATIENCE_S)
    assert stuck.sent == [0, 10, 11, 1, 2]
    channel.close()


def test_sent_is_called_once_for_each_frame_in_order() -> None:
    stuck = Stuck()
    channel = Channel(stuck, "x")
    called: list[int] = []
    for number in range(5):
        channel.send(frame(number), sent=lambda number=number: called.append(number))  # type: ignore[misc]
    assert called == []
    for _ in range(5):
        stuck.release.release()
    assert channel.flush(PATIENCE_S)
    assert called == [0, 1, 2, 3, 4]
    channel.close()
    assert called == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", ["the link breaks", "it is closed"])
def test_sent_is_called_once_also_for_what_never_left(how: str) -> None:
    stuck = Stuck()
    channel = Channel(stuck, "x")
    called: Counter[int] = Counter()

    def count(number: int) -> None:
        called[number] += 1

    for number in range(6):
        channel.send(frame(number), sent=lambda number=number: count(number), urgent=number == 5)  # type: ignore[misc]
    assert stuck.entered.acquire(timeout=PATIENCE_S)
    if how == "the link breaks":
        stuck.broken = True
        stuck.release.release()
        assert channel.flush(PATIENCE_S)
    channel.close()
    channel.send(frame(6), sent=lambda: count(6))
    assert called == Counter(range(7))
    assert stuck.sent == []


def test_flush_says_when_there_was_not_enough_time() -> None:
    stuck = Stuck()
    channel = Channel(stuck, "x")
    assert channel.flush(0.0)
    channel.send(frame(0))
    assert not channel.flush(0.01)
    stuck.release.release()
    assert channel.flush(PATIENCE_S)
    channel.close()


def test_closing_ends_a_blocked_send(pair: tuple[Channel, Channel]) -> None:
    near, _ = pair
    big = memoryview(bytes(8 << 20))
    for _ in range(3):
        near.send(Header(Kind.PUSH, length=len(big)), big)
    near.close()
    near.close()


def test_closing_wakes_who_receives(pair: tuple[Channel, Channel]) -> None:
    near, _ = pair
    with Beside(near.receive_header) as receiving:
        near.close()
        assert isinstance(receiving.outcome(), LinkError)


def test_a_refusal_is_the_last_word(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    near.refuse("you know why")
    header = far.receive_header()
    assert header.kind is Kind.REFUSE
    assert expect(far.receive_bytes(header), Refused).reason == "you know why"
    with pytest.raises(LinkError):
        far.receive_header()


def test_what_is_no_header_is_a_protocol_error(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    near.connection.send(b"x" * 48)
    with pytest.raises(ProtocolError):
        far.receive_header()


def test_many_threads_may_send_at_once(pair: tuple[Channel, Channel]) -> None:
    near, far = pair

    def send(base: int) -> None:
        for number in range(200):
            near.send(frame(base + number), urgent=number % 3 == 0)

    with Beside(lambda: send(0)), Beside(lambda: send(1000)):
        got = [far.receive_header().shard for _ in range(400)]
    assert sorted(got) == [*range(200), *range(1000, 1200)]
    for base in (0, 1000):
        own = [shard for shard in got if base <= shard < base + 200]
        for urgent in (True, False):
            order = [shard for shard in own if ((shard - base) % 3 == 0) is urgent]
            assert order == sorted(order), "frames of one urgency keep their order"
