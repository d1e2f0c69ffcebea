"""A step through the servers, as discrete events: what waits for what, on links that transfers share.

Each group of equal workers is one that computes (`Computing`). A layer's forward pass waits for its own shards; its
backward pass makes gradients, the last layer's first; a complete shard goes to its server before those of later layers
that still wait, and overtakes none that is being sent. A server that has all contributions to a shard updates it, sends
the gradient to a backup if there is one, and then the new version to all workers, early layers first::

    backward of layer 5 .. 0       layer k's shards: up -> sum, update -> (backup) -> down -> forward of layer k
    |5 |4 |3 |2 |1 |0 |            what is left beside computing and the links: layer 0 goes up and down while nothing
                      |--|0 |1 |   is computed, and each shard takes both ways by itself

Not in it: a server's credits (DESIGN.md, incast), packets lost, TCP's slow start, processors that are shared by others.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.layout import WORD_BYTES
from rallypoint.core.plan.site import Servers, Site, Wiring
from rallypoint.core.plan.workload import Workload

# The shards of a workload in bundles: those that lie beside each other, one on each server of a group.
#
# All servers of a group are alike, and neighbouring shards are placed on different ones (`core.placing.placement`), so
# the shards of a bundle travel at the same time, each on its own link. The cost model moves bundles, not shards: a
# model of 7e9 parameters has 26,703 shards, and on 64 servers 418 bundles.
#
# Where there are few, a bundle would wait for the last of its shards: `split` then makes smaller groups of servers.

MOST_BUNDLES = 256  # a step of more is computed with larger shards
_FEWEST_BUNDLES, _MOST_GROUPS = 32, 16


class Bundle(msgspec.Struct, frozen=True):
    """Shards [first, first + count) of equal size, on so many servers of a group.

    Attributes:
        group: the group of servers.
        count: the shards, each on a server of its own.
        words: of each shard.
        ready: the layer whose backward pass completes them: the lowest that has words in them.
        layers: all layers that have words in them.
    """

    group: int
    count: int
    words: int
    ready: int
    layers: tuple[int, ...]


def split(workload: Workload, site: Site) -> Site:
    """The site; if there are few bundles, with its servers in more groups."""
    count = site.server_count
    runs = workload.nbytes / workload.shard_bytes / count
    groups = min(_MOST_GROUPS, count, math.ceil(_FEWEST_BUNDLES / runs))
    if site.beside or groups <= len(site.servers):
        return site
    servers: list[Servers] = []
    for group in site.servers:
        parts = max(1, round(groups * group.count / count))
        ends = [group.count * part // parts for part in range(parts + 1)]
        servers += [Servers(after - before, group.rate) for before, after in itertools.pairwise(ends)]
    return msgspec.structs.replace(site, servers=tuple(servers))


def bundles_of(workload: Workload, servers: Sequence[Servers]) -> list[Bundle]:
    """All bundles, in backward order: the last layer's shards are first (`core.layout`)."""
    size = _shard_words(workload, servers)
    ends, reached = [0] * len(workload.layers), 0
    for index in reversed(range(len(workload.layers))):
        reached += workload.layers[index].words
        ends[index] = reached  # of the layer's words in backward order
    found: list[Bundle] = []
    start, group = 0, 0
    while start < reached:
        count = min(servers[group].count, -(-(reached - start) // size))
        stop = min(start + count * size, reached)
        layers = tuple(
            index for index, layer in enumerate(workload.layers)
            if layer.words and start < ends[index] and ends[index] - layer.words < stop
        )  # fmt: skip
        found.append(Bundle(group, count, -(-(stop - start) // count), min(layers), layers))
        start, group = stop, (group + 1) % len(servers)
    return found


def _shard_words(workload: Workload, servers: Sequence[Servers]) -> int:
    """The words of a shard; more than the workload says where there would be too many bundles."""
    size = workload.shard_bytes // WORD_BYTES
    runs = workload.words / (size * sum(group.count for group in servers))
    return max(size, round(size * runs * len(servers) / MOST_BUNDLES))


# A fluid model of links: every transfer flows at its fair share of the links that it uses, until one ends.
#
# Shares are max-min fair (Bertsekas and Gallager, Data Networks, section 6.5.2): no transfer can get more without one
# that has less getting less. TCP connections with equal round trips have equal shares over a long time. Over the
# seconds of a step they have not: what that costs is taken from the capacity of ports (`core.plan.site.PortLosses`).
#
# A transfer stands for as many equal ones as its weights say: four workers that push at once are one transfer, with
# weight 1 on (any) worker's link and weight 4 on the server's::
#
#     network = Flows({"worker": 125e6, "server": 125e6})
#     network.start("push", 1e6, {"worker": 1.0, "server": 4.0})     # 1 MB each: 31.25 MB/s each
#     network.first_end()                                            # 0.032

_ENDS = 1e-9  # a transfer with so little left, of its bytes, has ended: rounding


Kind = tuple[tuple[str, float], ...]  # the links that a transfer uses, and how much of each


@dataclass(slots=True)
class Transfer:
    """Bytes that are left, of each of the equal transfers that it stands for; its rate at the moment."""

    left: float
    nbytes: float
    kind: Kind
    rate: float = 0.0


class Flows:
    """Links with capacities (bytes a second), and the transfers under way on them."""

    def __init__(self, capacity: Mapping[str, float]) -> None:
        if min(capacity.values(), default=1.0) <= 0:
            raise ValueError("a link without capacity would never carry anything")
        self._capacity = dict(capacity)
        self._transfers: dict[Hashable, Transfer] = {}
        self._known: dict[tuple[Kind, ...], dict[Kind, float]] = {}  # the rates of transfers of these kinds
        self._shared = True  # the rates are those of the transfers that are under way

    def __len__(self) -> int:
        return len(self._transfers)

    def start(self, name: Hashable, nbytes: float, uses: Mapping[str, float]) -> None:
        """Begin a transfer. `uses`: link -> how much of it each byte takes; links without a capacity are not limited.

        ValueError for a name that is under way.
        """
        if name in self._transfers:
            raise ValueError(f"{name} is under way already")
        known = tuple((link, weight) for link, weight in uses.items() if link in self._capacity and weight > 0)
        self._transfers[name] = Transfer(nbytes, nbytes, known)
        self._shared = False

    def rate(self, name: Hashable) -> float:
        """The rate of one transfer now, in bytes a second; infinite if no link limits it."""
        self._share()
        return self._transfers[name].rate

    def first_end(self) -> float:
        """Seconds until the first transfer ends; infinite without one."""
        self._share()
        return min((one.left / one.rate for one in self._transfers.values()), default=math.inf)

    def advance(self, seconds: float) -> list[Hashable]:
        """Let time pass, no more than `first_end`. Returns the transfers that have ended."""
        self._share()
        ended = []
        for name, one in self._transfers.items():
            one.left = 0.0 if one.rate == math.inf else one.left - one.rate * seconds
            if one.left <= _ENDS * one.nbytes:
                ended.append(name)
        for name in ended:
            del self._transfers[name]
        self._shared = self._shared and not ended
        return ended

    def _share(self) -> None:
        if self._shared:
            return
        self._shared = True
        kinds = tuple(sorted(one.kind for one in self._transfers.values()))
        if (rates := self._known.get(kinds)) is None:
            rates = self._known[kinds] = self._rates(kinds)
        for one in self._transfers.values():
            one.rate = rates[one.kind]

    def _rates(self, kinds: Sequence[Kind]) -> dict[Kind, float]:
        """Fill all transfers at one pace; whenever a link is full, those that use it stay at what they have."""
        rates = dict.fromkeys(kinds, math.inf)
        left = dict(self._capacity)
        users: dict[str, dict[int, float]] = {}
        for number, uses in enumerate(kinds):
            for link, weight in uses:
                users.setdefault(link, {})[number] = weight
        while users:
            level, full = min((left[link] / sum(weights.values()), link) for link, weights in users.items())
            for number in list(users[full]):
                rates[kinds[number]] = level
                for link, weight in kinds[number]:
                    left[link] = max(0.0, left[link] - level * weight)
                    users[link].pop(number, None)
            users = {link: weights for link, weights in users.items() if weights}
        return rates


_UNSENT_BYTES = 512 << 10  # as in `net.tcp`
_STEPS = 3  # the last one is what a step takes: each begins as the one before it has left things


class StepCost(msgspec.Struct, frozen=True):
    """What a step of training takes; `waited` is the part of it in which a worker computed nothing."""

    seconds: float
    waited: float


def step_cost(workload: Workload, site: Site) -> StepCost:
    """What a step takes with these servers, once it goes on as the one before it did."""
    site = split(workload, site)
    seconds = Pipeline(workload, site).run(_STEPS) / workload.steps
    busy = max(group.slowness * group.replicas for group in site.workers) * workload.compute
    return StepCost(seconds, max(0.0, seconds - busy))


class Parcel(msgspec.Struct):
    """A bundle on its way over the connections of a lane: bytes on each of them, of which `left` are not sent yet."""

    name: Hashable
    left: float
    uses: Mapping[str, float]
    arrived: Callable[[], None]


@dataclass(slots=True)
class Lane:
    """The connections between two groups, or one connection of each member of a group.

    They send one parcel after the other. Which one is next is settled as soon as there is room in the kernel's buffer,
    and in the queue of the link: from then on no other can overtake it.
    """

    ahead: float  # bytes that may be settled on each connection
    waiting: list[tuple[int, int, Parcel]] = field(default_factory=list)  # by rank
    settled: deque[Parcel] = field(default_factory=deque)
    busy: bool = False


@dataclass(slots=True)
class Computing:
    """A group of workers in a step: `at` counts forward passes of layers, then backward ones.

    Attributes:
        here: of each bundle the newest version that has come.
        missing: the bundles that the next forward pass still waits for.
        begun: when each step began.
    """

    here: list[int]
    step: int = 0
    at: int = 0
    missing: int = 0
    begun: list[float] = field(default_factory=list)


class Pipeline:
    """Plays a few steps; see the module."""

    def __init__(self, workload: Workload, site: Site) -> None:
        self._workload, self._site, self._wiring = workload, site, Wiring(site)
        self._network = Flows(self._wiring.capacity)
        self._bundles = bundles_of(workload, site.servers)
        self._of_layer: list[list[int]] = [[] for _ in workload.layers]
        self._made: list[list[int]] = [[] for _ in workload.layers]
        for index, bundle in enumerate(self._bundles):
            self._made[bundle.ready].append(index)
            for layer in bundle.layers:
                self._of_layer[layer].append(index)
        self._computing = [Computing([0] * len(self._bundles)) for _ in site.workers]
        self._lanes: dict[Hashable, Lane] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._queued = site.queue / site.server_count  # of each connection of a worker
        self._arrived: dict[tuple[int, int], int] = {}  # (bundle, step) -> groups whose contributions have come
        self._clipped: dict[int, list[int]] = {}  # step -> bundles that wait for the norm
        self._free = [0.0] * len(site.servers)  # when the thread that owns a server's shards has done all it has
        self._done: dict[Hashable, Callable[[], None]] = {}

    def run(self, rounds: int) -> float:
        """The seconds of the last of so many rounds."""
        for worker in range(len(self._computing)):
            self._begin(worker)
        while any(len(one.begun) <= rounds for one in self._computing):
            self._advance()
        starts = [max(one.begun[number] for one in self._computing) for number in (rounds - 1, rounds)]
        return starts[1] - starts[0]

    # ---- time ----

    def _advance(self) -> None:
        timer = self._timers[0][0] - self._now if self._timers else math.inf
        transfer = self._network.first_end()
        if min(timer, transfer) == math.inf:
            raise RuntimeError("the cost model waits for nothing that could happen")
        act = heapq.heappop(self._timers)[2] if timer <= transfer else None
        seconds = max(0.0, min(timer, transfer))
        self._now += seconds
        for name in self._network.advance(seconds):
            self._done.pop(name)()
        if act is not None:
            act()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._now + seconds, next(self._numbers), act))

    def _send(self, lane: Hashable, rank: int, parcel: Parcel) -> None:
        """Send when everything of a lower rank, and what is settled, has been sent."""
        if (queue := self._lanes.get(lane)) is None:
            queue = self._lanes[lane] = Lane(_UNSENT_BYTES + self._queued)
        heapq.heappush(queue.waiting, (rank, next(self._numbers), parcel))
        self._feed(queue)

    def _feed(self, lane: Lane) -> None:
        while lane.waiting and sum(parcel.left for parcel in lane.settled) <= lane.ahead:
            lane.settled.append(heapq.heappop(lane.waiting)[2])
        if lane.busy or not lane.settled:
            return
        parcel = lane.settled[0]
        beyond = sum(one.left for one in lane.settled) - lane.ahead  # when so much is sent, there is room
        piece = beyond if 0 < beyond < parcel.left else parcel.left
        lane.busy = True
        self._done[parcel.name] = lambda: self._sent(lane, parcel, piece)
        self._network.start(parcel.name, piece, parcel.uses)

    def _sent(self, lane: Lane, parcel: Parcel, piece: float) -> None:
        lane.busy = False
        parcel.left -= piece
        if parcel.left <= 0:
            lane.settled.popleft()
            self._after(self._site.speeds.latency, parcel.arrived)
        self._feed(lane)

    def _parcel(self, nbytes: float, uses: Mapping[str, float], arrived: Callable[[], None]) -> Parcel:
        return Parcel(next(self._numbers), nbytes, uses, arrived)

    # ---- a group of workers ----

    def _begin(self, worker: int) -> None:
        computing = self._computing[worker]
        computing.begun.append(self._now)
        computing.at = 0
        self._go_on(worker)

    def _go_on(self, worker: int) -> None:
        """Compute the next layer, or wait for what it needs."""
        computing, layers = self._computing[worker], self._workload.layers
        at, depth = computing.at, len(layers)
        if at == 2 * depth:
            computing.step += 1
            self._begin(worker)
            return
        group = self._site.workers[worker]
        if at < depth:
            together = not self._workload.early or self._workload.steps > 1
            needed = range(len(self._bundles)) if together else self._of_layer[at]
            computing.missing = sum(computing.here[index] < computing.step for index in needed)
            if computing.missing:
                return
            seconds = layers[at].forward
        else:
            seconds = layers[2 * depth - 1 - at].backward
            if at == depth:  # the other replicas and steps of this round
                seconds += (group.replicas * self._workload.steps - 1) * self._workload.compute
        self._after(seconds * group.slowness, lambda: self._computed(worker))

    def _computed(self, worker: int) -> None:
        computing, depth = self._computing[worker], len(self._workload.layers)
        computing.at += 1
        layer = 2 * depth - computing.at
        if computing.at > depth:
            if self._workload.steps == 1:
                self._push(worker, self._made[layer])
            elif layer == 0:
                self._push(worker, range(len(self._bundles)))
        self._go_on(worker)

    def _push(self, worker: int, indices: Sequence[int]) -> None:
        step = self._computing[worker].step
        for index in indices:
            if self._site.aggregators:
                self._gather(worker, index, step)
            else:
                self._up(worker, index, step)

    def _gather(self, worker: int, index: int, step: int) -> None:
        """To the aggregators: one connection carries all of the bundle."""
        nbytes = self._workload.up * self._bundles[index].words * self._bundles[index].count
        parcel = self._parcel(nbytes, self._wiring.gather(worker), lambda: self._up(worker, index, step))
        self._send(("gather", worker), -index, parcel)

    def _up(self, worker: int, index: int, step: int) -> None:
        bundle = self._bundles[index]
        nbytes = (WORD_BYTES if self._site.aggregators else self._workload.up) * bundle.words  # sums go on raw
        nbytes *= self._site.blocks
        uses = self._wiring.push(worker, bundle.group, bundle.count)
        parcel = self._parcel(nbytes, uses, lambda: self._contributed(index, step))
        self._send(("up", worker, bundle.group), -index, parcel)

    def _landed(self, worker: int, index: int, version: int) -> None:
        """A version has come; the forward pass may go on."""
        computing = self._computing[worker]
        computing.here[index] = version
        if computing.missing and computing.step == version:
            computing.missing = 0
            self._go_on(worker)

    # ---- a group of servers ----

    def _contributed(self, index: int, step: int) -> None:
        arrived = self._arrived[index, step] = self._arrived.get((index, step), 0) + 1
        if arrived < len(self._computing):
            return
        del self._arrived[index, step]
        bundle, speeds = self._bundles[index], self._site.speeds
        nbytes = WORD_BYTES * bundle.words
        senders = sum(self._wiring.senders(i) for i in range(len(self._computing)))
        last = (speeds.add + speeds.apply) * nbytes  # the others' contributions were added as they came
        done = max(self._now + last, self._free[bundle.group] + speeds.server(senders, nbytes))
        self._free[bundle.group] = done
        if not self._workload.clip:
            self._after(done - self._now, lambda: self._applied(index, step))
            return
        waiting = self._clipped.setdefault(step, [])
        waiting.append(index)
        if len(waiting) == len(self._bundles):
            for each in sorted(self._clipped.pop(step), reverse=True):
                self._after(done - self._now, lambda each=each: self._applied(each, step))  # type: ignore[misc]

    def _applied(self, index: int, step: int) -> None:
        """The update is made: to the backup first, if there is one."""
        if self._site.replication < 2 or self._site.server_count < 2:
            self._publish(index, step)
            return
        bundle, groups = self._bundles[index], len(self._site.servers)
        to = (bundle.group + 1 + index // groups % (groups - 1)) % groups if groups > 1 else bundle.group
        lane = ("backup", bundle.group, to if groups > 1 else index % (self._site.server_count - 1))
        parcel = self._parcel(
            WORD_BYTES * bundle.words, self._wiring.replicate(bundle.group, to),
            lambda: self._after(self._site.speeds.latency, lambda: self._publish(index, step)),  # acknowledged
        )  # fmt: skip
        self._send(lane, index, parcel)

    def _publish(self, index: int, step: int) -> None:
        bundle = self._bundles[index]
        for worker in range(len(self._computing)):
            uses = self._wiring.publish(worker, bundle.group, bundle.count)
            come = self._spread if self._site.aggregators else self._landed
            arrived = functools.partial(come, worker, index, step + 1)
            parcel = self._parcel(self._workload.down * bundle.words, uses, arrived)
            self._send(("down", worker, bundle.group), -index, parcel)

    def _spread(self, worker: int, index: int, version: int) -> None:
        """From the aggregators to their workers."""
        nbytes = self._workload.down * self._bundles[index].words * self._bundles[index].count
        parcel = self._parcel(nbytes, self._wiring.spread(worker), lambda: self._landed(worker, index, version))
        self._send(("spread", worker), -index, parcel)
