"""Large payloads by NIXL: the contract of every transport over UCX's TCP and shared memory, and what NIXL alone has."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.core.protocol import Hello, Welcome
from rallypoint.errors import LinkError, UsageError
from rallypoint.net import rdma
from rallypoint.net.handshake import COORDINATOR, Identity, greet, introduce
from rallypoint.net.rdma import LEAST_BYTES, PIECE, NixlConnection, NixlTransport, chosen, environment_of, rdma_devices
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection, Listener, Transport
from rallypoint.testing.contracts.transports import Beside, TransportContract, receive

needs_nixl = pytest.mark.skipif(not rdma.installed(), reason="NIXL is not installed: pip install 'rallypoint[rdma]'")
TOKEN = "a token of the tests"
KEYS = hashlib.sha256(b"dialer").digest(), hashlib.sha256(b"listener").digest()
PATIENCE_S = 60.0


class Upgraded:
    """A connection that goes over to NIXL at its first use, as after a greeting."""

    def __init__(self, inner: NixlConnection, keys: tuple[bytes, bytes]) -> None:
        self._inner, self._keys = inner, keys
        self._lock, self._tried = threading.Lock(), False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self._ready()
        self._inner.send(head, payload)

    def recv_into(self, view: memoryview) -> None:
        self._ready()
        self._inner.recv_into(view)

    def _ready(self) -> None:
        with self._lock:
            if not self._tried:
                self._tried = True
                self._inner.upgrade(*self._keys)
                assert self._inner.upgraded


class UpgradedListener:
    def __init__(self, inner: Listener) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def accept(self) -> Upgraded:
        return Upgraded(self._inner.accept(), KEYS[::-1])  # type: ignore[arg-type]


class UpgradingTransport(NixlTransport):
    def listen(self, address: str) -> UpgradedListener:  # type: ignore[override]
        return UpgradedListener(super().listen(address))

    def connect(self, address: str, timeout: float) -> Upgraded:  # type: ignore[override]
        return Upgraded(super().connect(address, timeout), KEYS)


class Contract(TransportContract):
    UCX_TLS = ""

    @pytest.fixture
    def transport(self, monkeypatch: pytest.MonkeyPatch) -> Transport:
        monkeypatch.setenv("UCX_TLS", self.UCX_TLS)
        return UpgradingTransport(ring=1 << 20)

    @pytest.fixture
    def address(self) -> str:
        return "127.0.0.1:0"


@needs_nixl
@pytest.mark.slow  # shared memory plays the same contract at once
class TestNixlOverUcxTcp(Contract):
    UCX_TLS = "tcp"


@needs_nixl
class TestNixlOverSharedMemory(Contract):
    """Payloads go from memory to memory (CMA); UCX connects its sides over TCP, because its shared memory notices no
    peer's death."""

    UCX_TLS = "sm,self,tcp"


# ---- the greeting decides ----


