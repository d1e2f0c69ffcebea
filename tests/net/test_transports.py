"""Every transport passes the same contract; what only TCP has is tested beside it."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rallypoint.errors import LinkError, UsageError
from rallypoint.net.certificates import TlsFiles, make_certificates
from rallypoint.net.tcp import SO_MAX_PACING_RATE, TcpConnection, TcpTransport, split_address
from rallypoint.net.tls import TlsTransport
from rallypoint.net.transport import LEAST_IN_FLIGHT, LEAST_PACE, InprocTransport, Limits, Transport
from support.transports import TransportContract

PATIENCE_S = 60.0


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


class TestTcp(TransportContract):
    @pytest.fixture
    def transport(self) -> Transport:
        return TcpTransport()

    @pytest.fixture
    def address(self) -> str:
        return "127.0.0.1:0"


class TestTcpOverIPv6(TestTcp):
    @pytest.fixture
    def address(self) -> str:
        try:
            TcpTransport().listen("[::1]:0").close()
        except LinkError as error:
            pytest.skip(f"no IPv6 loopback here: {error}")
        return "[::1]:0"


class TestTls(TestTcp):
    @pytest.fixture
    def transport(self, certificates: Path) -> Transport:
        return TlsTransport(TlsFiles(certificates, "server"))


class TestInproc(TransportContract):
    @pytest.fixture
    def transport(self) -> Transport:
        return InprocTransport()

    @pytest.fixture
    def address(self) -> str:
        return "name:0"


def test_two_inproc_networks_do_not_see_each_other() -> None:
    listener = InprocTransport().listen("name")
    with pytest.raises(LinkError, match="nobody answers at name"):
        InprocTransport().connect("name", 1.0)
    listener.close()


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("127.0.0.1:4700", ("127.0.0.1", 4700)),
        ("[::1]:0", ("::1", 0)),
        ("node-3.cluster:65535", ("node-3.cluster", 65535)),
    ],
)
def test_an_address_is_host_and_port(text: str, pair: tuple[str, int]) -> None:
    assert split_address(text) == pair


@pytest.mark.parametrize("text", ["", "4700", "host", "host:", ":4700", "host:port", "host:-1", "host:65536"])
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="write host:port"):
        split_address(text)


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("127.0.0.1:1", True), ("127.8.8.8:1", True), ("localhost:1", True), ("[::1]:1", True),
        ("0.0.0.0:1", False), ("10.0.0.7:1", False), ("[::]:1", False), ("example.org:1", False),
    ],
)  # fmt: skip
def test_only_loopback_is_private(address: str, private: bool) -> None:
    assert TcpTransport().private(address) is private


def test_listening_where_we_are_not_is_one_sentence() -> None:
    with pytest.raises(LinkError, match=r"^cannot listen at 203\.0\.113\.1:0: .*: it is no address of this machine"):
        TcpTransport().listen("203.0.113.1:0")


def test_the_kernel_lets_less_wait_where_less_may_be_in_flight() -> None:
    """What a receiver does not read stays with the sender, but for what may be in flight and its own queue."""
    kept = {limit: _accepted(limit) for limit in (16 << 10, 128 << 10)}
    assert kept[16 << 10] < kept[128 << 10]


def _accepted(limit: int) -> int:
    """How many bytes of a stream that nobody reads a sender gets rid of."""
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near = transport.connect(listener.address, 5.0)
    far = listener.accept()
    far.limit_in_flight(limit)
    near.set_timeout(0.3)
    accepted = 0
    with contextlib.suppress(LinkError):
        while accepted < 64 << 20:
            near.send(bytes(4096))
            accepted += 4096
    for end in (near, far, listener):
        end.close()
    return accepted


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux gives the choice back")
def test_a_limit_in_flight_that_is_taken_back_leaves_room_for_more_than_before() -> None:
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near, far = transport.connect(listener.address, 5.0), listener.accept()
    assert isinstance(far, TcpConnection)
    room = lambda: far._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)  # noqa: E731
    before = room()
    limited = Limits(in_flight=32 << 10)
    limited.set_on(far)
    assert room() < before
    limited.set_on(far, before=limited)
    Limits().set_on(far, before=limited)
    assert room() > before
    Limits().set_on(far)
    for end in (near, far, listener):
        end.close()
    Limits().set_on(far, before=limited)  # a closed one


@pytest.mark.parametrize(
    ("nbytes", "links", "share"),
    [(0, 4, 0), (256 << 10, 8, 32 << 10), (1 << 20, 0, 1 << 20), (1, 8, LEAST_IN_FLIGHT)],
)
def test_links_share_what_may_be_in_flight(nbytes: int, links: int, share: int) -> None:
    assert Limits(in_flight=nbytes).shared(links).in_flight == share


@pytest.mark.parametrize(("mbit", "links", "share"), [(0.0, 4, 0), (8.0, 4, 250_000), (0.01, 8, LEAST_PACE)])
def test_links_share_a_pace(mbit: float, links: int, share: int) -> None:
    assert Limits.of(0, mbit).shared(links).pace == share


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pacing is Linux's")
def test_the_kernel_knows_a_connections_pace() -> None:
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near, far = transport.connect(listener.address, 5.0), listener.accept()
    assert isinstance(near, TcpConnection)
    rate = lambda: near._socket.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)  # noqa: E731
    Limits(pace=1_000_000).set_on(near)
    assert rate() == 1_000_000
    Limits().set_on(near, before=Limits(pace=1_000_000))
    assert rate() == -1
    for fast in (3_000_000_000, 12_500_000_000):  # 24 and 100 Gbit/s: more than 31 bits, more than 32
        near.pace(fast)
        told = near._socket.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)
        assert len(told) < 8 or int.from_bytes(told, sys.byteorder) == fast
    for end in (near, far, listener):
        end.close()
    near.pace(5)  # a closed one


class Hesitating:
    """A socket whose user has asked for its bytes and has not reached the system yet."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.descriptors: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)

    def recv_into(self, *arguments: Any) -> int:
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)
        self.descriptors.append(self._socket.fileno())
        return self._socket.recv_into(*arguments)


def test_a_descriptor_is_kept_until_the_last_thread_has_left_it() -> None:
    """A new connection could have its number by then, and lose its bytes to this thread."""
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near, far = transport.connect(listener.address, PATIENCE_S), listener.accept()
    near._socket = slow = Hesitating(near._socket)  # type: ignore[assignment]
    ended: list[LinkError] = []

    def receive() -> None:
        try:
            near.recv_into(memoryview(bytearray(4)))
        except LinkError as error:
            ended.append(error)

    (thread := threading.Thread(target=receive, name="receives")).start()
    assert slow.entered.wait(PATIENCE_S)
    near.close()
    near.close()
    with pytest.raises(LinkError):
        far.recv_into(memoryview(bytearray(4)))  # the stream has ended at once
    slow.go_on.set()
    thread.join(PATIENCE_S)
    assert slow.descriptors[0] >= 0
    assert len(ended) == 1
    assert slow.fileno() == -1, "the last one closes it"
    with pytest.raises(LinkError, match="is closed"):
        near.send(b"late")
    far.close()
    listener.close()
