"""The aggregator's machine: merges the contributions of workers near it, sends them upstream, hands versions down.

Pure: events are method calls, effects come back, to be run in order. To its workers an aggregator looks like the server
of all shards; to the servers it looks like a worker that has all of its workers' replicas.

    worker w0 (0, 1) --[0,2)--+
                              +--> aggregator --[0,4)--> each shard's primary
    worker w1 (2, 3) --[2,4)--+    (one push a shard; each version comes down once, and is given to w0 and w1)

It owns nothing that could be lost. A worker whose link to it breaks sends the step in progress again, to the servers,
where whatever the aggregator did send is a repeat (I2). An aggregator whose link to a server breaks, or that sees a
shard move, sends its parts again: it keeps every part until a version shows that the step is over. One that was given
up forgets its parts: servers refused what it sent meanwhile, and its workers make new links and send all of it again.

A worker says with `followed(worker, round)` that from that round on everything it contributes comes here. So the
aggregator knows what may still come: the replicas that the view assigns to such workers. A part is sent when nothing
that is coming can be added to it; nobody ever waits for a replica that goes another way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

import msgspec

from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.shard.shell import Fence, L
from rallypoint.core.sums import Block, blocks_of, is_block, parent, sibling
from rallypoint.core.view import Member, View, ViewNumber


class BlockContribution(msgspec.Struct, frozen=True):
    """A block of replicas' contribution to a shard's step. A block of one replica is not weighted yet.

    Attributes:
        losses, gradients: the replicas in it whose loss, or only whose gradient, is not finite, as far as known.
    """

    shard: int
    step: int
    block: Block
    weight: float
    ticket: int
    losses: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()


class Keep(msgspec.Struct, frozen=True):
    """The payload becomes a part."""

    shard: int
    step: int
    at: int
    ticket: int


class DropPayload(msgspec.Struct, frozen=True):
    """The payload is not needed. `fault`: end the sender's connection with this sentence. No honest worker sends it, or
    this aggregator is far behind: then the worker sends the step in progress again, to the servers."""

    ticket: int
    fault: str = ""


class MergeParts(msgspec.Struct, frozen=True):
    """Add part `right` to part `left`, each times its factor first (a leaf's weight; 1.0 for what is weighted)."""

    shard: int
    step: int
    left: int
    right: int
    left_factor: float
    right_factor: float


class Forget(msgspec.Struct, frozen=True):
    """Release a part."""

    shard: int
    step: int
    at: int


class PushPart(msgspec.Struct, frozen=True):
    """Send a part to the shard's primary. It is kept: it may have to be sent again."""

    shard: int
    step: int
    block: Block
    weight: float
    server: str
    losses: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()


class KeepVersion(msgspec.Struct, frozen=True):
    """Keep the version that has arrived."""

    shard: int
    version: int
    ticket: int


class GiveVersion(msgspec.Struct, frozen=True):
    """Send a kept version to a worker. `asked`: it needs this very version."""

    worker: str
    shard: int
    version: int
    asked: bool = False


class ReleaseVersion(msgspec.Struct, frozen=True):
    """Release a kept version."""

    shard: int
    version: int


class FollowServer(msgspec.Struct, frozen=True):
    """Ask a server for the newest version of each of its shards, and each later one."""

    server: str


class FetchVersion(msgspec.Struct, frozen=True):
    """Ask a shard's primary for one version."""

    shard: int
    version: int
    server: str


class DismissWorkers(msgspec.Struct, frozen=True):
    """End the connections of these workers: they are to use the servers. `why` is a sentence for them."""

    workers: tuple[str, ...]
    why: str


Effect = (
    Keep | DropPayload | MergeParts | Forget | PushPart | KeepVersion | GiveVersion | ReleaseVersion | FollowServer
    | FetchVersion | DismissWorkers
)  # fmt: skip


# ---- The blocks of one shard's step that an aggregator holds: which of them merge, and which may be sent upstream ----
#
# Example: R = 8, and workers with the replicas 0..3 use this aggregator. Replicas 2, 0, 3, 1 arrive: [2,4) is merged
# when 3 is there, [0,2) and then [0,4) when 1 is there, and [0,4) is sent. If the worker with replicas 0 and 1 goes
# to the servers itself, nothing more can be added to [2,4): it is sent as it is.


@dataclass(slots=True)
class HeldPart:
    """A block that is held. `sent`: the connection on which it was sent upstream; None before."""

    block: Block
    weight: float  # total, float64, added by the tree (I3)
    losses: tuple[int, ...]
    gradients: tuple[int, ...]
    sent: tuple[str, int] | None = None

    @property
    def factor(self) -> float:
        """What its values are multiplied by when it is merged: the weight of a leaf. (A server does it, else.)"""
        return self.weight if self.block.size == 1 else 1.0


@dataclass(slots=True)
class BlockSum:
    """The parts of the sum over `replicas` replicas. A part that was sent stays, and is not merged any more.

    `lowest` is the first of the replicas: 0, or the one that carries this state and is the only one.
    """

    shard: int
    step: int
    replicas: int
    lowest: int = 0
    _parts: dict[int, HeldPart] = field(default_factory=dict)  # by first replica; they are disjoint

    def __iter__(self) -> Iterator[HeldPart]:
        return iter([self._parts[at] for at in sorted(self._parts)])

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, new: BlockContribution) -> list[Effect]:
        """Take a contribution that has arrived; merge what can be merged."""
        block = new.block
        if not self._has(block):
            fault = f"replicas {block.start} to {block.stop - 1} are no block of shard {self.shard}"
            return [DropPayload(new.ticket, fault)]
        held = {replica for part in self._parts.values() for replica in range(*part.block)}
        if held.issuperset(range(*block)):
            return [DropPayload(new.ticket)]  # a repeat (I2)
        effects: list[Effect] = [self._forget(old) for old in self if block.covers(old.block)]
        self._parts[block.start] = part = HeldPart(block, new.weight, new.losses, new.gradients)
        effects.append(Keep(self.shard, self.step, block.start, new.ticket))
        while (other := self._unsent(sibling(part.block, self.replicas))) is not None and other is not part:
            left, right = (part, other) if part.block.start < other.block.start else (other, part)
            effects.append(
                MergeParts(self.shard, self.step, left.block.start, right.block.start, left.factor, right.factor)
            )
            part = self._merged(left, right)
        return effects

    def ready(self, coming: frozenset[int]) -> list[HeldPart]:
        """The parts to send now: nothing of what is `coming` (replicas) can be added to them before."""
        waiting = [part for part in self if part.sent is None]
        if not waiting:
            return []
        sent = {replica for part in self._parts.values() if part.sent for replica in range(*part.block)}
        able = coming | {replica for part in waiting for replica in range(*part.block)}
        planned = set(blocks_of(able - sent, self.replicas))
        return [part for part in waiting if part.block in planned]

    def forget_all(self) -> list[Effect]:
        return [self._forget(part) for part in self]

    def validate(self) -> None:
        """Raise AssertionError unless the parts are disjoint blocks, and unsent ones have no unsent sibling."""
        end = 0
        for part in self:
            assert self._has(part.block), f"{part.block} is no block of {self.replicas}"
            assert part.block.start >= end, f"the parts of shard {self.shard}, step {self.step} overlap"
            end = part.block.stop
            other = self._unsent(sibling(part.block, self.replicas))
            assert part.sent or other is None or other is part, f"{part.block} and {other} are not merged"

    def _has(self, block: Block) -> bool:
        return is_block(Block(block.start - self.lowest, block.stop - self.lowest), self.replicas)

    def _unsent(self, block: Block) -> HeldPart | None:
        part = self._parts.get(block.start)
        return part if part is not None and part.block == block and part.sent is None else None

    def _merged(self, left: HeldPart, right: HeldPart) -> HeldPart:
        del self._parts[right.block.start]
        whole = HeldPart(
            parent(left.block, self.replicas), left.weight + right.weight, left.losses + right.losses,
            left.gradients + right.gradients,
        )  # fmt: skip
        self._parts[left.block.start] = whole
        return whole

    def _forget(self, part: HeldPart) -> Forget:
        del self._parts[part.block.start]
        return Forget(self.shard, self.step, part.block.start)