def greeted(dials: Transport, listens: Transport) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection whose sides have proved themselves."""
    listener = listens.listen("127.0.0.1:0")
    near = dials.connect(listener.address, PATIENCE_S)
    far = listener.accept()
    for end in (near, far):
        end.set_timeout(PATIENCE_S)
    with Beside(lambda: greet(far, Identity("coordinator", "", TOKEN)).welcome(Welcome())) as welcoming:
        introduce(near, Hello("worker", "w0", "here", to=COORDINATOR), TOKEN)
        welcoming.raise_if_failed()
    try:
        yield near, far
    finally:
        for end in (near, far, listener):
            end.close()


def carries(near: Connection, far: Connection) -> None:
    payload = random.Random(5).randbytes(3 * PIECE + LEAST_BYTES)
    with Beside(lambda: near.send(b"head", memoryview(payload))) as sending:
        assert receive(far, 4 + len(payload)) == b"head" + payload
        sending.raise_if_failed()


@needs_nixl
@pytest.mark.parametrize("tls", ["tcp", "sm,self,tcp"])
def test_two_members_that_have_it_use_it_once_both_have_proved_themselves(
    monkeypatch: pytest.MonkeyPatch, tls: str
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    dials, listens = NixlTransport(), NixlTransport()
    for near, far in greeted(dials, listens):
        assert isinstance(near, NixlConnection)
        assert near.upgraded
        carries(near, far)
        carries(far, near)
        assert dials.traffic.totals()[0] > 3 * PIECE, "what goes by NIXL is counted"


@pytest.mark.parametrize("listens", [True, False])
def test_beside_a_member_without_it_a_connection_stays_with_tcp(listens: bool) -> None:
    sides = (TcpTransport(), NixlTransport()) if listens else (NixlTransport(), TcpTransport())
    for near, far in greeted(*sides):
        assert not any(isinstance(end, NixlConnection) and end.upgraded for end in (near, far))
        carries(near, far)
        carries(far, near)


@pytest.mark.parametrize("broken", ["dialer", "listener", "both"])
def test_where_nixl_cannot_be_started_tcp_carries_all_and_the_log_says_so_once(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if broken != "both" and not rdma.installed():
        pytest.skip("NIXL is not installed")
    dials, listens = NixlTransport(), NixlTransport()
    for transport, name in ((dials, "dialer"), (listens, "listener")):
        if broken in (name, "both"):
            for side in (transport._dialed, transport._accepted):
                monkeypatch.setattr(side, "taken", _cannot)
    for _ in range(2):
        for near, far in greeted(dials, listens):
            carries(near, far)
            carries(far, near)
    said = [record.getMessage() for record in caplog.records if "no RDMA with" in record.getMessage()]
    assert len(said) == (2 if broken == "both" else 1), said
    assert "TCP carries all of it" in said[0]


def _cannot() -> None:
    raise LinkError("NIXL cannot be started: it is broken for this test")


@needs_nixl
def test_threads_and_descriptors_end_with_the_last_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    dials, listens = NixlTransport(), NixlTransport()
    for _ in greeted(dials, listens):
        pass  # libraries open what they keep
    before = _tasks(), _descriptors()
    for one in greeted(dials, listens):
        for other in greeted(dials, listens):
            carries(*other)
        carries(*one)
        assert _tasks() > before[0]
    assert (_tasks(), _descriptors()) == before


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@needs_nixl
def test_what_says_where_memory_is_cannot_be_changed_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    transport = NixlTransport()
    listener = transport.listen("127.0.0.1:0")
    near = transport.connect(listener.address, PATIENCE_S)
    far = listener.accept()
    near.set_timeout(PATIENCE_S)
    far.set_timeout(PATIENCE_S)
    with Beside(lambda: near.upgrade(*KEYS)) as upgrading:
        with pytest.raises(LinkError, match="was changed on the way"):
            far.upgrade(KEYS[1], b"another key, of somebody between".ljust(32))
        far.close()
        assert isinstance(upgrading.outcome(), LinkError)
    near.close()
    listener.close()


@needs_nixl
def test_a_ring_that_cannot_be_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    listener = NixlTransport().listen("127.0.0.1:0")
    near = NixlTransport(ring=5000).connect(listener.address, PATIENCE_S)
    far = listener.accept()
    near.set_timeout(PATIENCE_S)
    far.set_timeout(PATIENCE_S)
    with Beside(lambda: near.upgrade(*KEYS)) as upgrading:
        with pytest.raises(LinkError, match="its ring has 5000 bytes"):
            far.upgrade(*KEYS[::-1])
        far.close()
        assert isinstance(upgrading.outcome(), LinkError)
    near.close()
    listener.close()


class _Agent:
    """An agent whose writes never arrive, and cannot be cancelled."""

    def __init__(self) -> None:
        self.released: list[bool] = []  # of each memory that came back: does a write still read it?

    def taken(self) -> _Agent:
        return self

    def given_back(self) -> None:
        pass

    def memory(self, nbytes: int) -> rdma.Region:
        return rdma.Region(nbytes)

    def release(self, memory: rdma.Region, *, in_use: bool) -> None:
        self.released.append(in_use)

    def described(self, memory: rdma.Region) -> bytes:
        return b"a description"

    def load(self, description: bytes) -> str:
        return "the other side"

    def forget(self, name: str) -> None:
        pass

    def write(self, *args: object) -> _Agent:
        return self

    def done(self) -> bool:
        return False

    def end(self) -> bool:
        return False


def test_memory_that_a_first_write_in_vain_may_still_read_becomes_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what another connection has in it would be written into the memory of this one's other side."""
    monkeypatch.setattr(rdma, "_TRIES_S", 0.05)
    dials, listens = NixlTransport(), NixlTransport()
    dials._dialed, listens._accepted = fakes = _Agent(), _Agent()  # type: ignore[assignment]
    for near, far in greeted(dials, listens):
        carries(near, far)
        assert [fake.released for fake in fakes] == [[True], [True]]


