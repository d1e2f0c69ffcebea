"""The ways in which a job could run on some machines, each with what it costs: the rows of `rallypoint plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from rallypoint.core.plan.failures import NEVER, daly_period, elastic_goodput, goodput
from rallypoint.core.plan.peers import Memory, Ring, ddp_cost, ddp_memory, fsdp_cost, fsdp_memory, servers_memory
from rallypoint.core.plan.pipeline import StepCost, step_cost
from rallypoint.core.plan.port import WINDOW_S
from rallypoint.core.plan.site import Servers, Site, Speeds, Workers, paced, paced_by_port
from rallypoint.core.plan.workload import Workload

_STATE = 12  # bytes of a parameter in a snapshot: the value and AdamW's moments
_SAVED, _SAVED_BY_PEER = 0.12e-9, 0.83e-9  # seconds of training that a byte of a snapshot costs (docs/performance.md)
_WORKER_STALL, _SERVER_STALL = 0.2, 0.3  # seconds, the same page: 20 kills of a worker, 8 of a server
_RING_LATENCY = 1e-4  # of one hop of a collective
_PARTS = (0.25, 0.5, 1.0, 1.25, 2.0)  # of the servers' links that would match the workers'


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to run on.

    Attributes:
        gpus: processes that compute, one for each device.
        per_host: devices on each host; they share its link.
        rate, server_rate: bytes a second and direction of a host's link, and of a server's (0: the same).
        servers: how many servers may be had; empty: numbers that suit the workers.
        rack: hosts of a rack, which share `uplink` (bytes a second each way); 0: no racks.
        memory: bytes of a device; 0: enough.
        mtbf: seconds between two failures of one machine, on average; infinite: none.
        restart: seconds until a job without servers trains again after a failure.
        gpu_price, server_price: of an hour of one device, and of one server.
        slowness: how many times slower than the others the slowest device is.
        paced: the job sets `pace_mbit`, a little below the links' rate.
        by_port: members find a pace by themselves (`pacing="auto"`), where that is not set.
        queue, speeds: see `core.plan.site`.
    """

    gpus: int
    per_host: int = 1
    rate: float
    server_rate: float = 0.0
    servers: tuple[int, ...] = ()
    rack: int = 0
    uplink: float = 0.0
    memory: float = 0.0
    mtbf: float = NEVER
    restart: float = 120.0
    gpu_price: float = 0.0
    server_price: float = 0.0
    slowness: float = 1.0
    paced: bool = False
    by_port: bool = True
    queue: float = 0.0
    speeds: Speeds = Speeds()

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.per_host)

    def workers(self, *, grouped: bool = False, replicas: int = 1) -> Workers:
        """The devices as workers; `grouped`: those of a host are the ranks of one."""
        if grouped:
            return Workers(self.hosts, self.rate, 1, self.slowness, replicas)
        return Workers(self.hosts * self.per_host, self.rate, self.per_host, self.slowness, replicas)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run the job, and what it costs.

    Attributes:
        name: as the table calls it.
        ours: it runs through servers.
        servers: how many; 0 without.
        step: what a step takes when nothing fails.
        goodput: the share of the time that trains.
        period: seconds between snapshots at which that is so; infinite: none are needed.
        memory: of each role.
        fits: a device has that much.
        price: of a thousand steps; 0: not known.
    """

    name: str
    ours: bool
    servers: int
    replication: int
    beside: bool
    codec: str
    step: StepCost
    goodput: float
    period: float
    memory: Memory
    fits: bool
    price: float

    @property
    def seconds(self) -> float:
        """Of a step, with what failures take."""
        return self.step.seconds / self.goodput if self.goodput > 0 else math.inf


class Encoding(msgspec.Struct, frozen=True):
    """A codec as the planner sees it: bytes of a word up and down; `cast`: a collective could send the same."""

    name: str
    up: float
    down: float
    cast: bool


def candidates_for(
    workload: Workload, machines: Machines, encodings: Sequence[Encoding] = (), replicas: int = 1
) -> list[Candidate]:
    """All ways that are worth looking at; `replicas` are those of each worker. The peers come first."""
    found: list[Candidate] = []
    for encoding in (Encoding("raw", 4.0, 4.0, True), *encodings):
        sent = msgspec.structs.replace(workload, up=encoding.up, down=encoding.down)
        if encoding.cast:  # which synchronise at every step
            found += _peers(msgspec.structs.replace(sent, steps=1), machines, encoding, replicas)
        found += [
            _ours(sent, machines, encoding, site, words)
            for site, words in _sites(sent, machines, replicas)
        ]  # fmt: skip
    return found


def _sites(workload: Workload, machines: Machines, replicas: int) -> Iterator[tuple[Site, str]]:
    """The sites to look at, with their words in the table."""
    for site, words in _unpaced(machines, replicas):
        yield as_paced(site, workload, machines), words


def as_paced(site: Site, workload: Workload, machines: Machines) -> Site:
    """The site as the job paces its links."""
    if machines.paced:
        return paced(site)
    seconds = workload.nbytes / machines.rate  # K/B
    return paced_by_port(site) if machines.by_port and seconds >= WINDOW_S else site


def _unpaced(machines: Machines, replicas: int) -> Iterator[tuple[Site, str]]:
    server_rate = machines.server_rate or machines.rate
    matching = machines.hosts * machines.rate / server_rate
    counts = machines.servers or tuple(sorted({max(1, round(part * matching)) for part in _PARTS}))
    several = machines.per_host > 1
    workers = machines.workers(grouped=several, replicas=replicas)
    inside = " (ranks of a host are one worker)" if several else ""
    plain = Site(workers=(workers,), servers=(), queue=machines.queue, speeds=machines.speeds)
    for replication in (1, 2) if machines.mtbf < NEVER else (1,):
        for count in counts:
            if count < replication:
                continue
            base = msgspec.structs.replace(
                plain, servers=(Servers(count, server_rate),), replication=replication, rack=machines.rack,
                uplink=machines.uplink,
            )  # fmt: skip
            yield base, inside
            if several and not machines.rack:
                apart = (machines.workers(replicas=replicas),)
                yield msgspec.structs.replace(base, workers=apart, aggregators=True), " and an aggregator a host"
            if machines.rack and workers.count > machines.rack:
                nearby = machines.rack * machines.rate
                site = msgspec.structs.replace(base, aggregators=True, aggregator_rate=nearby)
                yield site, f"{inside} and an aggregator a rack"
        if machines.hosts >= max(2, replication) and not machines.rack:
            own = (Servers(machines.hosts, workers.rate),)
            beside = msgspec.structs.replace(plain, servers=own, beside=True, replication=replication)
            yield beside, f"{inside} on the workers' hosts"


def _ours(workload: Workload, machines: Machines, encoding: Encoding, site: Site, words: str) -> Candidate:
    step = step_cost(workload, site)
    count, hosts = site.server_count, machines.hosts
    ranks = machines.per_host if site.workers[0].per_host == 1 else 1
    memory = servers_memory(
        workload.words, count, replication=site.replication, ranks=ranks,
        largest=max(layer.words for layer in workload.layers),
    )  # fmt: skip
    stalled = elastic_goodput(_WORKER_STALL + step.seconds / 2, machines.mtbf / hosts)
    cost = _SAVED * _STATE * workload.words / count
    if site.replication > 1:
        left, period = stalled * elastic_goodput(_SERVER_STALL, machines.mtbf / count), NEVER
    else:
        period = daly_period(cost, machines.mtbf / count)
        left = stalled * goodput(period, cost, machines.restart, machines.mtbf / count)
    if site.replication > 1 and machines.mtbf < NEVER:
        period = daly_period(cost, machines.mtbf / count)  # two at once, or everything
        left *= period / (period + cost)
    rented = 0 if site.beside else count
    name = f"{count} servers{words}"
    return Candidate(
        name=name.replace("1 servers", "1 server") if count == 1 else name, ours=True, servers=count,
        replication=site.replication, beside=site.beside, codec=encoding.name, step=step, goodput=left, period=period,
        memory=memory, fits=not machines.memory or memory.device <= machines.memory,
        price=_price(machines, rented, step.seconds / left if left else math.inf),
    )  # fmt: skip


def _peers(workload: Workload, machines: Machines, encoding: Encoding, replicas: int) -> Iterator[Candidate]:
    workers = machines.workers(replicas=replicas)
    ring = Ring.of(workers, _RING_LATENCY, machines.uplink if machines.rack else 0.0)
    largest = max(layer.words for layer in workload.layers)
    cost = _SAVED_BY_PEER * _STATE * workload.words / machines.hosts
    mtbf = machines.mtbf / machines.hosts
    period = daly_period(cost, mtbf)
    left = goodput(period, cost, machines.restart, mtbf)
    for name, step, memory in (
        ("DDP", ddp_cost(workload, workers, ring, machines.speeds, workload.up), ddp_memory(workload.words)),
        ("FSDP", fsdp_cost(workload, workers, ring, machines.speeds, workload.up),
         fsdp_memory(workload.words, workers.count, largest)),
    ):  # fmt: skip
        yield Candidate(
            name=name, ours=False, servers=0, replication=1, beside=False, codec=encoding.name, step=step,
            goodput=left, period=period, memory=memory, fits=not machines.memory or memory.device <= machines.memory,
            price=_price(machines, 0, step.seconds / left if left else math.inf),
        )  # fmt: skip


def _price(machines: Machines, servers: int, seconds: float) -> float:
    """Of a thousand steps."""
    hourly = machines.gpus * machines.gpu_price + servers * machines.server_price
    return 1000 * seconds * hourly / 3600 if hourly else 0.0  # also where no step ends