VERSIONS_KEPT = 2  # I5: as a server does
STEPS_KEPT = 2  # sums in progress of one shard: a worker's versions may be one ahead of what has come here
MOST_ASKED = 4  # versions of one shard that workers wait for: those around the newest
CUT_OFF_S = 1.0  # a server that cannot be reached for so long: the workers can perhaps reach it themselves


@dataclass(slots=True)
class AggregatorMachine:
    """One aggregator in one job. The caller makes one call at a time.

    Attributes:
        me: this aggregator's id.
        expected: by shard, how many replicas contribute to it.
        cadence: the shards that each round updates.
        carried: by shard of carried state, the only replica that contributes to it.
        view: the view in force; None before the first.
    """

    me: str
    expected: Sequence[int]
    cadence: Cadence = TOGETHER
    carried: Mapping[int, int] = field(default_factory=dict)
    view: View | None = None
    _sums: dict[tuple[int, int], BlockSum] = field(default_factory=dict)  # by shard and step
    _versions: dict[int, list[int]] = field(default_factory=dict)  # by shard: the versions kept, ascending
    _newest: dict[int, int] = field(default_factory=dict)  # by shard: the newest version that has come
    _from: dict[str, int] = field(default_factory=dict)  # worker -> the first round that it contributes here
    _up: dict[str, int] = field(default_factory=dict)  # server -> number of the connection
    _down_from: dict[str, float] = field(default_factory=dict)  # server without a connection -> since when, in seconds
    _asked: dict[tuple[int, int], set[str]] = field(default_factory=dict)  # version fetched -> for these workers
    _connections: int = 0
    _now: float = 0.0

    # ---- views and time ----

    def viewed(self, view: View) -> list[Effect]:
        """Adopt a view, if it is newer than the one in force."""
        before = self.view
        if before is not None and view.number <= before.number:
            return []
        self.view = view
        stayed = {member for member in view.servers if before is not None and member in before.servers}
        self._up = {id: number for id, number in self._up.items() if id in {member.id for member in stayed}}
        here = {member.id for member in view.servers}
        self._down_from = {id: self._down_from.get(id, self._now) for id in here - self._up.keys()}
        effects: list[Effect] = []
        if before is None or before.generation != view.generation:
            effects += self._forget_all()
            effects += [FollowServer(server) for server in sorted(self._up)]  # what was asked before may be stale there
        elif self._incarnation(before) != self._incarnation(view):
            effects += self._forget_sums()
        mine = {worker for worker, used in view.aggregator_of.items() if used == self.me}
        if others := tuple(sorted(self._from.keys() - mine)):
            effects += self._dismiss(others, "the view gives it to another aggregator, or to none")
        return [*effects, *self._ask_again(), *self._send_ready()]

    def _forget_all(self) -> list[Effect]:
        effects = self._forget_sums()
        effects += [ReleaseVersion(shard, version) for shard, kept in self._versions.items() for version in kept]
        for known in (self._versions, self._newest, self._asked, self._from):
            known.clear()
        return effects

    def _forget_sums(self) -> list[Effect]:
        effects: list[Effect] = [effect for known in self._sums.values() for effect in known.forget_all()]
        self._sums.clear()
        return effects

    def _incarnation(self, view: View) -> int:
        return next((member.incarnation for member in view.aggregators if member.id == self.me), -1)

    def tick(self, now: float) -> list[Effect]:
        """The time is `now`, in seconds. Let the workers go if a server cannot be reached from here."""
        self._now = now
        lost = sorted(id for id, at in self._down_from.items() if now - at > CUT_OFF_S)
        if not lost or not self._from:
            return []
        return self._dismiss(tuple(sorted(self._from)), f"this aggregator cannot reach {', '.join(lost)}")

    @property
    def accepts(self) -> bool:
        """True if workers may use this aggregator: it reaches every server of the view."""
        return self.view is not None and not self._down_from

    # ---- servers ----

    def server_up(self, server: str) -> list[Effect]:
        """The connection to a server is up (again). What was under way on the one before may be lost."""
        self._connections += 1
        self._up[server] = self._connections
        self._down_from.pop(server, None)
        return [FollowServer(server), *self._ask_again(server), *self._send_ready()]

    def server_lost(self, server: str) -> list[Effect]:
        if self._up.pop(server, None) is not None:
            self._down_from[server] = self._now
        return []

    def arrived(self, shard: int, version: int, ticket: int) -> list[Effect]:
        """A version of the current generation has arrived: keep it, and hand it down."""
        kept, newest = self._versions.setdefault(shard, []), self._newest.get(shard, -1)
        askers = self._asked.pop((shard, version), set())
        if version in kept or (version <= newest - VERSIONS_KEPT and not askers):
            return [DropPayload(ticket)]
        effects: list[Effect] = [KeepVersion(shard, version, ticket)]
        kept.append(version)
        kept.sort()
        if version > newest:
            self._newest[shard] = version
            for old in [v for v in self._asked_of(shard) if v <= version - VERSIONS_KEPT]:
                del self._asked[shard, old]  # no server keeps it any more
            for step in [step for step in self._steps(shard) if step < version]:  # nothing of it is needed any more
                effects += self._sums.pop((shard, step)).forget_all()
            effects += [GiveVersion(worker, shard, version) for worker in sorted(self._from)]
        effects += [GiveVersion(worker, shard, version, asked=True) for worker in sorted(askers)]
        while len(kept) > VERSIONS_KEPT:
            effects.append(ReleaseVersion(shard, kept.pop(0)))
        return effects

    def _steps(self, shard: int) -> list[int]:
        return sorted(step for index, step in self._sums if index == shard)

    # ---- workers ----

    def followed(self, worker: str, round: int) -> list[Effect]:
        """From `round` on everything that the worker contributes comes here; it wants every version."""
        if self.view is None or self.view.aggregator_of.get(worker) != self.me or not self.accepts:
            return [DismissWorkers((worker,), "this aggregator is not for it now")]
        self._from[worker] = round
        return [GiveVersion(worker, shard, version) for shard, version in sorted(self._newest.items())]

    def gone(self, worker: str) -> list[Effect]:
        """The worker's connection has ended, or it follows no more: it goes another way."""
        if self._from.pop(worker, None) is None:
            return []
        for asking in self._asked.values():
            asking.discard(worker)
        return self._send_ready()

    def contributed(self, new: BlockContribution) -> list[Effect]:
        """A contribution of the current generation has arrived."""
        newest, steps = self._newest.get(new.shard, -1), self._steps(new.shard)
        if new.step < newest:
            return [DropPayload(new.ticket)]  # the step is over
        if 0 <= newest < new.step - 1 or (new.step not in steps and len(steps) >= STEPS_KEPT):
            fault = f"a contribution to step {new.step} of shard {new.shard}, at version {newest}"
            return [DropPayload(new.ticket, fault)]
        key = (new.shard, new.step)
        if key not in self._sums:
            self._sums[key] = BlockSum(*key, self.expected[new.shard], self.carried.get(new.shard, 0))
        return [*self._sums[key].add(new), *self._send_ready_of(self._sums[key])]

    def fetched(self, worker: str, shard: int, version: int) -> list[Effect]:
        """A worker needs this version again, or for the first time."""
        if version in self._versions.get(shard, ()):
            return [GiveVersion(worker, shard, version, asked=True)]
        if worker not in self._from or version <= self._newest.get(shard, -1) - VERSIONS_KEPT:
            return []
        first = (shard, version) not in self._asked
        self._asked.setdefault((shard, version), set()).add(worker)
        if len(asked := self._asked_of(shard)) > MOST_ASKED:
            del self._asked[shard, asked[-1]]  # no honest worker asks so far ahead
        home = self._home(shard)
        wanted = first and (shard, version) in self._asked and home in self._up
        return [FetchVersion(shard, version, home)] if wanted else []

    def _asked_of(self, shard: int) -> list[int]:
        """The versions of a shard that workers wait for, ascending."""
        return sorted(version for index, version in self._asked if index == shard)

    def _dismiss(self, workers: tuple[str, ...], why: str) -> list[Effect]:
        for worker in workers:
            del self._from[worker]
        return [DismissWorkers(workers, why), *self._send_ready()]

    # ---- what goes upstream ----

    def _coming(self, round: int) -> frozenset[int]:
        """The replicas whose contribution to `round` comes here, if it has not come yet."""
        assert self.view is not None
        assigned = self.view.assigned(round)
        return frozenset(
            replica for worker, start in self._from.items() if start <= round for replica in assigned.get(worker, ())
        )

    def _send_ready(self) -> list[Effect]:
        return [effect for _, known in sorted(self._sums.items()) for effect in self._send_ready_of(known)]

    def _send_ready_of(self, known: BlockSum) -> list[Effect]:
        """Send what is ready, and once more what was sent on a connection that is not that of the primary now."""
        home = self._home(known.shard)
        if home not in self._up:
            return []
        now = (home, self._up[home])
        coming = self._coming(self.cadence.round_of(known.shard, known.step))
        coming = coming.intersection(range(known.lowest, known.lowest + known.replicas))
        again = [part for part in known if part.sent not in (None, now)]
        return [self._push(known, part, now) for part in (*again, *known.ready(coming))]

    def _push(self, known: BlockSum, part: HeldPart, to: tuple[str, int]) -> PushPart:
        part.sent = to
        return PushPart(known.shard, known.step, part.block, part.weight, to[0], part.losses, part.gradients)

    def _ask_again(self, server: str | None = None) -> list[Effect]:
        """Fetch what workers wait for from the primaries of now (or only from `server`)."""
        effects: list[Effect] = []
        for shard, version in sorted(self._asked):
            home = self._home(shard)
            if home in self._up and server in (None, home):
                effects.append(FetchVersion(shard, version, home))
        return effects

    def _home(self, shard: int) -> str:
        return "" if self.view is None else self.view.primary[shard]

    def validate(self) -> None:
        """Raise AssertionError with a sentence if an invariant does not hold."""
        for (shard, step), known in self._sums.items():
            known.validate()
            assert step >= self._newest.get(shard, -1), f"parts of step {step}, which is over"
            home = self._home(shard)
            for part in known:
                assert home not in self._up or part.sent in (None, (home, self._up[home])), f"{part} is lost"
        for shard, kept in self._versions.items():
            assert kept == sorted(set(kept)), f"versions {kept} of shard {shard}"
            assert len(kept) <= VERSIONS_KEPT, f"{len(kept)} versions of shard {shard}"
        for shard in {shard for shard, _ in self._asked}:
            assert len(self._asked_of(shard)) <= MOST_ASKED, f"{self._asked_of(shard)} of shard {shard} are fetched"
        assert not self._up.keys() & self._down_from.keys(), "a server is up and down"


