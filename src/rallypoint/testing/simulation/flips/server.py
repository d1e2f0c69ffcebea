"""A simulated server that audits itself as a real one does (`server/reducer/audits.py`), and whose memory is faulty.

Until the view comes in which it is somebody new, frames wait, and whatever else happens has no effect: to all others it
looks as if it hung.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from rallypoint.core.audits.rest import AtRest
from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import server as machine
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.view import View, ViewNumber
from rallypoint.net.auditing.messages import StateChanged
from rallypoint.testing.simulation.flips.job import FlippedJob
from rallypoint.testing.simulation.network import Wire, World
from rallypoint.testing.simulation.replicas.contents import Content
from rallypoint.testing.simulation.replicas.names import combine
from rallypoint.testing.simulation.server import Effects, SimulatedServer
from rallypoint.testing.simulation.server_checks import Held
from rallypoint.testing.simulation.store import SimulatedStore


class _ChangedAtRest(Exception):
    """The state of this shard has changed."""

    def __init__(self, shard: int, version: int) -> None:
        self.shard, self.version = shard, version


class AuditedServer(SimulatedServer):
    """One server process in a job of audits. `changed` is what it has told of its memory; None while it is sound."""

    def __init__(self, world: World, name: str, job: FlippedJob, store: SimulatedStore) -> None:
        self.rest = AtRest(job.checks)
        self.changed: StateChanged | None = None
        self._unproven: dict[int, tuple[str, int, Content, tuple[int, ...]]] = {}  # records of a snapshot, by shard
        self._waiting_frames: list[tuple[Wire, str, Any]] = []
        super().__init__(world, name, job, store)

    def flip(self, random: Random) -> str:
        """Let a bit flip in a shard that is at rest and will be used again. Returns a phrase; "" if there is none.

        Where only some versions are audited, in one that its backup has, and whose backup's link is up: nobody could
        tell the others.
        """
        rare = self.rest.every > 1
        shards = [
            index for index in self.machine.held
            if index not in self.job.buffer_shards and (of := self.machine.machine(index)) is not None
            and 0 <= of.version < self.job.last_version(index) and (not rare or _is_protected(of))
        ]  # fmt: skip
        if not shards or self.changed is not None:
            return ""
        index = random.choice(shards)
        held = self.held[index]
        held.master = combine(held.master, 4711)
        return f"shard {index}"

    # ---- what comes in ----

    def _on_admitted(self, new: bool) -> None:
        super()._on_admitted(new)
        if self.changed is not None and not new:
            self.membership.send(self.changed)

    def _viewed(self, view: View) -> None:
        before = self.machine.view
        if self.changed is not None and before is not None:
            mine = {(server.id, server.incarnation) for server in view.servers}
            if (self.node.name, self.machine.incarnation) in mine and view.generation == before.generation:
                return
            self.changed = None
        super()._viewed(view)
        waited, self._waiting_frames = self._waiting_frames, []
        for wire, who, message in waited:
            self._when_known(message[1], partial(self._take, wire, who, message))
        self._unproven = {index: record for index, record in self._unproven.items() if index in self.held}

    def _on_message(self, message: Any) -> None:
        match message:
            case ("capture", _, version, _) if self.changed is None:
                self._unproven.clear()
                for index in self.machine.held:
                    self.rest.also(index, self.job.cadence.updates_before(index, version))
        super()._on_message(message)

    def _take(self, wire: Wire, who: str, message: Any) -> None:
        if self.changed is not None:
            self._waiting_frames.append((wire, who, message))
            return
        match message:
            case ("prove", number, shard, version, _) if self.shell.takes_from(shard, who, number):
                if self.shell.holds(shard, version):
                    try:
                        self._check(shard)
                    except _ChangedAtRest as changed:
                        self._is_wrong(changed)
                        return
                    self.rest.also(shard, version)
                    self._made(shard, version)
        super()._take(wire, who, message)
        match message:
            case ("state", number, shard, version, *_) if self.shell.takes_from(shard, who, number):
                self.rest.also(shard, version)
                self._made(shard, version)

    # ---- effects ----

    def _run(self, effects: Effects) -> None:
        depth, self._running = self._running, self._running + 1  # pulls are answered once, after all of them
        for effect in effects:
            if self.changed is not None:
                break
            if isinstance(effect, machine.Disown):
                self.rest.moved(effect.shard)
                self._unproven.pop(effect.shard, None)
            try:
                super()._run((effect,))
            except _ChangedAtRest as changed:
                self._is_wrong(changed)
            self._running = depth + 1
        self._running = depth
        if self.changed is None:
            self._store_proven()
            super()._run(())

    def _is_wrong(self, found: _ChangedAtRest) -> None:
        view = self.machine.view
        generation = ViewNumber() if view is None else view.generation
        self.changed = StateChanged(found.shard, found.version, generation)
        self.membership.send(self.changed)

    def check_tickets(self) -> None:
        """No payload is forgotten. (What came while it knew that it is wrong goes with the shards.)"""
        if self.changed is None:
            super().check_tickets()

    def _run_on(self, index: int, held: Held, effect: shard_effects.Effect) -> None:
        match effect:
            case shard_effects.Apply(version=version):
                self._check(index)
                if index in self._unproven:
                    self._write(index, self._unproven.pop(index), {})
                super()._run_on(index, held, effect)
                self._made(index, version)
            case shard_effects.Fill(version=version) | shard_effects.Prove(version=version):
                self._check(index)
                super()._run_on(index, held, effect)
                self.rest.also(index, version)
                self._made(index, version)
            case shard_effects.Install(version=version):
                super()._run_on(index, held, effect)
                self.rest.also(index, version)
                self._made(index, version)
            case shard_effects.Capture(version=version, missed=False) if index not in self.job.buffer_shards:
                self._check(index)
                self._unproven[index] = (self._snapshot, version, held.master, self._clocks(index))
            case _:
                super()._run_on(index, held, effect)
                if isinstance(effect, shard_effects.Publish) and (of := self.machine.machine(index)) is not None:
                    loaded = self.rest.kept(index) is None and of.version == of.first
                    if loaded:  # from a snapshot
                        self.rest.also(index, of.version)
                        self._made(index, of.version)

    def _made(self, index: int, version: int) -> None:
        self.rest.moved(index)
        if self.rest.audited(index, version):
            self.rest.keep(index, version, self.held[index].master)

    def _check(self, index: int) -> None:
        kept = self.rest.kept(index)
        if kept is not None and kept[1] != self.held[index].master:
            raise _ChangedAtRest(index, kept[0])

    def _store_proven(self) -> None:
        for index, record in list(self._unproven.items()):
            of = self.machine.machine(index)
            if of is not None and (not of.copies.replicating or of.published >= of.version):
                del self._unproven[index]
                self._write(index, record, {})


def _is_protected(of: ShardMachine) -> bool:
    """Does the shard's backup have what its primary has?"""
    if not of.primary:
        return True
    return of.copies.backup.caught_up and of.copies.backup.replicating and of.published == of.version
