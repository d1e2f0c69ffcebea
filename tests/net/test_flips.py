"""A job whose bits flip on the way ends with the same bytes, or with an error: never with other bytes (I12)."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from rallypoint.coordinator.service import CoordinatorService
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.optimizer import AdamW
from rallypoint.errors import RallypointError
from rallypoint.net.certificates import TlsFiles, make_certificates
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.tls import TlsTransport
from rallypoint.net.transport import Transport
from rallypoint.server.service import ServerService
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash

TOKEN = "a token that nobody guesses"
STEPS, REPLICAS = 40, 2
SERVERS = ("server0", "server1")
PATIENCE_S = 60.0
_CHUNK = 4096


@dataclass
class Flipper:
    """A TCP relay in front of a listener: after every so many bytes, about `every`, one bit of a direction flips."""

    target: str
    every: float
    seed: int
    flips: int = 0
    _open: set[socket.socket] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._numbers, self._lock = random.Random(self.seed), threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="relay")]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            host, port = self.target.split(":")
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:  # whoever listened there is gone
                near.close()
                continue
            with self._lock:
                self._open |= {near, far}
                for ends in ((near, far), (far, near)):
                    rng = random.Random(self._numbers.random())
                    self._threads.append(threading.Thread(target=self._pump, args=(*ends, rng), name="relay"))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, rng: random.Random) -> None:
        left = rng.expovariate(1 / self.every)
        with contextlib.suppress(OSError):
            while chunk := bytearray(source.recv(_CHUNK)):
                while left < len(chunk):
                    chunk[int(left)] ^= 1 << rng.randrange(8)
                    self.flips += 1
                    left += 1 + rng.expovariate(1 / self.every)
                left -= len(chunk)
                sink.sendall(chunk)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@dataclass
class Flips:
    """After about how many bytes a bit flips, on links to the coordinator and on links to servers; 0: never."""

    coordinator: float = 0.0
    servers: float = 0.0


def run(flips: Flips, seed: int = 1, tls: Path | None = None) -> tuple[str, int]:
    """The weights' hash of the job, and how many bits flipped. Raises what the worker raises.

    tls: the certificates; None: without TLS.
    """
    with contextlib.ExitStack() as stack:

        def behind(target: str, every: float) -> str:
            if not every:
                return target
            relays.append(Flipper(target, every, seed + len(relays)))
            stack.callback(relays[-1].close)
            return relays[-1].address

        relays: list[Flipper] = []
        terms = Terms(servers=len(SERVERS), replication=2, heartbeat=PATIENCE_S)
        coordinator = CoordinatorService(terms=terms, token=TOKEN, transport=_transport(tls, "coordinator"))
        coordinator.start()
        stack.callback(coordinator.close)
        address = behind(coordinator.address, flips.coordinator)
        for id in SERVERS:
            with socket.create_server(("127.0.0.1", 0)) as free:
                bind = f"127.0.0.1:{free.getsockname()[1]}"
            server = ServerService(
                id=id, coordinator=address, token=TOKEN, bind=bind, advertise=behind(bind, flips.servers),
                transport=_transport(tls, "server"),
            )  # fmt: skip
            server.start()
            stack.callback(server.close)
        found: list[str | BaseException] = []
        worker = threading.Thread(target=lambda: found.append(_work(address, _transport(tls, "worker"))), name="worker")
        worker.start()
        worker.join(PATIENCE_S)
        alive = worker.is_alive()
        if alive:
            coordinator.abort("the test is over")
            worker.join(PATIENCE_S)
        assert not alive, "the job hangs"
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0], sum(relay.flips for relay in relays)


def _transport(tls: Path | None, role: str) -> Transport:
    return TcpTransport() if tls is None else TlsTransport(TlsFiles(tls, role))


def _work(address: str, transport: Transport) -> str | BaseException:
    try:
        with Job(id="worker0", coordinator=address, token=TOKEN, transport=transport) as job:
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
            data = [(torch.randn(16), torch.randn(4)) for _ in range(40)]
            training = job.train(
                model, data, replicas=REPLICAS, batch=4, steps=STEPS, optimizer=AdamW(lr=1e-2), clip=0.5,
                **{"network.shard_bytes": 1024},
            )  # fmt: skip
            for micro in training:
                with micro:
                    x, y = micro.batch
                    micro.backward(torch.nn.functional.mse_loss(model(x), y))
        return weights_hash(model)
    except BaseException as error:
        return error


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return run(Flips())[0]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A greeting whose length has grown is waited for: not for long."""
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 1.0)
    caplog.set_level(logging.WARNING, logger="rallypoint")


@pytest.mark.slow
def test_bits_that_flip_between_workers_and_servers_change_no_byte(
    undisturbed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also between servers: every link connects again and says it again."""
    found, flips = run(Flips(servers=30_000))
    assert flips >= 10
    assert found == undisturbed
    noticed = [entry.message for entry in caplog.records if "on the way" in entry.message]
    assert any("payload of a" in message for message in noticed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_bits_that_flip_anywhere_give_the_same_bytes_or_an_error(undisturbed: str, seed: int) -> None:
    found, flips = undisturbed, 1
    with contextlib.suppress(RallypointError):
        found, flips = run(Flips(coordinator=6_000, servers=60_000), seed)
    assert flips > 0
    assert found == undisturbed


@pytest.mark.slow
def test_with_tls_a_job_ends_with_the_same_bytes_also_when_bits_flip(undisturbed: str, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    assert run(Flips(), tls=tmp_path)[0] == undisturbed
    found, flips = run(Flips(servers=60_000), tls=tmp_path)
    assert flips > 0
    assert found == undisturbed
