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

from rallypoint.core.cost.bundles import bundles_of, split
from rallypoint.core.cost.fluid import Network
from rallypoint.core.cost.site import Site, Wiring
from rallypoint.core.cost.workload import Workload
from rallypoint.core.layout import WORD_BYTES

_UNSENT_BYTES = 512 << 10  # as in `net.tcp`
_STEPS = 3  # the last one is what a step takes: each begins as the one before it has left things


class StepCost(msgspec.Struct, frozen=True):
    """What a step of training takes, and what a worker and a server send and receive in it (bytes).

    `waited` is the part of it in which a worker computed nothing.
    """

    seconds: float
    waited: float = 0.0
    worker_bytes: float = 0.0
    server_bytes: float = 0.0


def step_cost(workload: Workload, site: Site) -> StepCost:
    """What a step takes with these servers, once it goes on as the one before it did."""
    site = split(workload, site)
    seconds = Pipeline(workload, site).run(_STEPS) / workload.steps
    each = (workload.up + workload.down) / WORD_BYTES * workload.nbytes / workload.steps
    senders = sum(Wiring(site).senders(i) for i in range(len(site.workers)))
    copies = 2 * (site.replication - 1) * workload.nbytes / workload.steps
    busy = max(group.slowness * group.replicas for group in site.workers) * workload.compute
    return StepCost(seconds, max(0.0, seconds - busy), each, (senders * each + copies) / site.server_count)


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
        self._network = Network(self._wiring.capacity)
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
        """Go on to the next thing that happens."""
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
        busy = (senders * speeds.add + speeds.apply) * nbytes
        done = max(self._now + last, self._free[bundle.group] + busy)
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
