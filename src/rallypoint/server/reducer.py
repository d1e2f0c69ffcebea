"""The one thread that owns a server's shards: takes events from its inbox, runs the machines' effects on tensors.

Single owner, so no tensor has a lock. Everything that arrives from the network comes through `Reducer.inbox` as a call.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rallypoint.config import JobConfig
from rallypoint.core import clip, shard
from rallypoint.core.job import JobRecord
from rallypoint.core.view import View, ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import NOT_FINITE, Header, Kind
from rallypoint.net.pool import Buffer
from rallypoint.observe.trace import Tracer
from rallypoint.server.owned import OwnedShard


@dataclass(slots=True)
class _Arrived:
    """A payload between its arrival and its place in the sum."""

    channel: Channel
    buffer: Buffer
    nbytes: int
    credited: bool = False


class Reducer:
    """Owns the shards of one server in one job.

    `tell` sends this server's measures to the other servers; `not_finite` reports a step that was skipped (or must stop
    the job); `failed` reports an error that ends the job.
    """

    def __init__(
        self, *, tracer: Tracer, tell: Callable[[clip.Tell], None],
        not_finite: Callable[[clip.Verdict], None], failed: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tracer, self._tell, self._not_finite, self._failed = tracer, tell, not_finite, failed
        self._owned: dict[int, OwnedShard] = {}
        self._clip: clip.ClipMachine | None = None
        self._followers: list[Channel] = []
        self._tickets: dict[int, _Arrived] = {}
        self._next_ticket = 0
        self._held_bytes = 0
        self._hold_limit = 0
        self._number = ViewNumber()
        self._thread = threading.Thread(target=self._run, name="reduce", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what is in the inbox."""
        self.inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self.inbox.get()) is not None:
            try:
                call()
            except Exception as error:  # whatever it was, the shards can no longer be trusted: the job must end
                self._failed(error)
                return

    # ---- what the inbox's calls do: only ever on the owner's thread ----

    def prepare(self, record: JobRecord, config: JobConfig, view: View, me: str) -> None:
        """Make room for the shards that `view` gives to `me`."""
        shards = record.layout.shards
        self._number = view.number
        self._hold_limit = config.hold_bytes
        self._owned = {index: OwnedShard(shards[index], config) for index in view.shards_of(me)}
        if config.decides:
            self._clip = clip.ClipMachine(
                shards=[s.index for s in shards if s.role == "parameters"],
                own=frozenset(index for index, owned in self._owned.items() if owned.measured),
                clip=config.clip,
                skip_not_finite=config.nonfinite == "skip",
            )

    def follow(self, channel: Channel) -> None:
        """Send the newest version of every shard, and every one from now on."""
        if channel not in self._followers:
            self._followers.append(channel)
        for owned in self._owned.values():
            if owned.machine.version in owned.wire:
                self._send_version(channel, owned, owned.machine.version)

    def unfollow(self, channel: Channel) -> None:
        """The channel is gone."""
        if channel in self._followers:
            self._followers.remove(channel)

    def fetch(self, channel: Channel, index: int, version: int) -> None:
        """Send one version again, if it is still kept; otherwise a newer one has been sent anyway."""
        owned = self._owned.get(index)
        if owned is not None and version in owned.wire:
            self._send_version(channel, owned, version)

    def initialise(self, channel: Channel, header: Header, buffer: Buffer) -> None:
        """A first worker's version 0 of a shard."""
        ticket = self._ticket(channel, header, buffer)
        self._run_effects(self._owned[header.shard], self._owned[header.shard].machine.handle(shard.Initialise(ticket)))

    def contribute(self, channel: Channel, header: Header, buffer: Buffer) -> None:
        """A contribution to a shard's step."""
        owned = self._owned[header.shard]
        event = shard.Contribute(
            step=header.step, replica=header.replica, weight=header.weight,
            ticket=self._ticket(channel, header, buffer), finite=not header.flags & NOT_FINITE,
        )  # fmt: skip
        self._run_effects(owned, owned.machine.handle(event))

    def told(self, step: int, measures: Iterable[clip.Measure]) -> None:
        """Another server's measures."""
        if self._clip is not None:
            self._run_decisions(self._clip.told(step, measures))

    # ---- effects ----

    def _run_effects(self, owned: OwnedShard, effects: Sequence[shard.Effect]) -> None:
        for effect in effects:
            match effect:
                case shard.Install(ticket=ticket):
                    owned.install(self._settle(ticket))
                case shard.Take(ticket=ticket, weight=weight):
                    owned.take(self._settle(ticket), weight)
                case shard.Add(ticket=ticket, weight=weight):
                    with self._tracer.span("reduce", shard=owned.shard.index):
                        owned.add(self._settle(ticket), weight)
                case shard.Hold(ticket=ticket):
                    self._hold(ticket)
                case shard.Drop(ticket=ticket, fault=fault):
                    self._drop(ticket, fault)
                case shard.Finish():
                    self._finish(owned, effect)
                case shard.Apply(step=step, scale=scale):
                    with self._tracer.span("apply", shard=owned.shard.index, step=step):
                        owned.apply(step, scale)
                case shard.Publish(version=version):
                    self._publish(owned, version)

    def _finish(self, owned: OwnedShard, effect: shard.Finish) -> None:
        owned.mean(effect.total_weight)
        if effect.measure and owned.measured and self._clip is not None:
            measure = clip.Measure(owned.shard.index, owned.norm(), effect.not_finite)
            self._run_decisions(self._clip.measured(effect.step, measure))

    def _run_decisions(self, decisions: Sequence[clip.Tell | clip.Verdict]) -> None:
        for decision in decisions:
            match decision:
                case clip.Tell():
                    self._tell(decision)
                case clip.Verdict(step=step, scale=scale):
                    if scale is None or not math.isfinite(decision.norm):
                        self._not_finite(decision)
                    # On the inbox, not here: the shard whose Finish brought the verdict is still running its effects.
                    self.inbox.put(lambda step=step, scale=scale: self._decide(step, scale))  # type: ignore[misc]

    def _decide(self, step: int, scale: float | None) -> None:
        for owned in self._owned.values():
            if owned.machine.decides:
                self._run_effects(owned, owned.machine.handle(shard.Decide(step, scale)))

    def _publish(self, owned: OwnedShard, version: int) -> None:
        for channel in self._followers:
            self._send_version(channel, owned, version)

    def _send_version(self, channel: Channel, owned: OwnedShard, version: int) -> None:
        buffer = owned.wire[version].retain()
        nbytes = owned.shard.nbytes
        header = Header(Kind.VERSION, self._number, shard=owned.shard.index, step=version, length=nbytes)
        channel.send(header, buffer.bytes[:nbytes], sent=buffer.release)

    # ---- tickets and credits ----

    def _ticket(self, channel: Channel, header: Header, buffer: Buffer) -> int:
        self._next_ticket += 1
        self._tickets[self._next_ticket] = _Arrived(channel, buffer, header.length)
        return self._next_ticket

    def _settle(self, ticket: int) -> Buffer:
        arrived = self._tickets.pop(ticket)
        if arrived.credited:
            self._held_bytes -= arrived.nbytes
        else:
            self._credit(arrived)
        return arrived.buffer

    def _hold(self, ticket: int) -> None:
        arrived = self._tickets[ticket]
        if self._held_bytes + arrived.nbytes <= self._hold_limit:
            arrived.credited = True
            self._held_bytes += arrived.nbytes
            self._credit(arrived)

    def _drop(self, ticket: int, fault: str) -> None:
        channel = self._tickets[ticket].channel
        self._settle(ticket).release()
        if fault:
            channel.refuse(fault)

    def _credit(self, arrived: _Arrived) -> None:
        arrived.channel.send(Header(Kind.CREDIT, self._number, replica=1), urgent=True)
