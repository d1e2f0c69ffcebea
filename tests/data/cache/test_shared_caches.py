"""Hosts that fetch from each other: each piece leaves the store once; who is dead, slow or hostile costs no sample."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from rallypoint.core.protocol import Caches, Found, Hello, Holder, NotFound, Wanted, Welcome
from rallypoint.data import peers as answering_module
from rallypoint.data import peers as asking_module
from rallypoint.data.cache import Cache, FilePiece, checksum
from rallypoint.data.files import File
from rallypoint.data.peers import Asking, BoundedConnections, Known, PeerAnswers, Roster
from rallypoint.errors import DataError, LinkError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Identity, introduce, ticket_for
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection

SIZE = 1000
FILE = File("memory://bucket/data.bin", "/bucket/data.bin", "data.bin", 100 * SIZE, "1")


def piece(number: int) -> FilePiece:
    return FilePiece(FILE.digest, number * SIZE, (number + 1) * SIZE)


def data_of(start: int, stop: int) -> bytes:
    return bytes(index // SIZE for index in range(start, stop))


class CountedStore:
    """Stands for `Files`: the bytes of FILE, counted."""

    def __init__(self) -> None:
        self.fetched = list[int]()
        self.fails = False

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        if self.fails:
            raise DataError("the store is down")
        self.fetched.append(start // SIZE)
        return data_of(start, stop)


class Host:
    """A host with a cache, which answers and asks."""

    def __init__(self, id: str, folder: Path, store: CountedStore) -> None:
        self.id, self.store = id, store
        self.cache = Cache(folder)
        self.me = Identity("worker", id, incarnation=1, secret=b"%-32s" % id.encode())
        self.transport, self.roster = TcpTransport(), Roster()
        self.answering = PeerAnswers(
            self.transport,
            "127.0.0.1:0",
            self.me,
            self.cache,
            [(store, [FILE])],  # type: ignore[list-item]
        )
        self.asking = Asking(self.transport, self.roster, self.cache.id)
        self.cache.join(self.asking.ask)

    @property
    def holder(self) -> Holder:
        return Holder(self.id, 1, self.answering.gate.address, self.cache.id)

    def tell(self, holders: list[Holder]) -> None:
        tickets = {one.id: ticket_for(b"%-32s" % one.id.encode(), "worker", self.id, 1) for one in holders}
        self.roster.tell(Known(self.id, 1, "host", Caches(tuple(holders), tickets)))

    def get(self, number: int) -> bytes:
        one = piece(number)
        return self.cache.get(one, lambda: self.store.fetch(FILE, one.start, one.stop))

    def close(self) -> None:
        self.asking.close()
        self.answering.close()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: Any) -> Iterator[Callable[[int], list[Host]]]:
    """Makes hosts that know each other, of one store. Nothing is compared with the store, except where a test asks."""
    monkeypatch.setattr(asking_module.secrets, "randbelow", lambda most: 1)
    with ExitStack() as made:

        def make(count: int) -> list[Host]:
            store = CountedStore()
            found = [Host(f"w{number}", tmp_path / f"cache{number}", store) for number in range(count)]
            for host in found:
                made.callback(host.close)
                host.tell([one.holder for one in found])
            return found

        yield make


class Hostile:
    """A member of the job that answers what it likes: with `answer(channel, wanted)`."""

    def __init__(self, host: Host, answer: Callable[[Channel, Wanted], None]) -> None:
        self._answer = answer
        host.answering.close()
        self.asked = 0
        self.gate = Gate(host.transport, "127.0.0.1:0", host.me, lambda hello: Welcome(), self._serve)
        self.holder = Holder(host.id, 1, self.gate.address, host.cache.id)

    def _serve(self, channel: Channel, hello: Hello) -> None:
        while True:
            wanted = channel.receive_message(channel.receive_header())
            assert isinstance(wanted, Wanted)
            self.asked += 1
            self._answer(channel, wanted)


def test_each_piece_leaves_the_store_once_whoever_reads_it_when(hosts: Any) -> None:
    four = hosts(4)
    for host in four:
        assert [host.get(number) for number in range(40)] == [data_of(n * SIZE, n * SIZE + SIZE) for n in range(40)]
    assert sorted(four[0].store.fetched) == list(range(40))


def test_hosts_that_read_at_the_same_time_fetch_each_piece_once_too(hosts: Any) -> None:
    four = hosts(4)
    begin = threading.Barrier(8)

    def read(host: Host) -> None:
        begin.wait()
        for number in range(20):
            assert host.get(number) == data_of(number * SIZE, number * SIZE + SIZE)

    threads = [threading.Thread(target=read, args=(host,)) for host in four for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(four[0].store.fetched) == list(range(20))


def test_the_pieces_are_spread_over_the_hosts(hosts: Any) -> None:
    four = hosts(4)
    first = [four[0].roster.read().order(piece(number).name)[0].id for number in range(400)]
    assert all(60 <= first.count(host.id) <= 140 for host in four)


def test_a_host_that_is_dead_costs_no_sample_and_is_left_alone(hosts: Any) -> None:
    one, dead = hosts(2)
    dead.answering.close()
    assert [one.get(number) for number in range(20)] == [data_of(n * SIZE, n * SIZE + SIZE) for n in range(20)]
    assert (one.asking.asked, one.asking.answered) == (1, 0)


def test_a_connection_that_ended_while_nobody_used_it_is_opened_anew_and_the_host_need_not_rest(hosts: Any) -> None:
    one, other = hosts(2)
    theirs = [number for number in range(40) if one.roster.read().order(piece(number).name)[0].id == other.id]
    for number in theirs[:3]:
        assert one.get(number) == data_of(number * SIZE, number * SIZE + SIZE)
        for connection, thread in list(other.answering.gate._open.items()):
            connection.close()
            thread.join()
    assert (one.asking.asked, one.asking.answered) == (3, 3)


def test_a_host_that_ends_each_connection_is_asked_twice_and_then_rests(hosts: Any) -> None:
    one, other = hosts(2)
    theirs = [number for number in range(60) if one.roster.read().order(piece(number).name)[0].id == other.id]

    def once(channel: Channel, wanted: Wanted) -> None:
        if hostile.asked > 1:
            channel.connection.close()
            return
        data = data_of(wanted.start, wanted.stop)
        channel.send_message(Found(checksum(data)))
        channel.send(Header(Kind.PIECE, length=SIZE), memoryview(data))

    hostile = Hostile(other, once)
    one.tell([one.holder, hostile.holder])
    try:
        for number in theirs[:5]:
            assert one.get(number) == data_of(number * SIZE, number * SIZE + SIZE)
        assert hostile.asked == 3
    finally:
        one.asking.close()
        hostile.gate.close()


def test_a_host_whose_store_fails_says_so_and_the_other_asks_its_own(hosts: Any) -> None:
    one, other = hosts(2)
    one.store = CountedStore()
    other.store.fails = True
    assert [one.get(number) for number in range(20)] == [data_of(n * SIZE, n * SIZE + SIZE) for n in range(20)]
    assert one.asking.asked > 1  # it is asked again: it did answer
    assert sorted(one.store.fetched) == list(range(20))


def test_two_workers_of_one_folder_do_not_ask_each_other(hosts: Any, tmp_path: Path) -> None:
    one, _ = hosts(2)
    twin = Host("w9", tmp_path / "cache0", one.store)
    twin.tell([one.holder, twin.holder])
    assert twin.get(3) == data_of(3 * SIZE, 4 * SIZE)
    assert twin.asking.asked == 0
    twin.close()


def lies(channel: Channel, wanted: Wanted) -> None:
    data = b"\xff" * SIZE
    channel.send_message(Found(checksum(data)))
    channel.send(Header(Kind.PIECE, length=len(data)), memoryview(data))


def damages(channel: Channel, wanted: Wanted) -> None:
    channel.send_message(Found(checksum(data_of(wanted.start, wanted.stop))))
    channel.send(Header(Kind.PIECE, length=SIZE), memoryview(b"\xff" * SIZE))


def sends_too_little(channel: Channel, wanted: Wanted) -> None:
    channel.send_message(Found(checksum(b"x")))
    channel.send(Header(Kind.PIECE, length=1), memoryview(b"x"))


def sends_too_much(channel: Channel, wanted: Wanted) -> None:
    channel.send_message(Found(bytes(16)))
    channel.send(Header(Kind.PIECE, length=2 * SIZE), memoryview(bytes(2 * SIZE)))


def sends_another_frame(channel: Channel, wanted: Wanted) -> None:
    channel.send(Header(Kind.WORDS, length=SIZE), memoryview(bytes(SIZE)))


def sends_another_message(channel: Channel, wanted: Wanted) -> None:
    channel.send_message(wanted)


def hangs_up(channel: Channel, wanted: Wanted) -> None:
    channel.connection.close()


def is_silent(channel: Channel, wanted: Wanted) -> None:
    pass


@pytest.mark.parametrize(
    "answer",
    [damages, sends_too_little, sends_too_much, sends_another_frame, sends_another_message, hangs_up, is_silent],
)
def test_whatever_a_host_answers_no_wrong_byte_is_taken(hosts: Any, answer: Any, monkeypatch: Any) -> None:
    if answer is is_silent:
        monkeypatch.setattr(asking_module, "ANSWER_S", 0.2)
    one, other = hosts(2)
    hostile = Hostile(other, answer)
    one.tell([one.holder, hostile.holder])
    try:
        assert [one.get(number) for number in range(20)] == [data_of(n * SIZE, n * SIZE + SIZE) for n in range(20)]
        assert hostile.asked == 1  # and then it is left alone
    finally:
        one.asking.close()
        hostile.gate.close()


def test_a_member_that_lies_is_found_out_and_never_asked_again(hosts: Any, monkeypatch: Any, caplog: Any) -> None:
    drawn = iter([1, 1, 0])  # the third piece that comes from it is compared with the store's
    monkeypatch.setattr(asking_module.secrets, "randbelow", lambda most: next(drawn))
    one, other = hosts(2)
    hostile = Hostile(other, lies)
    one.tell([one.holder, hostile.holder])
    try:
        read = [one.get(number) == data_of(number * SIZE, number * SIZE + SIZE) for number in range(20)]
        assert read.count(False) == 2
        assert hostile.asked == 3
        assert f"worker {other.id} at {hostile.gate.address} sent other bytes" in caplog.text
    finally:
        one.asking.close()
        hostile.gate.close()


def test_what_a_host_has_sent_is_not_lost_where_the_store_fails_when_it_is_compared(
    hosts: Any, monkeypatch: Any
) -> None:
    one, other = hosts(2)
    numbers = [n for n in range(20) if one.roster.read().order(piece(n).name)[0].id == other.id]
    assert [other.get(number) for number in numbers] == [data_of(n * SIZE, n * SIZE + SIZE) for n in numbers]
    monkeypatch.setattr(asking_module.secrets, "randbelow", lambda most: 0)
    one.store = CountedStore()
    one.store.fails = True
    assert [one.get(number) for number in numbers] == [data_of(n * SIZE, n * SIZE + SIZE) for n in numbers]


# ---- who asks ----


def ask(host: Host, wanted: Any, *, role: str = "worker", secret: bytes | None = None, id: str = "w8") -> Any:
    """Send a message as another member of the job; return the answer, and what comes with it."""
    me = ("worker", host.id, 1)
    connection = TcpTransport().connect(host.answering.gate.address, 5.0)
    try:
        own = ticket_for(host.me.secret if secret is None else secret, role, id, 1)
        _, keys = introduce(connection, Hello(role, id, "h", incarnation=1, to=me), ticket=own)
        channel = Channel(connection, host.id, keys)
        try:
            channel.send_message(wanted)
            connection.set_deadline(10.0)
            answer = channel.receive_message(channel.receive_header())
            return answer, channel.receive_bytes(channel.receive_header()) if isinstance(answer, Found) else b""
        finally:
            channel.close()
    finally:
        connection.close()


def test_who_has_no_ticket_or_another_role_gets_nothing(hosts: Any) -> None:
    (host,) = hosts(1)
    wanted = Wanted(FILE.digest, 0, SIZE)
    assert ask(host, wanted)[1] == data_of(0, SIZE)
    with pytest.raises(Exception, match="ticket"):
        ask(host, wanted, secret=b"x" * 32)
    with pytest.raises(Exception, match="has no use for a cache"):
        ask(host, wanted, role="server")


def test_only_files_of_the_data_set_can_be_asked_for_and_only_within_their_size(hosts: Any) -> None:
    (host,) = hosts(1)
    assert ask(host, Wanted(b"e" * 16, 0, SIZE))[0] == NotFound("the data set here has no such file")
    for start, stop in ((0, FILE.size + 1), (SIZE, SIZE), (SIZE, 0)):
        answer, _ = ask(host, Wanted(FILE.digest, start, stop))
        assert "it asked for the bytes" in answer.reason
    answer, _ = ask(host, Found(bytes(16)))
    assert "a Found message" in answer.reason
    assert ask(host, Wanted(FILE.digest, 0, SIZE))[1] == data_of(0, SIZE)  # and it goes on answering others


@pytest.mark.parametrize("most", [2])
def test_one_worker_has_a_few_pieces_fetched_for_it_at_once_and_others_are_answered_meanwhile(
    hosts: Any, monkeypatch: Any, most: int
) -> None:
    monkeypatch.setattr(answering_module, "MOST_AT_ONCE", most)
    (host,) = hosts(1)
    begun, too_many, fetch = threading.Barrier(most + 1), list[int](), host.store.fetch

    def slow(file: File, start: int, stop: int) -> bytes:
        if start // SIZE < 5:
            try:
                begun.wait(0.5)
                too_many.append(start)  # one more has begun
            except threading.BrokenBarrierError:
                pass
        return bytes(fetch(file, start, stop))

    monkeypatch.setattr(host.store, "fetch", slow)
    answers = dict[int, bytes]()

    def want(number: int) -> None:
        answers[number] = ask(host, Wanted(FILE.digest, number * SIZE, number * SIZE + SIZE))[1]

    threads = [threading.Thread(target=want, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    assert ask(host, Wanted(FILE.digest, 9 * SIZE, 10 * SIZE), id="w7")[1] == data_of(9 * SIZE, 10 * SIZE)
    for thread in threads:
        thread.join()
    assert answers == {number: data_of(number * SIZE, number * SIZE + SIZE) for number in range(5)}
    assert not too_many


def test_who_waits_to_be_answered_when_the_host_ends_waits_no_longer() -> None:
    bounded, ended = answering_module.BoundedPeers(1), threading.Event()

    def wait() -> None:
        with pytest.raises(LinkError), bounded.of("w1"):
            pass
        ended.set()

    with bounded.of("w1"):
        thread = threading.Thread(target=wait)
        thread.start()
        with bounded.of("w2"):
            bounded.close()
        assert ended.wait(20)
        thread.join()


def connected(host: Host, id: str) -> Channel:
    """Another member's connection, which it keeps."""
    connection = TcpTransport().connect(host.answering.gate.address, 5.0)
    hello = Hello("worker", id, "h", incarnation=1, to=("worker", host.id, 1))
    _, keys = introduce(connection, hello, ticket=ticket_for(host.me.secret, "worker", id, 1))
    connection.set_deadline(20.0)
    return Channel(connection, host.id, keys)


