"""Payloads that are lent: within a process, and between processes of one host."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import pytest
import torch

from rallypoint.errors import LinkError
from rallypoint.net import memory
from rallypoint.net.channel import LENT_BYTES, Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import dialers_keys, expand, token_keys
from rallypoint.net.memory import LEAST_BYTES, Arena, HostLender
from rallypoint.net.pool import PERIOD, BufferPool, bytes_of, words_of_memory
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection, InprocTransport, Transport
from support.beside import raising
from support.transports import Beside

PATIENCE_S = 60.0
KEYS = dialers_keys(token_keys("a token"), bytes(32))
WORDS = 1 << 16  # 256 KiB


@dataclass
class Pair:
    """Two channels whose sides have agreed, and what the near one has called back."""

    near: Channel
    far: Channel
    sent: list[str] = field(default_factory=list)

    def lend(self, name: str, tensor: torch.Tensor, *, place: str | None = None) -> None:
        payload = bytes_of(tensor)
        self.near.send(Header(Kind.PUSH, length=len(payload)), payload, lambda: self.sent.append(name), place=place)

    def receive(self) -> torch.Tensor:
        into = torch.empty(self.far.receive_header().length // 4)
        self.far.receive_into(bytes_of(into))
        return into


def upgraded(transport: Transport, address: str) -> tuple[Connection, Connection, contextlib.ExitStack]:
    stack = contextlib.ExitStack()
    listener = transport.listen(address)
    stack.callback(listener.close)
    near = transport.connect(listener.address, 5.0)
    far = listener.accept()
    if isinstance(transport, TcpTransport):
        with Beside(lambda: far.upgrade(b"2" * 32, b"1" * 32)) as other:  # type: ignore[attr-defined]
            near.upgrade(b"1" * 32, b"2" * 32)  # type: ignore[attr-defined]
        other.raise_if_failed()
    return near, far, stack


def assert_nothing_is_lent() -> None:
    near, far, stack = upgraded(TcpTransport(), "127.0.0.1:0")
    with stack:
        assert near.lender is far.lender is None
        near.close()
        far.close()


@pytest.fixture(params=["one process", "one host"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    inproc = request.param == "one process"
    near, far, stack = upgraded(InprocTransport() if inproc else TcpTransport(), "x:0" if inproc else "127.0.0.1:0")
    with stack:
        both = Pair(Channel(near, "far", KEYS), Channel(far, "near", KEYS.other_side()))
        assert near.lender is not None
        assert far.lender is not None
        yield both
        both.near.close()
        both.far.close()


def values(seed: int, words: int = WORDS) -> torch.Tensor:
    tensor = words_of_memory(words)
    tensor.copy_(torch.rand(words, generator=torch.Generator().manual_seed(seed)))
    return tensor


def test_a_payload_that_is_lent_arrives_and_may_change_only_after_it_was_read(pair: Pair) -> None:
    first = values(1)
    pair.lend("first", first)
    header = pair.far.receive_header()
    assert pair.sent == []  # nothing was read: it may not change yet
    into = torch.empty(header.length // 4)
    pair.far.receive_into(bytes_of(into))
    assert torch.equal(into, first)
    assert pair.near.flush(PATIENCE_S)
    assert pair.sent == ["first"]


def test_what_is_small_or_lies_elsewhere_is_sent(pair: Pair) -> None:
    small = torch.arange(100, dtype=torch.float32)
    elsewhere = torch.rand(WORDS)  # ordinary memory: another process cannot read it
    pair.lend("small", small)
    pair.lend("elsewhere", elsewhere)
    assert torch.equal(pair.receive(), small)
    assert torch.equal(pair.receive(), elsewhere)
    assert pair.near.flush(PATIENCE_S)
    assert pair.sent == ["small", "elsewhere"]


def test_what_is_read_frees_the_senders_memory_before_what_comes_of_it_arrives(pair: Pair) -> None:
    pair.lend("push", values(2))
    pair.receive()
    pair.far.send(Header(Kind.CREDIT, replica=1))
    assert pair.near.receive_header().kind is Kind.CREDIT
    assert pair.sent == ["push"]


def test_a_slow_reader_is_lent_so_much_and_urgent_frames_pass(pair: Pair) -> None:
    count = 3 * LENT_BYTES // (4 * WORDS)
    lent = [values(seed) for seed in range(count)]
    for number, tensor in enumerate(lent):
        pair.lend(str(number), tensor)
    pair.near.send(Header(Kind.CREDIT, replica=5), urgent=True)
    arrived = []
    while (header := pair.far.receive_header()).kind is Kind.PUSH:
        into = torch.empty(header.length // 4)
        arrived.append(into)
        if len(arrived) == 2:
            assert pair.near.waiting_bytes >= LENT_BYTES  # the others still wait in the queue
        pair.far.receive_into(bytes_of(into))
    assert len(arrived) < count
    arrived += [pair.receive() for _ in range(count - len(arrived))]
    assert all(torch.equal(*both) for both in zip(arrived, lent, strict=True))
    assert pair.near.flush(PATIENCE_S)
    assert pair.sent == [str(number) for number in range(count)]


def test_a_link_that_ends_withdraws_what_it_lends_before_that_changes(pair: Pair) -> None:
    """Else a server would add what the worker writes next, under the name of what it had sent."""
    pair.lend("lost", values(3))
    header = pair.far.receive_header()
    pair.near.close()
    assert pair.sent == ["lost"]
    with pytest.raises(LinkError):
        pair.far.receive_into(bytes_of(torch.empty(header.length // 4)))


def test_a_link_that_ends_while_a_payload_is_read_gives_no_payload() -> None:
    """The bytes were copied, and the sender may have changed some of them meanwhile."""
    near, far, stack = upgraded(TcpTransport(), "127.0.0.1:0")
    with stack:
        lent = values(4)
        number = near.lender.lend(bytes_of(lent))  # type: ignore[union-attr]
        assert number is not None
        near.lender.withdraw()  # type: ignore[union-attr]
        with pytest.raises(LinkError, match="has ended the link before"):
            far.lender.read(number, bytes_of(torch.empty(WORDS)))  # type: ignore[union-attr]
        near.close()
        near = None  # type: ignore[assignment]
        gc.collect()  # its words are freed: a stopped process that goes on reads zeros there
        with pytest.raises(LinkError, match="has ended the link before"):
            far.lender.read(number, bytes_of(torch.empty(WORDS)))  # type: ignore[union-attr]
        far.close()
        with pytest.raises(LinkError, match="closed"):
            far.lender.read(number, bytes_of(torch.empty(WORDS)))  # type: ignore[union-attr]


def test_a_paced_link_sends_all(pair: Pair) -> None:
    """Nothing paces what is read from memory."""
    if not isinstance(pair.near.connection.lender, HostLender):
        pytest.skip("nothing paces what stays within a process")
    pair.near.connection.pace(1 << 30)
    assert pair.near.connection.lender.lend(bytes_of(values(6))) is None
    pair.near.connection.pace(0)
    assert pair.near.connection.lender.lend(bytes_of(values(6))) is not None


def test_what_was_read_is_said_though_much_else_is_sent_and_nothing_comes_back(pair: Pair) -> None:
    pair.lend("read", values(7))
    pair.receive()
    deadline = time.monotonic() + PATIENCE_S
    while not pair.sent:
        assert time.monotonic() < deadline
        pair.near.send(Header(Kind.CREDIT, replica=1))
        pair.far.receive_header()


def test_an_upgrade_that_fails_half_way_leaves_no_descriptor() -> None:
    """It would keep all memory of a process that was killed meanwhile."""
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        near, far = transport.connect(listener.address, 5.0), listener.accept()
        arena = memory._ARENAS.get()
        said = memory._DESCRIBED.pack(os.getpid(), arena.fd, arena.token.encode(), 0)
        memory.say(far, expand(b"2" * 32, memory.LABEL), said)
        far.finish()
        with pytest.raises(LinkError):
            near.upgrade(b"1" * 32, b"2" * 32)
        near.close()
        far.close()
    assert len(os.listdir("/proc/self/fd")) == before
    listener.close()


def test_without_memory_for_a_link_its_payloads_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "allocate", raising(OSError(27, "File too large")))
    near, far, stack = upgraded(TcpTransport(), "127.0.0.1:0")
    with stack:
        assert near.lender is far.lender is None
        assert words_of_memory(WORDS).numel() == WORDS
        near.close()
        far.close()


def test_a_refusal_behind_a_payload_that_nobody_reads_waits_for_nothing(pair: Pair) -> None:
    pair.lend("unread", values(8))
    pair.near.refuse("no")
    assert pair.near.flush(PATIENCE_S)


def test_a_peer_that_lends_what_it_does_not_have_ends_its_link_alone(pair: Pair) -> None:
    if not isinstance(pair.near.connection.lender, HostLender):
        pytest.skip("within a process a number is a payload")
    for number in (1 << 50, 1 << 63):
        pair.near.connection.lender.lend = lambda payload, number=number: number  # type: ignore[misc]
        pair.lend("nothing", values(5))
        header = pair.far.receive_header()
        with pytest.raises(LinkError, match="lends memory that it does not have"):
            pair.far.receive_into(bytes_of(torch.empty(header.length // 4)))


def test_a_payload_that_is_lent_on_a_link_without_memory_is_refused() -> None:
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near = transport.connect(listener.address, 5.0)
    far = Channel(listener.accept(), "near", KEYS.other_side())
    sender = Channel(near, "far", KEYS)
    near.send(sender._sealer.seal(Header(Kind.PUSH, length=WORDS), None, 7))
    far.receive_header()
    with pytest.raises(Exception, match="lends a payload, and this link has no memory"):
        far.receive_into(memoryview(bytearray(WORDS)))
    for thing in (sender, far, listener):
        thing.close()


# ---- who can, and who cannot ----


def test_memory_that_cannot_be_opened_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container the same number is another process."""
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/null")
    assert_nothing_is_lent()


