"""The ways in which a job could run on some machines, what each costs, and which of them to use: servers, or DDP or
FSDP where servers would not pay. They are the rows of `rallypoint plan`, and its last sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from rallypoint.core.plan.failures import NEVER, daly_period, elastic_goodput, goodput
from rallypoint.core.plan.peers import Footprint, Ring, ddp_cost, ddp_memory, fsdp_cost, fsdp_memory, servers_memory
from rallypoint.core.plan.pipeline import StepCost, step_cost
from rallypoint.core.plan.port import WINDOW_S
from rallypoint.core.plan.site import Rates, Servers, Site, Workers, paced, paced_by_port
from rallypoint.core.plan.workload import Workload

_STATE = 12  # bytes of a parameter in a snapshot: the value and AdamW's moments
_SAVED, _SAVED_BY_PEER = 0.12e-9, 0.83e-9  # seconds of training that a byte of a snapshot costs (docs/performance.md)
_WORKER_STALL, _SERVER_STALL = 0.2, 0.3  # seconds, the same page: 20 kills of a worker, 8 of a server
_RESTART = 120.0  # seconds until a job without servers trains again after a failure
_RING_LATENCY = 1e-4  # of one hop of a collective
MARGIN = 1.03  # a lead that is smaller is not one: what nobody has to change is better
_MOST = 100  # of a ratio that is told
_CLOSE = 1.02  # among servers, fewer of them are preferred when they come so near to the best
_PARTS = (0.25, 0.5, 1.0, 1.25, 2.0)  # of the servers' links that would match the workers'


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to run on.

    Attributes:
        gpus: processes that compute, one for each device.
        per_host: devices on each host; they share its link.
        rate: bytes a second and direction of a host's link, and of a server's.
        servers: how many servers may be had; empty: numbers that suit the workers.
        memory: bytes of a device; 0: enough.
        mtbf: seconds between two failures of one machine, on average; infinite: none.
        paced: the job sets `pace_mbit`, a little below the links' rate.
        by_port: members find a pace by themselves (`pacing="auto"`), where that is not set.
    """

    gpus: int
    per_host: int = 1
    rate: float
    servers: tuple[int, ...] = ()
    memory: float = 0.0
    mtbf: float = NEVER
    paced: bool = False
    by_port: bool = True

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.per_host)

    def workers(self, *, grouped: bool = False, replicas: int = 1) -> Workers:
        """The devices as workers; `grouped`: those of a host are the ranks of one."""
        if grouped:
            return Workers(self.hosts, self.rate, replicas=replicas)
        return Workers(self.hosts * self.per_host, self.rate, self.per_host, replicas=replicas)


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
    memory: Footprint
    fits: bool

    @property
    def seconds(self) -> float:
        """Of a step, with what failures take."""
        return self.step.seconds / self.goodput if self.goodput > 0 else math.inf


class PlannedCodec(msgspec.Struct, frozen=True):
    """A codec as the planner sees it: bytes of a word up and down; `cast`: a collective could send the same."""

    name: str
    up: float
    down: float
    cast: bool


def candidates_for(
    workload: Workload, machines: Machines, encodings: Sequence[PlannedCodec] = (), replicas: int = 1
) -> list[Candidate]:
    """All ways that are worth looking at; `replicas` are those of each worker. The peers come first."""
    found: list[Candidate] = []
    for encoding in (PlannedCodec("raw", 4.0, 4.0, True), *encodings):
        sent = msgspec.structs.replace(workload, up=encoding.up, down=encoding.down)
        if encoding.cast:  # which synchronise at every step
            found += _peers(msgspec.structs.replace(sent, steps=1), machines, encoding, replicas)
        found += [_ours(sent, machines, encoding, site, words) for site, words in _sites(sent, machines, replicas)]
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
    counts = machines.servers or tuple(sorted({max(1, round(part * machines.hosts)) for part in _PARTS}))
    several = machines.per_host > 1
    workers = machines.workers(grouped=several, replicas=replicas)
    inside = " (ranks of a host are one worker)" if several else ""
    for replication in (1, 2) if machines.mtbf < NEVER else (1,):
        for count in counts:
            if count < replication:
                continue
            base = Site(workers=(workers,), servers=(Servers(count, machines.rate),), replication=replication)
            yield base, inside
            if several:
                apart = (machines.workers(replicas=replicas),)
                yield msgspec.structs.replace(base, workers=apart, aggregators=True), " and an aggregator a host"
        if machines.hosts >= 2:
            own = (Servers(machines.hosts, machines.rate),)
            beside = Site(workers=(workers,), servers=own, beside=True, replication=replication)
            yield beside, f"{inside} on the workers' hosts"


