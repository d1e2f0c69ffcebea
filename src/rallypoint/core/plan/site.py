"""The machines and links of a layout, as the cost model sees them, and which links each kind of transfer uses."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

PAYLOAD = 1 / 1.046  # of Ethernet's rate at an MTU of 1500 bytes: headers take the rest
ACKNOWLEDGED = 1.015  # where both directions carry data, acknowledgements of one take so much of the other
PACED = 0.97  # of a link's rate, where connections are paced (`pacing`, `pace_mbit`)
AGGREGATOR_RATE = 2.5e9  # bytes a second between processes of one machine, a direction (this machine's loopback: 1.7)
INSIDE_RATE = 50e9  # bytes a second between the GPUs of one host, and to servers on it, where no link is used
ON_CPU = 1.8e-10  # fused AdamW on one thread, seconds a byte (188 us for 1 MiB, docs/performance.md)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What processors and links of a machine do, measured on the machine of docs/performance.md.

    Attributes:
        add: seconds that a server's core takes to add a byte of a contribution to a sum (158 us for 1 MiB).
        apply: seconds that it takes to update a byte of parameters (fp32): AdamW, `foreach`.
        own: seconds of a server's own thread for a byte of a contribution (68 us for 1 MiB), where `threads` add it.
        step: the same of a worker's own optimizer, under DDP and FSDP: on a GPU 28 bytes of memory traffic for each
            parameter at 2 TB/s; ON_CPU where workers compute on processors.
        latency: seconds from the last byte of a message sent to its use at the other end: half a round trip, threads
            that wake up.
    """

    add: float = 1.5e-10
    apply: float = 5.2e-10
    own: float = 6.5e-11
    threads: int = 1
    step: float = 3.5e-12
    latency: float = 0.5e-3

    def server(self, senders: float, nbytes: float) -> float:
        """Seconds in which a server, with a core for each thread, sums what so many send and updates `nbytes` bytes."""
        return nbytes * max(senders * self.own, (senders * self.add + self.apply) / self.threads)


class PortLosses(msgspec.Struct, frozen=True):
    """What a port loses of its rate for each further member that sends through it, up to `most` of them.

    Flows that meet at a port get unequal parts of it for a while, and the sum of a shard waits for the last of its
    contributions. Both numbers were fitted to cases of `benchmarks/planned.py`, from 85 to 800 Mbit/s.

    Attributes:
        gathered: where contributions meet: a server's port.
        spread: where versions from several servers meet: a worker's port.
        most: further ones beyond that cost nothing more (one of the cases fitted had more).
    """

    gathered: float = 0.07
    spread: float = 0.03
    most: int = 3

    def left(self, each: float, senders: float) -> float:
        """The part of a port's rate that is left where so many send through it, and each further one costs `each`."""
        return 1.0 - each * min(self.most, max(0.0, senders - 1))


LOSSES = PortLosses()
PACED_LOSSES = PortLosses(gathered=0.035, spread=0.0)  # fewer servers than workers: fitted to two cases of 4 + 1


class Servers(msgspec.Struct, frozen=True):
    """Equal servers: how many, and the rate of each one's link (bytes a second, each direction)."""

    count: int
    rate: float


