"""Small jobs, one for each policy, whose members run on threads of this process and on TCP."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rallypoint.aggregator import AggregatorService
from rallypoint.coordinator.service import CoordinatorService
from rallypoint.core.cluster.terms import Terms
from rallypoint.net.certificates import TlsFiles
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.tls import TlsTransport
from rallypoint.net.transport import Transport
from rallypoint.server.service import ServerService
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash

TOKEN = "a token that nobody guesses"
STEPS, REPLICAS = 16, 4
SERVERS, WORKERS = ("server0", "server1"), ("worker0", "worker1")
NEAR = "the rack"
PATIENCE_S = 30.0
HEARTBEAT_S = 10 * PATIENCE_S  # nobody is given up because an attack takes long; for `hang_after` neither

_INT8 = {"type": "int8", "block": 32}
_TOPK = {"type": "topk", "ratio": 0.2, "sampled": False}


@dataclass(frozen=True)
class Policy:
    """A job's settings. `same`: its bytes do not depend on timing. `aggregator`: workers have one near them."""

    settings: dict[str, Any]
    table: bool = False
    replication: int = 2
    same: bool = True
    aggregator: bool = False


POLICIES = {
    "sync": Policy({"sync": {"type": "sync"}, "clip": 0.5}),
    "int8": Policy({"sync": {"type": "sync"}, "codec": _INT8, "down": {"type": "bf16"}, "nonfinite": "skip"}),
    "table": Policy({"sync": {"type": "sync"}}, table=True),
    "quorum": Policy({"sync": {"type": "sync", "quorum": 3}, "codec": _TOPK}, same=False),
    "ssp": Policy({"sync": {"type": "bounded-staleness", "staleness": 2}}, same=False),
    "async": Policy({"sync": {"type": "async", "fold": 2}, "codec": _INT8}, replication=1, same=False),
    "local": Policy({"sync": {"type": "local-steps", "steps": 2}, "codec": _TOPK}),
    "all-reduce": Policy({"sync": {"type": "all-reduce"}, "clip": 0.5}, replication=1),
}


AGGREGATED = "aggregated"
WITH_AGGREGATOR = {AGGREGATED: Policy({"sync": {"type": "sync"}, "clip": 0.5}, aggregator=True)}


class Net(torch.nn.Module):
    """Two layers with a buffer between them; perhaps with a table."""

    def __init__(self, *, table: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 24)
        self.norm = torch.nn.Identity() if table else torch.nn.BatchNorm1d(24)
        self.table = torch.nn.Embedding(19, 24, sparse=True, device="meta") if table else None
        self.last = torch.nn.Linear(24, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(hidden if self.table is None else hidden + self.table(index % 19))


torch.manual_seed(5)
# Made before there are any threads: torch's generator is the process's, and `job.train` of any worker seeds it.
_NETS = {table: Net(table=table) for table in (False, True)}


def new_net(*, table: bool) -> Net:
    """A model with the first weights, the same in every job and on every thread."""
    return copy.deepcopy(_NETS[table])


@dataclass
class Cluster:
    """One job of two workers, running from the beginning. Workers call `before_step` on their own threads.

    With `certificates` (the folder of each role's) all links have TLS.
    """

    policy: Policy
    before_step: Callable[[str, int], None] = lambda worker, step: None
    replication: int | None = None  # None: the policy's own
    certificates: Path | None = None
    hashes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)

    def __post_init__(self) -> None:
        terms = Terms(
            servers=len(SERVERS), heartbeat=HEARTBEAT_S, workers_start=len(WORKERS),
            replication=self.policy.replication if self.replication is None else self.replication,
            workers_max=len(WORKERS), aggregators=int(self.policy.aggregator), hang_after=0.0,
        )  # fmt: skip
        self.coordinator = CoordinatorService(terms=terms, token=TOKEN, transport=self.transport_of("coordinator"))
        self.coordinator.start()
        address = self.coordinator.address
        transport = self.transport_of("server")
        self.servers = [ServerService(id=id, coordinator=address, token=TOKEN, transport=transport) for id in SERVERS]
        transport = self.transport_of("aggregator")
        self.aggregators = [
            AggregatorService(id=id, coordinator=address, token=TOKEN, near=NEAR, transport=transport)
            for id in ("aggregator0",) if self.policy.aggregator
        ]  # fmt: skip
        self.listeners: list[ServerService | AggregatorService] = [*self.servers, *self.aggregators]
        for listener in self.listeners:
            listener.start()
        self.workers = [threading.Thread(target=self._work, args=(id,), name=id) for id in WORKERS]
        for worker in self.workers:
            worker.start()

    def transport_of(self, role: str) -> Transport:
        """What links of this role are made with."""
        return TcpTransport() if self.certificates is None else TlsTransport(TlsFiles(self.certificates, role))

    @property
    def near(self) -> str:
        """Where the workers are."""
        return NEAR if self.policy.aggregator else ""

    @property
    def settings(self) -> dict[str, Any]:
        """Of `job.train`, as data."""
        return {
            "replicas": REPLICAS, "batch": 4, "steps": STEPS, "network.shard_bytes": 512, "seed": 3,
            "optimizer": {"type": "sgd", "lr": 0.05}, **self.policy.settings,
        }  # fmt: skip

    def finish(self, patience: float = PATIENCE_S) -> bool:
        """Wait for the workers. Returns False if they had to be stopped."""
        for worker in self.workers:
            worker.join(patience)
        stuck = any(worker.is_alive() for worker in self.workers)
        self.coordinator.abort("the test is over")
        for worker in self.workers:
            worker.join(PATIENCE_S)
        assert not any(worker.is_alive() for worker in self.workers), "a worker does not hear that the job has ended"
        return not stuck

    def close(self) -> None:
        """End everything."""
        self.coordinator.abort("the test is over")
        for worker in self.workers:
            worker.join(PATIENCE_S)
        for listener in self.listeners:
            listener.close()
        self.coordinator.close()
        join_links()

    def _work(self, id: str) -> None:
        try:
            transport = self.transport_of("worker")
            at = self.coordinator.address
            with Job(id=id, coordinator=at, token=TOKEN, transport=transport, near=self.near) as job:
                model = new_net(table=self.policy.table)
                for micro in job.train(model, dataset(), **self.settings):
                    self.before_step(id, micro.step)
                    with micro:
                        x, y, index = micro.batch
                        micro.backward(torch.nn.functional.mse_loss(model(x, index), y))
                self.hashes[id] = weights_hash(model)
        except BaseException as error:
            self.errors[id] = error


def join_links() -> None:
    """Wait until the threads of closed links have ended: an attempt to connect may go on for a moment."""
    for thread in threading.enumerate():
        if thread.name.startswith("link to "):
            thread.join(PATIENCE_S)


def dataset() -> torch.utils.data.TensorDataset:
    """Forty samples."""
    numbers = torch.Generator().manual_seed(9)
    return torch.utils.data.TensorDataset(
        torch.randn(40, 16, generator=numbers), torch.randn(40, 4, generator=numbers), torch.arange(40)
    )


@contextlib.contextmanager
def running(policy: Policy, **options: Any) -> Iterator[Cluster]:
    """The job, from its beginning; it is ended at the end of the body."""
    cluster = Cluster(policy, **options)
    try:
        yield cluster
    finally:
        cluster.close()