def test_memory_that_cannot_be_registered_again_stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that comes too late would meet memory that is something else by now, or nothing."""

    class Nixl:
        refuses = False

        def register_memory(self, *args: object) -> object:
            if self.refuses:
                raise RuntimeError("no more memory can be registered")
            return object()

        def deregister_memory(self, registered: object) -> None:
            pass

    library = Nixl()
    monkeypatch.setattr(rdma, "_started", lambda environment: library)
    agent = rdma.Agent({})
    agent.release(first := agent.memory(4096), in_use=False)
    library.refuses = True
    with pytest.raises(LinkError, match="no more memory can be registered"):
        agent.memory(4096)
    library.refuses = False
    assert agent.memory(4096) is first


@needs_nixl
@pytest.mark.parametrize("address", [2**64 - 1, 2**64 - 4096, 0])
def test_memory_that_cannot_be_where_the_other_side_says_leaves_the_connection_with_tcp(
    monkeypatch: pytest.MonkeyPatch, address: int
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    listener = NixlTransport().listen("127.0.0.1:0")
    near = NixlTransport().connect(listener.address, PATIENCE_S)
    far = listener.accept()
    for end in (near, far):
        end.set_timeout(PATIENCE_S)
    described = near._described
    monkeypatch.setattr(near, "_described", lambda layout: address.to_bytes(8, "little") + described(layout)[8:])
    with Beside(lambda: near.upgrade(*KEYS)) as upgrading:
        far.upgrade(*KEYS[::-1])
        upgrading.raise_if_failed()
    assert not near.upgraded
    assert not far.upgraded
    carries(near, far)
    for end in (near, far, listener):
        end.close()


# ---- which transport ----


def test_auto_takes_nixl_where_a_device_and_the_package_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rallypoint.net.rdma.installed", lambda: "nixl_cu12")
    assert chosen("auto", secure=False, devices=tmp_path) == "tcp"
    (tmp_path / "mlx5_0").mkdir()
    assert rdma_devices(tmp_path) == ("mlx5_0",)
    assert chosen("auto", secure=False, devices=tmp_path) == "nixl"
    assert chosen("auto", secure=True, devices=tmp_path) == "tcp", "TLS encrypts, and NIXL does not"
    monkeypatch.setattr("rallypoint.net.rdma.installed", lambda: "")
    assert chosen("auto", secure=False, devices=tmp_path) == "tcp"


def test_what_cannot_be_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="choose of tcp, nixl, auto"):
        chosen("rdma", secure=False)
    with pytest.raises(UsageError, match="does not encrypt"):
        chosen("nixl", secure=True)
    monkeypatch.setattr("rallypoint.net.rdma.installed", lambda: "")
    with pytest.raises(UsageError, match="pip install 'nixl"):
        chosen("nixl", secure=False)


def test_ucx_stays_off_ordinary_networks_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    assert environment_of(tmp_path, {}) == {"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"}
    assert environment_of(tmp_path, {"UCX_NET_DEVICES": "eth0"}) == {"UCX_MODULES": "^ib"}
    (tmp_path / "mlx5_0").mkdir()
    assert environment_of(tmp_path, {}) == {"UCX_TLS": "^tcp"}
    assert environment_of(tmp_path, {"UCX_TLS": "rc,sm,self"}) == {}
