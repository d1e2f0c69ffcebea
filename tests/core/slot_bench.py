"""A worker's machine on a bench, which does its shell's part. After each event the machine's invariants hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.core.view import Assignment, Member, StandingOrders, View, ViewNumber
from rallypoint.core.worker.slots import Compute, Effect, Filled, Installed, LinkUp, Send, Slot, SlotSent, Viewed

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

    def slot(self, shard: int) -> Slot:
        slot: Slot = self.machine._slots[shard]
        return slot
