"""A whole cluster inside the test's process, over the in-process transport: real roles, real threads, no processes."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rallypoint.config import resolve
from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Message, Say
from rallypoint.net.handshake import Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.transport import InprocTransport
from rallypoint.server.service import ServerService
from rallypoint.testing.reference import train_reference
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash
from support.beside import until

PATIENCE_S = 60.0
DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 240).view(40, 6), torch.linspace(1, -1, 120).view(40, 3))
SETTINGS: dict[str, Any] = {"replicas": 4, "batch": 5, "steps": 8, "network.shard_bytes": 256, "clip": 0.5}

torch.manual_seed(3)
# Made before there are any threads: torch's generator is the process's, and every worker's micro-batches seed it.
_MODEL = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def build() -> torch.nn.Module:
    """A model with the first weights, the same on every thread. Its output depends on nothing but its weights."""
    return copy.deepcopy(_MODEL)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def reference_hash(**settings: Any) -> str:
    """The weights of plain PyTorch in one loop."""
    model = build()
    train_reference(model, DATA, loss_of, resolve({**SETTINGS, **settings}))
    return weights_hash(model)


class Worker:
    """A worker on a thread of its own; `at` is called with (step, replica) before every forward."""

    def __init__(self, job: Job, at: Callable[[int, int], None], settings: dict[str, Any], loss: Any) -> None:
        self.job, self._at, self._settings, self._loss = job, at, settings, loss
        self.hash = ""
        self.error: BaseException | None = None
        self.computed: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._run, name=f"loop of {job.id}", daemon=True)
        self._thread.start()

    def result(self) -> str:
        """The hash of its weights; the error that ended it."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.job.id} still runs"
        if self.error is not None:
            raise self.error
        return self.hash

    def _run(self) -> None:
        try:
            with self.job:
                model = build()
                for micro in self.job.train(model, DATA, **{**SETTINGS, **self._settings}):
                    with micro:
                        self._at(micro.step, micro.replica)
                        micro.backward(self._loss(model, micro.batch))
                        self.computed.append((micro.step, micro.replica))
            self.hash = weights_hash(model)
        except BaseException as error:
            self.error = error


class Roles:
    """A coordinator, and servers as they are added, on threads. No member is given up because the test is slow."""

    def __init__(self, join_info: JoinInfo | None = None, **terms: Any) -> None:
        self.transport = InprocTransport()
        wanted = Terms(**{"heartbeat": 10 * PATIENCE_S, **terms})
        self.coordinator = CoordinatorService(
            terms=wanted, bind="coordinator:0", transport=self.transport, join_info=join_info
        )
        self.coordinator.start()
        self.servers: list[ServerService] = []

    def add_servers(self, count: int) -> None:
        for _ in range(count):
            self.servers.append(self.server(f"server{len(self.servers)}"))
            self.servers[-1].start()

    def server(self, id: str) -> ServerService:
        """A server of this name, not started."""
        return ServerService(id=id, coordinator=self.coordinator.address, bind="server:0", transport=self.transport)

    def member(self, id: str) -> Job:
        """A worker of this name."""
        return Job(id=id, coordinator=self.coordinator.address, transport=self.transport)

    def safely_lose(self, number: int) -> None:
        """Lose a server once every shard is on two of them: what is lost before has not been promised."""
        until(lambda: self.coordinator._shell.machine.exposed == 0, "some shards never had a backup")
        self.servers[number].close()

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.coordinator.close()


class Gathering(Roles):
    """Workers on threads of their own besides, and an observer of what is announced."""

    def __init__(self, folder: Path | None = None, **terms: Any) -> None:
        join_info = JoinInfo(snapshots=str(folder)) if folder is not None else JoinInfo()
        super().__init__(join_info, **{"snapshots": folder is not None, **terms})
        self.workers: list[Worker] = []
        self.announced: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._observer = CoordinatorLink(
            transport=self.transport, address=self.coordinator.address, me=Identity("observer", "eyes"),
            handlers=Handlers(self.announced.put, self.announced.put),  # type: ignore[arg-type]
        )  # fmt: skip
        self._observer.start()
        until(lambda: len(self.coordinator._shell.announcer.observers) == 1)

    def add_worker(
        self, at: Callable[[int, int], None] = lambda step, replica: None, loss: Any = loss_of, **settings: Any
    ) -> Worker:
        self.workers.append(Worker(self.member(f"worker{len(self.workers)}"), at, settings, loss))
        return self.workers[-1]

    def heard(self, kind: type[Message]) -> list[Any]:
        """What has been announced so far of this kind."""
        messages = []
        while not self.announced.empty():
            messages.append(self.announced.get())
        for message in messages:
            self.announced.put(message)
        return [message for message in messages if isinstance(message, kind)]

    def sentences(self) -> list[str]:
        return [message.text for message in self.heard(Say)]

    def close(self) -> None:
        self.coordinator.abort("the test is over")
        for worker in self.workers:
            worker._thread.join(PATIENCE_S)
            worker.job.close()
        super().close()
        self._observer.close()


@contextmanager
def gathering(servers: int, /, folder: Path | None = None, **terms: Any) -> Iterator[Gathering]:
    """A cluster with so many servers, ended afterwards. The job waits for as many, or for `terms["servers"]`."""
    cluster = Gathering(folder, **{"servers": servers, **terms})
    try:
        cluster.add_servers(servers)
        yield cluster
    finally:
        cluster.close()


class Once:
    """Calls it the first time that anybody comes to this (step, replica)."""

    def __init__(self, step: int, replica: int, call: Callable[[], None]) -> None:
        self._where, self._call, self._lock = (step, replica), call, threading.Lock()
        self.done = False

    def __call__(self, step: int, replica: int) -> None:
        with self._lock:
            due = (step, replica) == self._where and not self.done
            self.done = self.done or due
        if due:
            self._call()
