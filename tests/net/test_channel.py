"""A channel sends in order of urgency, says once when bytes may be reused, and ends cleanly."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest

from rallypoint.core.protocol import Admitted, Done, Message, NewView, Refused, Say, decode, encode, expect
from rallypoint.core.view import View, ViewNumber
from rallypoint.errors import CorruptFrame, LinkError, ProtocolError
from rallypoint.net.channel import SEALED_BYTES, Backlog, Channel, Rank, Sealer
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import dialers_keys, token_keys
from rallypoint.net.transport import FIRST_PIECE, PLAIN, InprocTransport
from support.transports import Beside

PATIENCE_S = 60.0
KEYS = dialers_keys(token_keys("a token"), bytes(32))


class Stuck:
    """A connection whose sends wait until `release`; it notes what was sent, and fails on demand."""

    peer, secured, lender = "stuck", PLAIN, None

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

    def begins(self, channel: Channel, rank: Rank = ()) -> None:
        """Frame 0 is under way: nothing overtakes it."""
        channel.send(frame(0), rank=rank)
        assert self.entered.acquire(timeout=PATIENCE_S)

    def goes(self, channel: Channel, frames: int) -> None:
        for _ in range(frames):
            self.release.release()
        assert channel.flush(PATIENCE_S)

    def recv_into(self, view: memoryview) -> None:
        raise LinkError("nothing comes")

    def set_timeout(self, seconds: float | None) -> None:
        pass

    def close(self) -> None:
        self.broken = True
        for _ in range(100):
            self.release.release()


def stuck_channel() -> tuple[Stuck, Channel]:
    stuck = Stuck()
    return stuck, Channel(stuck, "x", KEYS)


class Heard:
    """A connection on which somebody listens."""

    peer, secured, lender = "heard", PLAIN, None

    def __init__(self) -> None:
        self.bytes, self.came = b"", threading.Event()

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self.bytes += head + bytes(payload or b"")
        self.came.set()

    def close(self) -> None:
        pass


SECRET = b"a secret, or a ticket: 32 bytes."


@pytest.mark.parametrize(
    "message", [Admitted(7, SECRET), NewView(View(ViewNumber(), ViewNumber(), (), (), (), {}), {"server0": SECRET})]
)
def test_secrets_are_encrypted_on_their_way(message: Message) -> None:
    """Else who reads the network could act in a member's name: between members no token is asked for."""
    heard = Heard()
    channel = Channel(heard, "w0", KEYS)  # type: ignore[arg-type]
    channel.send_message(message)
    assert heard.came.wait(PATIENCE_S)
    channel.close()
    assert SECRET[:8] not in heard.bytes
    assert len(heard.bytes) == SEALED_BYTES + len(encode(message)) + 28


