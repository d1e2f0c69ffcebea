"""The ways in which a job could run on some machines, what each costs, and which of them to use: servers, or DDP or
FSDP where servers would not pay. They are the rows of `rallypoint plan`, and its last sentence.

With servers, `advice` says which mode to use: whether they step, or the workers. A job's start says the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from rallypoint.core.layout import WORD_BYTES
from rallypoint.core.plan.failures import NEVER, daly_period, elastic_goodput, goodput
from rallypoint.core.plan.pipeline import StepCost, step_cost
from rallypoint.core.plan.port import WINDOW_S
from rallypoint.core.plan.site import INSIDE_RATE, LOSSES, PAYLOAD, Rates, Servers, Site, Workers, paced, paced_by_port
from rallypoint.core.plan.tuning import ASSUMED_MBIT
from rallypoint.core.plan.workload import Workload, transformer

_STATE = 12  # bytes of a parameter in a snapshot: the value and AdamW's moments
_SAVED, _SAVED_BY_PEER = 0.12e-9, 0.83e-9  # seconds of training that a byte of a snapshot costs (docs/performance.md)
_WORKER_STALL, _SERVER_STALL = 0.2, 0.3  # seconds; the same page: 0.19, and 0.03 (0.53 at most)
_RESTART = 120.0  # seconds until a job without servers trains again after a failure
_RING_LATENCY = 1e-4  # of one hop of a collective
MARGIN = 1.03  # a lead that is smaller is not one: what nobody has to change is better
_MOST = 100  # of a ratio that is told
_COMPUTING_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # a step may, at the start of a job: nobody knows yet
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
        rate = self.rate if self.hosts > 1 else INSIDE_RATE
        if grouped:
            return Workers(self.hosts, rate, replicas=replicas, ranks=self.per_host)
        return Workers(self.hosts * self.per_host, rate, self.per_host, replicas=replicas)

    def site(self, servers: int, workers: Workers, *, replication: int = 1, beside: bool = False) -> Site:
        """These workers and so many servers. With one host, these are on it too, and no link is used."""
        inside = self.hosts == 1
        return Site(
            workers=(workers,), servers=(Servers(servers, workers.rate),), replication=replication,
            beside=beside and not inside, losses=None if inside else LOSSES,
        )  # fmt: skip


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
        all_reduce: workers step, not servers.
        advice: a sentence on that.
    """

    name: str
    ours: bool
    servers: int
    replication: int
    codec: str
    step: StepCost
    goodput: float
    period: float
    memory: Footprint
    fits: bool
    all_reduce: bool = False
    advice: str = ""

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
        for site, words in _unpaced(machines, replicas):
            found.append(_ours(sent, machines, encoding, as_paced(site, sent, machines), words))
    return found


def as_paced(site: Site, workload: Workload, machines: Machines) -> Site:
    """The site as the job paces its links."""
    if machines.hosts == 1:
        return site
    if machines.paced:
        return paced(site)
    seconds = workload.nbytes / machines.rate  # K/B
    return paced_by_port(site) if machines.by_port and seconds >= WINDOW_S else site


def _unpaced(machines: Machines, replicas: int) -> Iterator[tuple[Site, str]]:
    counts = machines.servers or tuple(sorted({max(1, round(part * machines.hosts)) for part in _PARTS}))
    several = machines.per_host > 1
    workers, apart = (machines.workers(grouped=grouped, replicas=replicas) for grouped in (several, False))
    inside = " (ranks of a host are one worker)" if several else ""
    for replication in (1, 2) if machines.mtbf < NEVER else (1,):
        for count in counts:
            if count < replication:
                continue
            yield machines.site(count, workers, replication=replication), inside
            if several:
                near = machines.site(count, apart, replication=replication)
                shared = machines.hosts > 1  # a link
                yield msgspec.structs.replace(near, aggregators=shared), " and an aggregator a host" if shared else ""
        if machines.hosts >= 2:
            beside = machines.site(machines.hosts, workers, replication=replication, beside=True)
            yield beside, f"{inside} on the workers' hosts"


