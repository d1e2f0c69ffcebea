"""A simulated worker's data plane: the real shell, links that come back, slots that hold names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from rallypoint.core.layout import forward_ranks
from rallypoint.core.sums import Part
from rallypoint.core.view import Member, View
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.factory import shell_for
from rallypoint.core.worker.slots import CodecEffect
from rallypoint.errors import RallypointError
from rallypoint.net.frames import BAD_GRADIENT, NOT_FINITE, Header, Kind, wants
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.names import NBYTES, TOKEN, NamedBuffer, SimulatedTransport, WireChannel
from rallypoint.testing.simulation.network import Node, Tokens, watch
from rallypoint.testing.simulation.replicas.codec_states import SimulatedEncoder
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Content
from rallypoint.worker.exchange.arrivals import RowPull, RowPulls
from rallypoint.worker.exchange.exchange import worker_plan
from rallypoint.worker.exchange.links import Links, Receiver
from rallypoint.worker.exchange.locked import LockedShell
from rallypoint.worker.exchange.pushes import LinkEffects, Pushes


class _Asks(tuple[int, int]):
    """The step and the replica that rows are for, in place of their numbers."""

    def __len__(self) -> int:
        return 0


class SimulatedRowPulls(RowPulls):
    """One worker's pull, which the main thread looks at in place of waiting."""

    def __init__(self, job: SimulatedJob, locked: LockedShell, links: Links, tokens: Tokens) -> None:
        super().__init__(locked, links)
        self._job, self._tokens = job, tokens

    def begin(self, replica: int, shards: Iterable[int]) -> None:
        """The forward pass of the replica in progress needs rows of these parts of tables."""
        machine = self._locked.machine
        asks: Any = _Asks((machine.step, replica))
        self._pulls += 1
        self._pull = RowPull.of(
            self._pulls, machine, dict.fromkeys(shards, (asks, NBYTES)), newest=not machine.computing
        )

    def begin_whole(self, version: int) -> None:
        """All shards are needed at a version that is to be evaluated, and may not exist yet."""
        asks: Any = _Asks((self._locked.machine.step, -1))
        self._pulls += 1
        wanted = dict.fromkeys(range(self._job.shards), (asks, NBYTES))
        own = {shard: self._job.cadence.updates_before(shard, version) for shard in wanted}
        self._pull = RowPull(self._pulls, version, False, wanted, own=own)

    def whole_model(self) -> list[Content]:
        """What has come of all shards."""
        return [self._got(shard) for shard in range(self._job.shards)]

    @property
    def outdated(self) -> bool:
        """Do the servers not keep the step in progress any more?"""
        return self._pull is not None and self._pull.outdated

    def ready(self) -> bool:
        """Is there nothing (more) to wait for? If there is, ask whoever was not asked yet."""
        if (pull := self._pull) is None or pull.over:
            return True
        for shard in self._unasked(pull):
            self._ask(pull, shard)
        return False

    def end(self) -> None:
        """The replica is over, or stale."""
        self._pull = None

    def seen(self, model: Sequence[Content]) -> list[Content]:
        """What the replica computes with: the model, and of tables what was pulled."""
        tables = self._job.table_shards
        return [self._got(shard) if shard in tables else content for shard, content in enumerate(model)]

    def _got(self, shard: int) -> Content:
        data = None if self._pull is None else self._pull.got.get(shard)
        return self._job.nothing if data is None else self._tokens.of(data[:TOKEN])


class _Slot:
    """The bytes of a slot: what is in it when they leave."""

    def __init__(self, slots: list[Content], shard: int) -> None:
        self._slots, self._shard = slots, shard

    @property
    def content(self) -> Content:
        return self._slots[self._shard]