def test_secrets_arrive(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    one.send_message(Admitted(7, SECRET))
    assert other.receive_message(other.receive_header()) == Admitted(7, SECRET)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    transport = InprocTransport()
    listener = transport.listen("x")
    near = Channel(transport.connect("x", 1.0), "far", KEYS)
    far = Channel(listener.accept(), "near", KEYS.other_side())
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
    stuck, channel = stuck_channel()
    stuck.begins(channel)
    for number in (1, 2):
        channel.send(frame(number))
    for number in (10, 11):
        channel.send(frame(number), urgent=True)
    stuck.goes(channel, 5)
    assert stuck.sent == [0, 10, 11, 1, 2]
    channel.close()


def test_frames_of_a_lower_rank_overtake_those_of_a_higher_one() -> None:
    stuck, channel = stuck_channel()
    stuck.begins(channel, rank=(9,))
    for number, rank in ((1, (3, 2)), (2, (3, 1)), (3, (3, 1)), (4, ()), (5, (2, 9))):
        channel.send(frame(number), rank=rank)
    channel.send(frame(6), place="a", rank=(3, 0))
    channel.send(frame(7), place="a", rank=(9, 9))  # in its stead
    stuck.goes(channel, 8)
    assert stuck.sent == [0, 4, 5, 7, 2, 3, 1]
    channel.close()


def test_sent_is_called_once_for_each_frame_in_order() -> None:
    stuck, channel = stuck_channel()
    called: list[int] = []
    for number in range(5):
        channel.send(frame(number), sent=lambda number=number: called.append(number))  # type: ignore[misc]
    assert called == []
    stuck.goes(channel, 5)
    assert called == [0, 1, 2, 3, 4]
    channel.close()
    assert called == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", ["the link breaks", "it is closed"])
def test_sent_is_called_once_also_for_what_never_left(how: str) -> None:
    stuck, channel = stuck_channel()
    called: Counter[int] = Counter()

    def count(number: int) -> None:
        called[number] += 1

    for number in range(6):
        channel.send(frame(number), sent=lambda number=number: count(number), urgent=number == 5)  # type: ignore[misc]
    assert stuck.entered.acquire(timeout=PATIENCE_S)
    if how == "the link breaks":
        stuck.broken = True
        stuck.goes(channel, 1)
    channel.close()
    channel.send(frame(6), sent=lambda: count(6))
    assert called == Counter(range(7))
    assert stuck.sent == []


def test_a_newer_frame_replaces_the_one_that_waits_at_its_place() -> None:
    """Of each shard only the newest version waits for a slow follower; every shard gets its share of the link."""
    stuck, channel = stuck_channel()
    called: list[tuple[int, int]] = []
    payload = memoryview(bytes(1000))

    def version(shard: int, number: int, place: object = None) -> None:
        header = Header(Kind.VERSION, shard=10 * number + shard, length=1000)
        channel.send(header, payload, lambda: called.append((shard, number)), place=place)

    stuck.begins(channel)
    for number in (1, 2, 3):
        for shard in (0, 1, 2):
            version(shard, number, place=("version", shard))
            assert channel.waiting_bytes <= 4000
        if number == 1:
            version(7, 1)  # asked for by its number: never replaced
    version(7, 2)
    assert called == [(shard, number) for number in (1, 2) for shard in (0, 1, 2)], "those that were replaced"
    assert channel.waiting_bytes == 5000
    stuck.goes(channel, 6)
    assert stuck.sent == [0, 30, 31, 32, 17, 27]
    assert sorted(called) == sorted([(s, n) for n in (1, 2, 3) for s in (0, 1, 2)] + [(7, 1), (7, 2)])
    assert channel.waiting_bytes == 0
    channel.close()


def test_a_peer_that_reads_too_slowly_is_told_to_ask_anew(caplog: pytest.LogCaptureFixture) -> None:
    stuck, backlog = Stuck(), Backlog(4000, 100_000)
    channel = Channel(stuck, "w3", KEYS, backlog=backlog)
    dropped: list[int] = []
    payload = memoryview(bytes(920))  # 1000 with its 80 bytes of head

    def send(number: int, place: object = None) -> None:
        header = Header(Kind.ROWS, shard=number, length=920)
        channel.send(header, payload, lambda: dropped.append(number), place=place)

    stuck.begins(channel)
    for number in range(100, 110):
        send(number, place=number)  # a place for each: they are bounded by the number of places
    for number in range(1, 5):
        send(number)
    assert backlog.nbytes == 4000
    assert dropped == []
    send(5)
    assert sorted(dropped) == [1, 2, 3, 4, 5, *range(100, 110)], "what waited is released at once"
    send(6)
    assert dropped[-1] == 6, "nothing is queued any more"
    assert channel.waiting_bytes < 500, "but for the sentence"
    stuck.goes(channel, 2)
    assert len(stuck.sent) == 2
    assert stuck.broken, "the connection is closed after the sentence"
    assert "the link to w3 is ended" in caplog.text
    assert backlog.nbytes == 0
    channel.close()


def test_of_all_that_wait_those_with_little_are_spared() -> None:
    stuck = [Stuck() for _ in range(3)]
    backlog = Backlog(4000, 6000)
    channels = [Channel(connection, "x", KEYS, backlog=backlog) for connection in stuck]
    payload = memoryview(bytes(920))
    for channel, connection in zip(channels, stuck, strict=True):
        connection.begins(channel)
    for channel, count in zip(channels, (4, 2, 1), strict=True):
        for _ in range(count):
            channel.send(Header(Kind.ROWS, length=920), payload)
    assert [channel.waiting_bytes > 0 for channel in channels] == [True, True, True]
    assert backlog.nbytes == 7000, "too much in all; but the last has only a quarter of what one may have"
    channels[1].send(Header(Kind.ROWS, length=920), payload)
    assert channels[1].waiting_bytes < 500, "this one has more: it is ended"
    for channel in channels:
        channel.close()
    assert backlog.nbytes == 0


def test_flush_says_when_there_was_not_enough_time() -> None:
    stuck, channel = stuck_channel()
    assert channel.flush(0.0)
    channel.send(frame(0))
    assert not channel.flush(0.01)
    stuck.goes(channel, 1)
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


def test_what_was_not_sealed_is_a_corrupt_frame(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    near.connection.send(b"x" * SEALED_BYTES)
    with pytest.raises(CorruptFrame, match=r"^a frame from near has a wrong tag"):
        far.receive_header()


def test_a_payload_that_was_changed_is_a_corrupt_frame(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    sealer = Sealer(KEYS)
    for receive in (far.receive_bytes, lambda header: far.receive_into(memoryview(bytearray(4)))):
        near.connection.send(sealer.seal(Header(Kind.PUSH, length=4), memoryview(b"four")), memoryview(b"five"))
        header = far.receive_header()
        with pytest.raises(CorruptFrame, match=r"^the payload of a PUSH frame from near was changed on the way$"):
            receive(header)


def test_what_is_sealed_and_no_header_is_a_protocol_error(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    near.send(Header(Kind.CREDIT, length=1))  # a kind that carries nothing
    with pytest.raises(ProtocolError, match="a CREDIT frame of 1 bytes: at most 0 are allowed"):
        far.receive_header()


@pytest.mark.parametrize("came", [0, 3 << 20])
def test_a_length_is_believed_as_far_as_its_bytes_have_come(pair: tuple[Channel, Channel], came: int) -> None:
    near, far = pair
    sealed = near._sealer.seal(Header(Kind.CONTROL, length=64 << 20), memoryview(b"of other bytes"))
    near.connection.send(sealed, memoryview(bytes(came)))
    tracemalloc.start()
    try:
        with Beside(lambda: far.receive_bytes(far.receive_header())) as receiving:
            near.close()
            assert isinstance(receiving.outcome(), LinkError)
        assert tracemalloc.get_traced_memory()[1] <= 4 * (1 << 20) + 2 * came
    finally:
        tracemalloc.stop()


def test_a_payload_of_many_pieces_arrives_whole(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    for count in (0, 1, FIRST_PIECE - 1, FIRST_PIECE, FIRST_PIECE + 1, 5 * FIRST_PIECE + 3):
        payload = random.Random(count).randbytes(count)
        near.send(Header(Kind.CONTROL, length=count), memoryview(payload))
        assert far.receive_bytes(far.receive_header()) == payload


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


# ---- faults of our own ------------------------------------------------------------------------------------------


def raises() -> None:
    raise KeyError("a bug")


@pytest.mark.parametrize("how", ["a frame that cannot be packed", "a callback that fails"])
def test_a_fault_of_the_sending_thread_reaches_the_receiving_one(
    pair: tuple[Channel, Channel], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Else frames would be queued for ever, and nobody would know why none arrives."""
    near, _ = pair
    called: list[str] = []
    with Beside(near.receive_header) as receiving:
        if how == "a callback that fails":
            near.send(frame(1), sent=raises)
        else:
            near.send(frame(2**40), sent=lambda: called.append("first"))
        near.send(frame(2), sent=lambda: called.append("second"))
        error = receiving.outcome()
    assert isinstance(error, ProtocolError)
    assert str(error).startswith("what was queued for far could not be sent: ")
    assert isinstance(near.fault, Exception)
    assert near.flush(PATIENCE_S)
    near.close()
    assert called == (["second"] if how == "a callback that fails" else ["first", "second"])
    assert [entry.getMessage() for entry in caplog.records] == ["sending to far has failed"]


def test_callbacks_that_fail_keep_no_other_from_being_called() -> None:
    stuck, channel = stuck_channel()
    called: list[int] = []
    stuck.begins(channel)
    channel.send(frame(1), sent=raises)
    channel.send(frame(2), sent=lambda: called.append(2))
    channel.close()
    assert called == [2]
