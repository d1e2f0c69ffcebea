"""Large payloads by NIXL: the contract of every transport over UCX's TCP and shared memory, and what is NIXL's alone."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.errors import LinkError, UsageError
from rallypoint.net.handshake import COORDINATOR, Identity, greet, introduce
from rallypoint.net.messages import Hello, Welcome
from rallypoint.net.rdma import agent as agents
from rallypoint.net.rdma.choice import chosen, environment_of, rdma_devices
from rallypoint.net.rdma.connection import NixlConnection
from rallypoint.net.rdma.rings import LEAST_BYTES, PIECE
from rallypoint.net.rdma.transport import NixlTransport
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection, Listener, Transport
from rallypoint.testing.contracts.transports import Beside, TransportContract, receive

needs_nixl = pytest.mark.skipif(not agents.installed(), reason="NIXL is not installed: pip install 'rallypoint[rdma]'")
TOKEN = "a token of the tests"
KEYS = hashlib.sha256(b"dialer").digest(), hashlib.sha256(b"listener").digest()
PATIENCE_S = 30.0


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
class TestNixlOverUcxTcp(Contract):
    UCX_TLS = "tcp"


@needs_nixl
class TestNixlOverSharedMemory(Contract):
    """Payloads go from memory to memory (CMA); UCX connects its sides over TCP, because its shared memory notices no
    peer's death."""

    UCX_TLS = "sm,self,tcp"