def asked(channel: Channel, number: int) -> bytes:
    """The piece of this number."""
    channel.send_message(Wanted(FILE.digest, number * SIZE, number * SIZE + SIZE))
    assert isinstance(channel.receive_message(channel.receive_header()), Found)
    return bytes(channel.receive_bytes(channel.receive_header()))


def test_of_one_worker_the_connection_ends_that_was_asked_longest_ago_when_it_has_too_many(
    hosts: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(answering_module, "MOST_OF_ONE", 3)
    (host,) = hosts(1)
    other, own = connected(host, "w7"), [connected(host, "w8") for _ in range(3)]
    for number in (1, 2, 0):
        assert asked(own[number], number) == data_of(number * SIZE, number * SIZE + SIZE)
    while any(host.answering._connected._of["w8"].values()):  # what has been received may not be noted as sent
        threading.Event().wait(0.001)
    own.append(connected(host, "w8"))
    assert asked(own[3], 3) == data_of(3 * SIZE, 4 * SIZE)
    with pytest.raises(LinkError):
        asked(own[1], 1)
    for channel, number in ((own[0], 0), (own[2], 2), (other, 4)):
        assert asked(channel, number) == data_of(number * SIZE, number * SIZE + SIZE)
    for channel in (other, *own):
        channel.close()


def test_a_worker_that_waits_on_all_of_its_connections_gets_no_further_one() -> None:
    bounded, connections = BoundedConnections(2), [cast(Connection, object()) for _ in range(3)]
    with ExitStack() as open_:
        for one in connections[:2]:
            open_.enter_context(bounded.one("w1", one))
            open_.enter_context(bounded.busy("w1", one))
        with pytest.raises(LinkError, match="waits for answers on all"), bounded.one("w1", connections[2]):
            pass
        with bounded.one("w2", connections[2]):
            pass
    assert not bounded._of


# ---- the roster ----


def test_a_forked_process_reads_what_the_worker_is_told_later(tmp_path: Path) -> None:
    import multiprocessing

    context = multiprocessing.get_context("fork")
    roster, told, answers = Roster(), context.Event(), context.SimpleQueue()

    def read() -> None:
        told.wait()
        known = roster.read()
        answers.put(known.caches.holders[0].address if known else "")

    process = context.Process(target=read)
    process.start()
    roster.tell(Known("w0", 1, "host", Caches((Holder("w1", 1, "10.0.0.1:5", "0" * 16),))))
    told.set()
    assert answers.get() == "10.0.0.1:5"
    process.join()


def test_a_roster_that_is_half_written_is_not_believed() -> None:
    roster = Roster()
    assert roster.read() is None
    roster.tell(Known("w0", 1, "host", Caches(())))
    before = roster.read()
    roster._memory[:4] = (9).to_bytes(4, "little")
    assert roster.read() is before