def linked(machine: AggregatorMachine) -> Iterable[str]:
    """The workers whose contributions come through this aggregator."""
    return machine._from.keys()


# ---- The bookkeeping between an aggregator's machine and its links, without any input or output ----
#
# It knows the workers' newest links, and decides which incoming frames reach the machine (I10). `aggregator.py`
# runs it over TCP channels, `testing/simulation` over simulated links. Its methods return the machine's
# effects, in order.


@dataclass(slots=True)
class AggregatorShell(Generic[L]):
    """One aggregator in one job. Not thread-safe: only the owner thread calls it.

    Attributes:
        workers: each worker's newest link.
    """

    machine: AggregatorMachine
    fence: Fence = field(default_factory=Fence)
    workers: dict[str, L] = field(default_factory=dict)

    def adopt(self, view: View) -> list[Effect]:
        """Adopt a new view. Returns nothing if it is not newer."""
        return self.machine.viewed(view) if self.fence.adopt(view) else []

    # ---- workers ----

    def linked(self, link: L, worker: str) -> list[Effect]:
        """A worker connected (again). Ignores the link if a newer one from this worker is known."""
        other = self.workers.get(worker)
        if other is not None and other.number >= link.number:
            return []
        self.workers[worker] = link
        return self.machine.gone(worker)

    def gone(self, link: L, worker: str) -> list[Effect]:
        if self.workers.get(worker) is not link:
            return []
        del self.workers[worker]
        return self.machine.gone(worker)

    def followed(self, link: L, worker: str, round: int, number: ViewNumber) -> list[Effect]:
        """A worker says, under view `number`, that from `round` on everything that it contributes comes here."""
        if self.workers.get(worker) is not link or self.fence.is_stale(number):
            return []
        return self.machine.followed(worker, round)

    def unfollowed(self, link: L, worker: str) -> list[Effect]:
        """The worker wants no more versions."""
        return self.machine.gone(worker) if self.workers.get(worker) is link else []

    def fetched(self, link: L, worker: str, shard: int, version: int) -> list[Effect]:
        return self.machine.fetched(worker, shard, version) if self.workers.get(worker) is link else []

    def contributed(self, worker: str, new: BlockContribution, number: ViewNumber) -> list[Effect]:
        """A worker's contribution has arrived that was sent under view `number`. Others' replicas are not taken: a
        server could not tell any more who has pushed them."""
        view = self.machine.view
        taken = view is not None and view.takes(worker, range(*new.block))
        if self.fence.is_stale(number) or not taken:
            return [DropPayload(new.ticket)]
        return self.machine.contributed(new)

    # ---- servers ----

    def server_up(self, server: Member) -> list[Effect]:
        """The link to a server is up. Ignored if the current view does not have that incarnation of the server."""
        return self.machine.server_up(server.id) if self._has(server) else []

    def server_lost(self, server: Member) -> list[Effect]:
        return self.machine.server_lost(server.id) if self._has(server) else []

    def arrived(self, shard: int, version: int, ticket: int, number: ViewNumber) -> list[Effect]:
        """A version has arrived that a server sent under view `number`."""
        return [DropPayload(ticket)] if self.fence.is_stale(number) else self.machine.arrived(shard, version, ticket)

    def dismissed(self, effect: DismissWorkers) -> Sequence[L]:
        """The links to end for this effect. They count as gone from now on."""
        links = [self.workers.pop(worker, None) for worker in effect.workers]
        return [link for link in links if link is not None]

    def _has(self, server: Member) -> bool:
        return self.machine.view is not None and server in self.machine.view.servers