def _ours(workload: Workload, machines: Machines, encoding: PlannedCodec, site: Site, words: str) -> Candidate:
    advised = advice(workload, [site], machines.memory)
    step, count, hosts = advised.step, site.server_count, machines.hosts
    memory = servers_memory(
        workload.words, count, replication=site.replication, ranks=site.workers[0].ranks,
        largest=max(layer.words for layer in workload.layers),
    )  # fmt: skip
    if advised.all_reduce:
        memory = Footprint(ddp_memory(workload.words).device, memory.host, 2 * workload.nbytes / count)
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
        replication=site.replication, codec=encoding.name, step=step, goodput=left, period=period,
        memory=memory, fits=not machines.memory or memory.device <= machines.memory, all_reduce=advised.all_reduce,
        advice=advised.says,
    )  # fmt: skip


class ModeAdvice(msgspec.Struct, frozen=True):
    """Which mode to use with servers.

    Attributes:
        all_reduce: workers step (`rp.AllReduce`), not servers (`rp.Sync`).
        ranks: of each worker.
        step: what a step takes then.
        says: all that as a sentence, with the reason; "": nothing is to be chosen.
    """

    all_reduce: bool
    ranks: int
    step: StepCost
    says: str = ""


def advice(workload: Workload, sites: Sequence[Site], memory: float = 0.0) -> ModeAdvice:
    """Which mode is the quickest on one of these sites; the first is the one that a job has.

    What gains less than MARGIN is no reason to change anything. `memory`: bytes of a device; 0: enough. A workload of
    0 s is one of which nobody knows how long it computes.
    """
    need, ways = ddp_memory(workload.words).device, list[tuple[Site, ModeAdvice]]()
    fits = not memory or need <= memory
    for site in sites:
        ranks, step = site.workers[0].ranks, step_cost(workload, site)
        ways.append((site, ModeAdvice(False, ranks, step)))
        if fits and ranks == 1 and site.replication == 1 and workload.steps == 1:
            ways.append((site, ModeAdvice(True, 1, _stepped_by_workers(workload, site))))
    least, now = min(ways, key=lambda way: way[1].step.seconds), ways[0][1].step.seconds
    site, best = ways[0] if now < MARGIN * least[1].step.seconds else least
    if workload.steps > 1:
        return best
    servers = "1 server" if site.server_count == 1 else f"{site.server_count} servers"
    here = {way.all_reduce: way.step.seconds for there, way in ways if there is site}
    if best.all_reduce:
        what, why = "sync=rp.AllReduce()", f", {here[False]:.3g} s with the optimizer on processors of {servers}"
    elif best.ranks > 1:
        what, why = f"rp.Sync() with workers of {best.ranks} ranks (--ranks {best.ranks})", ", and each sends one sum"
    elif not fits:
        what, why = "rp.Sync()", f"; with the optimizer on workers each would need {_gb(need)} GB"
    else:
        less = f", {'hardly' if min(here.values()) < now else 'not'} less with the optimizer on workers"
        what, why = "rp.Sync(), the default", less if True in here else ""
    takes = f"a step takes {best.step.seconds:.3g} s{'' if workload.compute else ' beside what a worker computes'}{why}"
    return msgspec.structs.replace(best, says=f"with servers, the mode for these machines is {what}: {takes}")


def _stepped_by_workers(workload: Workload, site: Site) -> StepCost:
    """What a step costs if servers only add up, and each worker steps all of the model."""
    speeds = msgspec.structs.replace(site.speeds, apply=0.0)
    cost = step_cost(workload, msgspec.structs.replace(site, speeds=speeds))
    return StepCost(cost.seconds + site.speeds.step * workload.nbytes, cost.waited)