class SimulatedExchange:
    """`changed` is called after every event: whatever the main thread waits for may be there."""

    def __init__(self, node: Node, job: SimulatedJob, changed: Callable[[], None]) -> None:
        self.node, self.job, self._changed = node, job, changed
        self.shell = shell_for(node.name, worker_plan(job.config, job.layout, job.codec_state_shards))
        self.links = Links(SimulatedTransport(node, "worker").context, job.config, lambda: self.shell.number)
        self.encoder = SimulatedEncoder(job, self.shell, self.links, node.world.tokens)
        locked = LockedShell(self.shell, lambda said: None)
        self.pulls = SimulatedRowPulls(job, locked, self.links, node.world.tokens)
        watch(self.shell.machine, node.name)
        self.machine = self.shell.machine
        self.slots: list[Content] = [GARBAGE] * job.shards
        self._kept: dict[tuple[int, int], Content] = {}  # what is added up, by shard and first replica
        self._landing: dict[int, tuple[WireChannel, NamedBuffer]] = {}
        codec_states: Any = self.encoder if self.shell.states.kept else None
        self._effects = LinkEffects(self.shell, self.links, cast(Pushes, self), codec_states)
        self._ranks = forward_ranks(job.layout) if job.config.overlaps and not job.table_shards else ()
        self.fetched = 0

    def adopt(self, view: View) -> None:
        """A new view has come: see `Exchange.adopt`."""
        if (ended := self.shell.links_to_end(view)) is None:
            return
        self.links.end(ended)
        before = self.machine.view
        effects = self.shell.adopt(view, ended)
        new = self.shell.links.to_open(view)
        if before is not None:
            self.links.overdraw(self.machine.reads, rolled_back=before.generation != view.generation)
        self.apply(effects)
        self.links.open(new, cast(Receiver, self), view)

    def assist(self, step: int, replica: int) -> None:
        """A backup task."""
        self.links.overdraw(step)
        self.apply(self.machine.handle(machine.Assisted(step, replica)))

    def installed(self) -> None:
        """The model holds the version."""
        self.apply(self.shell.installed())
        self.links.installed(self.machine.step)

    # ---- what arrives: see `worker.exchange.links.Receiver` ----

    def link_up(self, server: Member) -> None:
        self.apply(self.shell.link_up(server.id))

    def link_lost(self, server: Member, error: RallypointError) -> None:
        self.apply(self.shell.link_lost(server.id))

    def link_failed(self, server: Member, fault: Exception) -> None:
        raise fault

    def arriving(self, header: Header, server: str) -> NamedBuffer | None:
        shard, replica = header.shard, 0 if header.wanted is None else header.wanted
        begins = header.kind is Kind.STATE
        whole = begins or not self.job.averages(shard)
        event = machine.Arriving(shard, header.step, header.view, replica, header.base, whole, begins)
        effects = self.shell.arriving(event, server)
        lands = isinstance(effects[0], machine.Land)
        if lands:
            self.slots[shard] = GARBAGE
            link = self.links.get(server)
            assert link is not None
            self._landing[shard] = cast(WireChannel, link._channel), NamedBuffer(None)
        self.apply(effects[1:])
        return self._landing[shard][1] if lands else None

    def landed(self, shard: int) -> None:
        """All of it comes a little later."""
        channel, place = self._landing.pop(shard)

        def land() -> None:
            self.slots[shard] = place.content
            self.apply(self.machine.handle(machine.Landed(shard)))

        channel.pause(self.node.world.latency() / 4, land)

    def state(self, header: Header, data: bytearray, server: str) -> None:
        if (place := self.arriving(header, server)) is not None:
            place.content = self.node.world.tokens.of(data[:TOKEN])
            self.landed(header.shard)

    def rows(self, header: Header, data: bytearray) -> None:
        self.pulls.arrived(header, data)
        self._changed()

    def to_wait(self, replica: int, clock: int) -> None:
        self.apply(self.machine.handle(machine.ToWait(replica, clock)))

    def check_codec_state(self, header: Header) -> None:
        """It is a name."""

    def codec_state(self, header: Header, data: bytearray) -> None:
        self.encoder.arrived(header.shard, header.replica, self.node.world.tokens.of(data) if data else None)
        self._changed()

    def codec_state_taken(self, header: Header) -> None:
        self.encoder.taken(header.shard, header.replica)
        self._changed()

    # ---- effects ----

    def apply(self, effects: Sequence[machine.Effect]) -> None:
        """Something has happened: run what follows."""
        self.run(effects)
        self._changed()

    def prepare(self) -> None:
        """Before the main thread chooses what to do: ask for the codec states that it waits for."""
        self.run(self.shell.prepare())

    def run(self, effects: Sequence[machine.Effect]) -> None:
        """The same, and the main thread knows."""
        self.shell.validate()
        for effect in effects:
            if isinstance(effect, CodecEffect):
                self.encoder.run(effect)
            else:
                self.fetched += isinstance(effect, machine.Fetch)
                self._effects.run([effect])

    def filled(self, shard: int, replica: int) -> None:
        """A slot is full: add it up with other replicas of this worker, or send it."""
        if (part := self.machine.presum.part(shard, replica)) is not None:
            self._add_up(shard, replica, part)
        self.run(self.machine.handle(machine.Filled(shard, part)))

    def _add_up(self, shard: int, replica: int, part: Part) -> None:
        start, content = replica, self.slots[shard]
        for at in part.merges:
            kept = self._kept.pop((shard, at))
            content = self.job.add(kept, content) if at < start else self.job.add(content, kept)
            start = min(start, at)
        assert start == part.block.start, f"{part} from replica {replica} on"
        self.slots[shard] = content
        if part.keep:
            self._kept[shard, start] = content

    def push(self, send: machine.Send) -> None:
        """Send what is in a slot: see `worker.exchange.pushes.Pushes`."""
        shard, first, count = send.shard, send.replica, send.count
        flags = {r: self.job.flags(shard, send.step, r) for r in range(first, first + count)}
        finite, whole = all(flag[0] for flag in flags.values()), all(flag[1] for flag in flags.values())
        bad = sum(1 << r - first for r, (good, _) in flags.items() if not good and r - first < 32)
        header = Header(
            Kind.PUSH, send.view, shard=shard, replica=first, step=send.step, weight=float(count), length=NBYTES,
            flags=0 if finite else NOT_FINITE if whole else BAD_GRADIENT, base=send.base + count - 1,
            wants=bad if count > 1 else wants(send.wants),
        )  # fmt: skip
        link, sent = self.links.get(send.server), partial(self._sent, shard, send.serial)
        if link is not None and shard in self.job.codec_state_shards:
            link.push(header, cast(Any, NamedBuffer(self.encoder.encode(send, self.slots[shard]))), sent=_nothing)
            sent()  # the slot is free as soon as its gradient is written elsewhere
        elif link is not None and self.machine.slots.is_queued(shard, send.serial):
            rank = (send.step, first, self._ranks[shard]) if self._ranks else ()
            link.push(header, cast(Any, _Slot(self.slots, shard)), sent=sent, rank=rank)

    def _sent(self, shard: int, serial: int) -> None:
        self.apply(self.machine.handle(machine.Sent(shard, serial)))


def _nothing() -> None:
    """A coded contribution is kept."""