def _ours(workload: Workload, machines: Machines, encoding: PlannedCodec, site: Site, words: str) -> Candidate:
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
        left = stalled * goodput(period, cost, _RESTART, machines.mtbf / count)
    if site.replication > 1 and machines.mtbf < NEVER:
        period = daly_period(cost, machines.mtbf / count)  # two at once, or everything
        left *= period / (period + cost)
    name = f"{count} servers{words}"
    return Candidate(
        name=name.replace("1 servers", "1 server") if count == 1 else name, ours=True, servers=count,
        replication=site.replication, beside=site.beside, codec=encoding.name, step=step, goodput=left, period=period,
        memory=memory, fits=not machines.memory or memory.device <= machines.memory,
    )  # fmt: skip


def _peers(workload: Workload, machines: Machines, encoding: PlannedCodec, replicas: int) -> Iterator[Candidate]:
    workers = machines.workers(replicas=replicas)
    ring = Ring.of(workers, _RING_LATENCY)
    largest = max(layer.words for layer in workload.layers)
    cost = _SAVED_BY_PEER * _STATE * workload.words / machines.hosts
    mtbf = machines.mtbf / machines.hosts
    period = daly_period(cost, mtbf)
    left = goodput(period, cost, _RESTART, mtbf)
    for name, step, memory in (
        ("DDP", ddp_cost(workload, workers, ring, Rates(), workload.up), ddp_memory(workload.words)),
        ("FSDP", fsdp_cost(workload, workers, ring, Rates(), workload.up),
         fsdp_memory(workload.words, workers.count, largest)),
    ):  # fmt: skip
        yield Candidate(
            name=name, ours=False, servers=0, replication=1, beside=False, codec=encoding.name, step=step,
            goodput=left, period=period, memory=memory, fits=not machines.memory or memory.device <= machines.memory,
        )  # fmt: skip


class Judgement(msgspec.Struct, frozen=True):
    """`best` is to be used; `other` is the best of the other kind (None: there is none that fits); `why` says so."""

    best: Candidate
    other: Candidate | None
    why: str

    @property
    def ours(self) -> bool:
        return self.best.ours

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Judgement:
        """Choose by the seconds of a step, with what failures take of them."""
        ours, peers = (_best([one for one in candidates if one.fits and one.ours is kind]) for kind in (True, False))
        if ours is None and peers is None:
            least = min(candidates, key=lambda one: one.memory.device)
            return cls(least, None, f"nothing fits: {least.name} needs least, {_gb(least.memory.device)} GB a device")
        if all(math.isinf(one.seconds) for one in (ours, peers) if one is not None):
            least = min((one for one in (ours, peers) if one is not None), key=lambda one: one.step.seconds)
            return cls(least, None, f"no layout gets on: with these failures not even {called(least)} ends a step")
        if peers is None:
            assert ours is not None
            return cls(ours, None, f"use {called(ours)}: {_says(ours)}; neither DDP nor FSDP fits")
        if ours is None:
            return cls(peers, None, f"use {called(peers)}: {_says(peers)}; with servers it does not fit")
        ratio = peers.seconds / ours.seconds
        if ratio >= MARGIN:
            times = f"{ratio:.2f}" if ratio < _MOST else f"more than {_MOST}"
            beside = f"{times} times as fast as {called(peers)} ({_says(peers)})"
            return cls(ours, peers, f"use {called(ours)}: {_says(ours)}, {beside}{_hint(ours)}")
        waits = peers.step.waited / peers.step.seconds
        reason = f": computing hides all but {waits:.0%} of its step" if waits < 0.1 else ""
        why = (
            f"use {called(peers)}, servers would not pay: {_says(peers)}{reason}, and at best "
            f"{_says(ours)} with {called(ours)}"
        )
        return cls(peers, ours, why)


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    if not candidates:
        return None
    least = min(one.seconds for one in candidates)
    near = [one for one in candidates if one.seconds <= _CLOSE * least]
    return min(near, key=lambda one: (one.servers, one.seconds))


def called(one: Candidate) -> str:
    """A candidate with all that sets it apart: ``4 servers, replication 2, bf16``."""
    codec = "" if one.codec == "raw" else f", {one.codec}"
    return f"{one.name}{', replication 2' if one.replication > 1 else ''}{codec}"


def _says(one: Candidate) -> str:
    return f"{one.seconds:.3g} s a step"


def _hint(one: Candidate) -> str:
    return "" if one.period == NEVER else f"; a snapshot every {one.period:,.0f} s (--snapshot-seconds)"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g}"