class Workers(msgspec.Struct, frozen=True):
    """Equal workers: how many, the rate of the link of their host, how many share that link, and how many times slower
    than the workload says they compute. Each computes `replicas` of them one after the other, as a group of `ranks`."""

    count: int
    rate: float
    per_host: int = 1
    slowness: float = 1.0
    replicas: int = 1
    ranks: int = 1


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Who is there.

    Attributes:
        workers, servers: groups of equal ones.
        beside: the servers run on the workers' hosts, one on each, and share their links.
        replication: 2: each shard has a backup.
        aggregators: one for the workers of each host (or, with `rack`, of each rack).
        rack: workers of a rack. They share `uplink` (bytes a second each way) to everything outside.
        uplink: 0: no limit.
        losses: of ports that several send through; None: they lose nothing.
        queue: bytes that wait in the queue of a busy link; what is sent later cannot overtake them.
        blocks: how many blocks of replicas (I3) each sender pushes of every shard: 1 where its replicas are one block.
    """

    workers: tuple[Workers, ...]
    servers: tuple[Servers, ...]
    beside: bool = False
    replication: int = 1
    aggregators: bool = False
    aggregator_rate: float = AGGREGATOR_RATE
    rack: int = 0
    uplink: float = 0.0
    losses: PortLosses | None = LOSSES
    queue: float = 0.0
    blocks: float = 1.0
    speeds: Rates = Rates()

    @property
    def worker_count(self) -> int:
        return sum(group.count for group in self.workers)

    @property
    def server_count(self) -> int:
        return sum(group.count for group in self.servers)


class Wiring:
    """Which links a transfer uses, and how much of each a byte of it takes; see `core.plan.pipeline`.

    One host of each group of workers, one server of each group of servers, one rack stand for all others: by symmetry
    what leaves one leaves each. So a transfer from *each* worker of group i to *each of n* servers of group j has, on a
    worker's host, weight n times the workers of that host; and on a server weight of the number of all these workers.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        carried = PAYLOAD / ACKNOWLEDGED
        gathered, spread = self._left()
        self.capacity: dict[str, float] = {}
        for i, workers in enumerate(site.workers):
            into = min(spread, gathered) if site.beside else spread
            self.capacity |= {f"host{i} out": carried * workers.rate, f"host{i} in": carried * workers.rate * into}
        for j, servers in enumerate(site.servers if not site.beside else ()):
            rate = carried * servers.rate
            self.capacity |= {f"server{j} out": rate, f"server{j} in": rate * gathered}
        if site.rack and site.uplink:
            self.capacity |= {"rack out": carried * site.uplink, "rack in": carried * site.uplink}
        for i in range(len(site.workers) if site.aggregators else 0):
            rate = carried * site.aggregator_rate
            self.capacity |= {f"aggregator{i} out": rate, f"aggregator{i} in": rate}

    def _left(self) -> tuple[float, float]:
        """What is left of a server's port, to which all send, and of a worker's, to which all servers do."""
        site, losses = self._site, self._site.losses
        if losses is None:
            return 1.0, 1.0
        senders = sum(self.senders(i) for i in range(len(site.workers)))
        others = senders - 1 if site.beside else senders  # what its own worker sends crosses no port
        servers = 1 if site.aggregators and site.rack else site.server_count  # a rack's aggregator has its own port
        return losses.left(losses.gathered, others), losses.left(losses.spread, servers)

    def senders(self, i: int) -> int:
        """How many members of group i send to servers: its workers, or their aggregators."""
        workers = self._site.workers[i]
        near = self._site.rack or self._site.workers[0].per_host  # workers of one aggregator
        return -(-workers.count // near) if self._site.aggregators else workers.count

    def _in_rack(self, i: int) -> float:
        """How many members of group i that send to servers a rack has: every rack has its part of each group."""
        racks = max(1.0, self._site.worker_count / self._site.rack)
        return self.senders(i) / racks

    def push(self, i: int, j: int, shards: int) -> Mapping[str, float]:
        """From each worker (or aggregator) of group i, to so many servers of group j: a shard to each."""
        return self._across(i, j, shards, "out", "in")

    def publish(self, i: int, j: int, shards: int) -> Mapping[str, float]:
        """From so many servers of group j to each worker (or aggregator) of group i."""
        return self._across(i, j, shards, "in", "out")

    def _across(self, i: int, j: int, shards: int, here: str, there: str) -> dict[str, float]:
        site, workers = self._site, self._site.workers[i]
        if site.aggregators:
            uses = {f"aggregator{i} {here}": float(shards), f"server{j} {there}": float(self.senders(i))}
            through = f"rack {here}" if site.rack else f"host{i} {here}"
            return {**uses, through: shards * (self._in_rack(i) if site.rack else 1.0)}
        if site.beside:  # what goes to the server on the sender's own host crosses no link
            near = workers.per_host if i == j else 0
            away = workers.count - near
            sent = workers.per_host * shards * away / workers.count
            return {f"host{i} {here}": sent, f"host{j} {there}": float(away)}
        uses = {f"host{i} {here}": float(workers.per_host * shards), f"server{j} {there}": float(workers.count)}
        return {**uses, f"rack {here}": shards * self._in_rack(i)} if site.rack else uses

    def replicate(self, j: int, to: int) -> Mapping[str, float]:
        """From each server of group j to a backup in group `to`, a shard each."""
        kind = "host" if self._site.beside else "server"
        return {f"{kind}{j} out": 1.0, f"{kind}{to} in": 1.0}

    def gather(self, i: int) -> Mapping[str, float]:
        """From each worker of group i to its aggregator: one shard."""
        inside = {} if not self._site.rack else {f"host{i} out": float(self._site.workers[i].per_host)}
        return {**inside, f"aggregator{i} in": self._of_aggregator(i)}

    def spread(self, i: int) -> Mapping[str, float]:
        """From each aggregator to each of its workers: one shard."""
        inside = {} if not self._site.rack else {f"host{i} in": float(self._site.workers[i].per_host)}
        return {**inside, f"aggregator{i} out": self._of_aggregator(i)}

    def _of_aggregator(self, i: int) -> float:
        return self._site.workers[i].count / self.senders(i)


def paced(site: Site) -> Site:
    """The same site with `pace_mbit` a little below the links' rate. With aggregators nobody is paced."""
    if site.aggregators:
        return site
    return msgspec.structs.replace(
        site,
        workers=tuple(msgspec.structs.replace(group, rate=PACED * group.rate) for group in site.workers),
        servers=tuple(Servers(group.count, PACED * group.rate) for group in site.servers),
        losses=None if site.server_count >= site.worker_count else PACED_LOSSES,
    )


def paced_by_port(site: Site) -> Site:
    """The same site with the pace that members find by themselves (`pacing="auto"`): workers do, with at least as many
    servers; and servers, with equally many and no backups. On hosts of their own; with racks it is left out here.
    """
    if site.aggregators or site.beside or site.rack or site.server_count < max(2, site.worker_count):
        return site
    both = site.server_count == site.worker_count and site.replication == 1
    workers, servers = paced(site).workers, paced(site).servers if both else site.servers
    losses = None if both or site.losses is None else msgspec.structs.replace(site.losses, gathered=0.0)
    return msgspec.structs.replace(site, workers=workers, servers=servers, losses=losses)
