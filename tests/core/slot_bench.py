"""A worker's machine on a bench, which does its shell's part. After each event the machine's invariants hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.core.view import Assignment, Member, StandingOrders, View, ViewNumber
from rallypoint.core.worker import slots
from rallypoint.core.worker.slots import Compute, Effect, Filled, Installed, Land, LinkUp, Send, Slot, SlotSent, Viewed

V1 = ViewNumber(1, 1)


def view_of(
    shards: int, assigned: Mapping[str, Sequence[int]] | None = None, *, count: int = 1, generation: int = 1,
    homes: Sequence[str] | None = None, incarnations: Mapping[str, int] | None = None, uploader: str = "other",
    origin: str = "", ending: bool = False, later: Sequence[Assignment] = (), mine: Sequence[int] = range(9),
) -> View:  # fmt: skip
    """A view of servers s0 and s1, which hold the even and the odd shards. They take the replicas `mine` from "me"."""
    primary = {s: homes[s] if homes is not None else f"s{s % 2}" for s in range(shards)}
    born = {"s0": 1, "s1": 2, **(incarnations or {})}
    return View(
        number=ViewNumber(1, count), generation=ViewNumber(1, generation), workers=(Member("me", "h", incarnation=9),),
        servers=tuple(Member(s, "h", f"{s}:1", incarnation) for s, incarnation in born.items()),
        assignments=(Assignment(0, {"me": (0,)} if assigned is None else {w: tuple(h) for w, h in assigned.items()}),
            *later),
        primary=primary, origin=origin, uploader=uploader, orders=StandingOrders(ending=ending),
        contributors={"me": tuple(mine)},
    )  # fmt: skip


class SlotBench:
    """`first`: what the machine has said by the time that it is linked to all servers of its first view."""

    def __init__(self, machine: Any, view: View | None) -> None:
        self.machine, self.shards = machine, machine.shards
        self.first: list[Effect] = []
        if view is not None:
            self.handle(Viewed(view))
            for server in view.servers:
                self.first += self.handle(LinkUp(server.id))

    def handle(self, event: object) -> list[Effect]:
        effects: list[Effect] = self.machine.handle(event)
        self.machine.validate()
        return effects

    def installed(self) -> list[Effect]:
        """What has landed is copied into the model."""
        assert self.machine.take(self.machine.next_action())
        return self.handle(Installed())

    def begin(self) -> int:
        action = self.machine.next_action()
        assert isinstance(action, Compute)
        assert self.machine.take(action)
        return action.replica

    def fill(self, shard: int) -> list[Effect]:
        assert self.machine.may_fill(shard)
        self.machine.fill(shard)
        return self.handle(Filled(shard))

    def send(self, shard: int) -> Send:
        """The gradient of a shard is whole, and leaves."""
        (send,) = self.fill(shard)
        assert isinstance(send, Send)
        self.handle(SlotSent(shard, send.serial))
        return send

    def fill_all(self, replica: int) -> list[Send]:
        """The gradients of all shards to which the replica contributes are whole; what is sent."""
        sends: list[Send] = []
        for shard in range(self.shards):
            if self.machine.contributes(shard, replica) and self.machine.may_fill(shard):
                sends += [effect for effect in self.fill(shard) if isinstance(effect, Send)]
        return sends

    def slot(self, shard: int) -> Slot:
        slot: Slot = self.machine._slots[shard]
        return slot


class AlignedBench(SlotBench):
    """Of a machine whose shards come to the next version together. `whole`: versions are, unless a test says else."""

    whole = True

    def arrive(self, shard: int, version: int, *, whole: bool | None = None) -> list[Effect]:
        number = self.machine.view.number if self.machine.view is not None else V1
        return self.handle(slots.Arriving(shard, version, number, whole=self.whole if whole is None else whole))

    def land(self, version: int, shards: Sequence[int] | None = None, **more: bool) -> None:
        for shard in range(self.shards) if shards is None else shards:
            assert self.arrive(shard, version, **more)[0] == Land(shard)
            self.handle(slots.Landed(shard))

    def install(self, version: int, **more: bool) -> None:
        self.land(version, **more)
        assert self.machine.next_action() == slots.Install(version)
        self.installed()
        assert self.machine.step == version

    def compute(self, *, sent: bool = True) -> list[Send]:
        """One replica; what was sent."""
        sends = self.fill_all(self.begin())
        self.handle(slots.ReplicaComputed())
        for send in sends if sent else ():
            self.handle(SlotSent(send.shard, send.serial))
        return sends