def test_memory_that_could_shrink_while_it_is_read_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it would end this process by a signal."""
    monkeypatch.setattr(fcntl, "F_SEAL_SHRINK", 0)
    monkeypatch.setattr(memory, "_ARENAS", memory._Arenas())
    assert_nothing_is_lent()


def test_one_side_without_shared_memory_is_enough_to_send_all(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([memory._ARENAS.get(), None])
    monkeypatch.setattr(memory._ARENAS, "get", lambda: next(given))
    assert_nothing_is_lent()


def test_only_connections_within_a_host_offer_it() -> None:
    near, far, stack = upgraded(TcpTransport(), "127.0.0.1:0")
    with stack:
        assert near.offers == "host/1"  # type: ignore[attr-defined]
        near.local = False  # type: ignore[attr-defined]
        assert near.offers == ""  # type: ignore[attr-defined]
        near.close()
        far.close()


# ---- the memory ----


def kib(arena: Arena) -> int:
    """What the system has given to the memfd."""
    return os.fstat(arena.fd).st_blocks // 2


def test_memory_goes_back_to_the_system_and_its_place_is_not_used_again() -> None:
    arena = Arena()
    try:
        kept, gone = arena.allocate(1 << 20), arena.allocate(1 << 20)
        for piece in (kept, gone):
            memoryview(piece).cast("B")[:] = b"x" * (1 << 20)
        assert kib(arena) == 2048
        place = arena.find(memoryview(gone).cast("B"))
        assert place == 1 << 20
        del piece, gone
        assert kib(arena) == 1024
        assert os.pread(arena.fd, 1, place) == b"\0"
        assert arena.find(memoryview(arena.allocate(1 << 20)).cast("B")) == 2 << 20
        assert arena.find(memoryview(kept).cast("B")[4096:]) == 4096
        assert arena.find(memoryview(b"x" * 4096)) is None
        assert arena.find(memoryview(bytearray(4096))) is None
    finally:
        os.close(arena.fd)


def test_the_system_joins_the_mappings_of_an_arena() -> None:
    """It allows a process 65,530 of them: two buffers for each MiB of a large model would be all."""
    arena = Arena()
    kept = [arena.allocate(LEAST_BYTES) for _ in range(200)]
    with open("/proc/self/maps") as maps:
        assert sum(arena.name in line for line in maps) < 20
    assert all(arena.find(memoryview(memory).cast("B")) is not None for memory in kept)


def test_a_tensor_keeps_its_memory_though_its_buffer_is_gone() -> None:
    pool = BufferPool(WORDS, keeps=False)
    buffer = pool.take()
    kept = buffer.tensor[7:9]
    kept.fill_(3.0)
    buffer.release()
    del buffer
    others = [pool.take() for _ in range(4)]
    for other in others:
        other.tensor.zero_()
    assert kept.tolist() == [3.0, 3.0]


FORKS = """
import os, torch
from rallypoint.net.memory import _ARENAS
from rallypoint.net.pool import BufferPool, bytes_of
pool = BufferPool(1 << 16, keeps=False)
buffer = pool.take()
buffer.tensor.fill_(5.0)
arena = _ARENAS.get()
if (child := os.fork()) == 0:
    assert _ARENAS.get().token != arena.token
    own = pool.take()
    own.bytes[:] = bytes(len(own.bytes))
    assert _ARENAS.get().find(own.bytes) is not None
    assert _ARENAS.get().find(buffer.bytes) is None
    buffer.release()
    del buffer
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert buffer.tensor.eq(5.0).all()
print("both well")
"""


@pytest.mark.slow
def test_a_forked_child_has_memory_of_its_own_and_takes_none_away() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "both well\n", done.stderr


OTHER = """
import socket, sys
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import dialers_keys, token_keys
from rallypoint.net.pool import bytes_of, words_of_memory
from rallypoint.net.tcp import TcpTransport
near = TcpTransport().connect(sys.argv[1], 5.0)
near.upgrade(b"1" * 32, b"2" * 32)
channel = Channel(near, "far", dialers_keys(token_keys("a token"), bytes(32)))
tensor = words_of_memory(1 << 16)
tensor.fill_(7.0)
channel.send(Header(Kind.PUSH, length=1 << 18), bytes_of(tensor))
print("lent", near.lender is not None, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_killed_process_has_lent_can_still_be_read() -> None:
    """It was whole when it was announced, and nobody can change it any more."""
    listener = TcpTransport().listen("127.0.0.1:0")
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER, listener.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        connection = listener.accept()
        connection.upgrade(b"2" * 32, b"1" * 32)
        far = Channel(connection, "near", KEYS.other_side())
        assert child.stdout.readline() == "lent True\n"
        header = far.receive_header()
        child.kill()
        child.wait()
        into = torch.empty(WORDS)
        far.receive_into(bytes_of(into))
        assert header.length == 4 * WORDS
        assert into.eq(7.0).all()
        with pytest.raises(LinkError):
            far.receive_header()
        far.close()
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        child.stdout.close()
        listener.close()


@pytest.mark.some("one host")
def test_many_links_lend_at_once_and_every_byte_is_its_own(pair: Pair) -> None:
    """The sender writes the next payload as soon as it may."""
    free, rounds, got = threading.Semaphore(2), 200, []
    slots = [words_of_memory(WORDS) for _ in range(2)]

    def send() -> None:
        for number in range(rounds):
            assert free.acquire(timeout=PATIENCE_S)
            slot = slots[number % 2]
            slot.fill_(number)
            pair.near.send(Header(Kind.PUSH, step=number, length=4 * WORDS), bytes_of(slot), free.release)

    with Beside(send) as sending:
        for number in range(rounds):
            arrived = pair.receive()
            got.append(bool(arrived.eq(number).all()))
    sending.raise_if_failed()
    assert all(got)


# ---- Buffers come back when their last holder lets go, and only then ----


def test_a_buffer_is_words_and_the_same_bytes() -> None:
    buffer = BufferPool(16).take()
    assert buffer.tensor.shape == (16,)
    assert buffer.tensor.dtype == torch.float32
    assert len(buffer.bytes) == 64
    buffer.bytes[:4] = torch.tensor([1.5]).numpy().tobytes()
    assert buffer.tensor[0] == 1.5


def test_a_released_buffer_is_taken_again() -> None:
    pool = BufferPool(4)
    first, second = pool.take(), pool.take()
    assert first is not second
    first.release()
    assert pool.take() is first
    assert pool.made == 2


def test_a_buffer_comes_back_with_its_last_holder() -> None:
    pool = BufferPool(4)
    buffer = pool.take()
    assert buffer.retain() is buffer
    buffer.release()
    assert pool.free == []
    buffer.release()
    assert pool.free == [buffer]


def test_no_buffer_is_in_two_hands() -> None:
    pool = BufferPool(4)
    for _ in range(50):
        held = [pool.take() for _ in range(4)]
        assert len({id(buffer) for buffer in held}) == 4
        for buffer in held:
            buffer.release()
    assert pool.made == 4
    assert len(pool.free) == 4


def test_a_pool_gives_back_what_it_has_not_needed_for_long() -> None:
    """After a crowd (workers that join, a slow link) the memory is the system's again."""
    pool = BufferPool(4)
    for buffer in [pool.take() for _ in range(100)]:
        buffer.release()
    assert (pool.made, len(pool.free)) == (100, 100), "it may be needed again soon"
    for _ in range(PERIOD):
        for buffer in [pool.take() for _ in range(3)]:
            buffer.release()
    assert (pool.made, len(pool.free)) == (3, 3)


def test_large_buffers_are_given_back_to_the_system() -> None:
    process, pool = psutil.Process(), BufferPool(1 << 18, keeps=False)
    held = [pool.take() for _ in range(64)]
    for buffer in held:
        buffer.tensor.zero_()
    used = process.memory_info().rss
    for buffer in held[1::2]:  # not only those at the end of the heap
        buffer.release()
    del held[1::2], buffer
    assert used - process.memory_info().rss > 24 << 20
    for buffer in held:
        buffer.release()


def test_releasing_once_too_often_is_noticed() -> None:
    pool = BufferPool(4)
    buffer = pool.take()
    buffer.release()
    with pytest.raises(AssertionError):
        buffer.release()
    assert pool.free == [buffer]


def test_the_bytes_of_a_tensor_are_in_place() -> None:
    tensor = torch.zeros(4)
    bytes_of(tensor)[:] = torch.arange(4.0).numpy().tobytes()
    assert tensor.tolist() == [0, 1, 2, 3]