def advice_at_start(
    nbytes: int, workers: int, hosts: int, servers: int, *, ranks: int = 1, beside: bool = False, mbit: float = 0.0,
    memory: float = 0.0,
) -> ModeAdvice:  # fmt: skip
    """The advice for a job of `nbytes` of parameters (K) that begins: nobody knows yet how long it computes.

    `workers` of `ranks` each compute on GPUs of `hosts`; `beside`: there is a server on each of these. `mbit` is what a
    host's link carries; 0: it was not told. `memory`: bytes of a GPU.
    """
    machines = Machines(gpus=workers, per_host=-(-workers // hosts), rate=(mbit or ASSUMED_MBIT) * 1e6 / 8)
    kinds = [msgspec.structs.replace(machines.workers(), ranks=ranks)]
    kinds += [machines.workers(grouped=True)] if ranks == 1 < machines.per_host else []
    work = Workload(layers=transformer(nbytes / WORD_BYTES, 0.0))
    own = beside and servers == hosts
    sites = [as_paced(machines.site(servers, kind, beside=own), work, machines) for kind in kinds]
    found, says = advice(work, sites, memory), ""
    for seconds in () if (found.all_reduce, found.ranks) == (False, ranks) else _COMPUTING_S:
        then = advice(Workload(layers=transformer(nbytes / WORD_BYTES, seconds)), sites, memory)
        if (then.all_reduce, then.ranks) == (False, ranks):
            says = f"; from {seconds:g} s of computing on the default is as quick"
            break
    says += "" if mbit or hosts == 1 else f" (links of {ASSUMED_MBIT / 1e3:g} Gbit/s are assumed)"
    return msgspec.structs.replace(found, says=found.says + says)


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
            name=name, ours=False, servers=0, replication=1, codec=encoding.name, step=step,
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

    @property
    def advice(self) -> str:
        """A sentence on the mode to use with servers, `best` or not; "": none of these layouts has any."""
        return max(one.advice for one in (self.best, self.other or self.best))

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
            often = "" if ours.period == NEVER else f"; a snapshot every {ours.period:,.0f} s (--snapshot-seconds)"
            return cls(ours, peers, f"use {called(ours)}: {_says(ours)}, {beside}{often}")
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
    return f"{one.name}{', AllReduce' * one.all_reduce}{', replication 2' * (one.replication > 1)}{codec}"


def _says(one: Candidate) -> str:
    return f"{one.seconds:.3g} s a step"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g}"


# ---- A step without servers: DDP and FSDP among the workers themselves, as what a user would pick instead ----
#
# DDP (Li et al., VLDB 2020) reduces buckets of 25 MiB, in backward order, the first one of 1 MiB; the optimizer steps
# when the last has come. FSDP (Zhao et al., VLDB 2023) gathers each unit before its forward and its backward pass, one
# ahead, and scatters its gradients after the latter. Collectives go one at a time, as rings over the hosts' links.


FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # torch's defaults, bytes of gradient


class Ring(msgspec.Struct, frozen=True):
    """All ranks in a ring: on each host it enters once and leaves once, so a host's link carries one rank's bytes."""

    members: int
    rate: float
    latency: float

    @classmethod
    def of(cls, workers: Workers, latency: float) -> Ring:
        if workers.count <= workers.per_host:
            return cls(workers.count, INSIDE_RATE, latency)
        return cls(workers.count, PAYLOAD * workers.rate, latency)

    def seconds(self, nbytes: float, passes: int = 2) -> float:
        """Reduce-scatter and all-gather of so many bytes, or only one of them (`passes` = 1)."""
        if self.members < 2:
            return 0.0
        hops = min(self.members - 1, 2 * math.ceil(math.log2(self.members)))  # NCCL: trees where there are many
        return passes * (ring_bytes(nbytes, self.members) / 2 / self.rate + hops * self.latency)


def ddp_cost(workload: Workload, workers: Workers, ring: Ring, speeds: Rates, word_bytes: float = 4.0) -> StepCost:
    """DDP's step. `word_bytes`: 2 where a communication hook sends bf16."""
    free = _replicas_before(workload, workers) + workload.forward * workers.slowness
    now = free
    size, filled, full = word_bytes, 0.0, FIRST_BUCKET / WORD_BYTES
    for layer in reversed(workload.layers):
        now += layer.backward * workers.slowness
        filled += layer.words
        while filled >= full:
            free, filled, full = max(free, now) + ring.seconds(size * full), filled - full, BUCKET / WORD_BYTES
    if filled:
        free = max(free, now) + ring.seconds(size * filled)
    seconds = max(free, now) + speeds.step * workload.nbytes
    return StepCost(seconds, seconds - _busy(workload, workers))


def fsdp_cost(workload: Workload, workers: Workers, ring: Ring, speeds: Rates, word_bytes: float = 4.0) -> StepCost:
    """FSDP's step, parameters gathered twice; each layer of the workload is a unit."""
    layers, now, free = workload.layers, 0.0, 0.0
    here = [0.0] * len(layers)  # when a unit has been gathered

    def gather(index: int) -> None:
        nonlocal free
        if 0 <= index < len(layers):
            free = max(free, now) + ring.seconds(word_bytes * layers[index].words, 1)
            here[index] = free

    gather(0)
    for index, layer in enumerate(layers):
        gather(index + 1)
        now = max(now, here[index]) + layer.forward * workers.slowness
    now += _replicas_before(workload, workers)
    gather(len(layers) - 1)
    for index in reversed(range(len(layers))):
        gather(index - 1)
        now = max(now, here[index]) + layers[index].backward * workers.slowness
        free = max(free, now) + ring.seconds(word_bytes * layers[index].words, 1)
    seconds = max(free, now) + speeds.step * workload.nbytes / ring.members
    return StepCost(seconds, seconds - _busy(workload, workers))


def _replicas_before(workload: Workload, workers: Workers) -> float:
    """Seconds of the replicas that a worker adds up without sending (`no_sync`), before the last one."""
    return (workers.replicas - 1) * workload.compute * workers.slowness


def _busy(workload: Workload, workers: Workers) -> float:
    return workers.replicas * workload.compute * workers.slowness


def ring_bytes(nbytes: float, members: int) -> float:
    """What each member of a ring sends, and receives: 2(n-1)/n K. Example: 4 members send 1.5 K each.

    Patarasuk and Yuan, 2009: a reduce-scatter and an all-gather, each of n-1 rounds of K/n. No all-reduce among the
    members alone sends less. (Google's page on Vertex AI's Reduction Server calls this "twice the data", which it is
    for large n only: for n = 2 it is K.)
    """
    return 2 * (members - 1) / members * nbytes


# Bytes that each role holds for a model, fp32 with AdamW: the table of docs/memory.md as functions.
#
# Activations are in none of them: they are the same in every layout.


_PARAMETER, _GRADIENT, _MOMENTS = 4, 4, 8


class Footprint(msgspec.Struct, frozen=True):
    """Bytes on a worker's device, in the memory of its host (for each worker), on each server; 0: nothing there."""

    device: float
    host: float = 0.0
    server: float = 0.0


def ddp_memory(words: float) -> Footprint:
    """DDP with `gradient_as_bucket_view`: 16 bytes a parameter on every device."""
    return Footprint((_PARAMETER + _GRADIENT + _MOMENTS) * words)


def fsdp_memory(words: float, ranks: int, largest: float) -> Footprint:
    """FSDP2: 16 bytes over the ranks, and the largest unit (words) gathered."""
    return Footprint((_PARAMETER + _GRADIENT + _MOMENTS) * words / ranks + _PARAMETER * largest)


def servers_memory(
    words: float, servers: int, *, replication: int = 1, ranks: int = 1, largest: float = 0.0
) -> Footprint:  # fmt: skip
    """Through servers: parameters, a layer's gradients, a buffer on the host; there masters, moments, two versions.

    `ranks`: of each worker, which shards the model among them by FSDP2; its buffer is on the host of rank 0.
    """
    here = (_PARAMETER + _GRADIENT) / ranks * words if ranks > 1 else _PARAMETER * words
    there = (_PARAMETER + _MOMENTS + 2 * _PARAMETER) * replication * words / servers
    return Footprint(here + _GRADIENT * largest, _PARAMETER * words / ranks, there)
