"""The views that a coordinator publishes, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.layout import Shard
from rallypoint.core.membership import Membership
from rallypoint.core.view import Deal, Member, View, ViewNumber
from rallypoint.core.view_change import first_homes, meetings, rebalanced, still_in_step, surviving_primaries


@dataclass(slots=True)
class ViewSequence:
    """The view in force and those that may follow it; nothing counts before it is adopted.

    Attributes:
        epoch: the coordinator's (I10).
        replication: with 2, every shard has a backup.
        view: the one in force; None before the first.
        in_step: the shards whose backup holds all that has been published, and may be promoted.
    """

    epoch: int
    replication: int
    view: View | None = None
    in_step: set[int] = field(default_factory=set)
    _last: ViewNumber = field(default_factory=ViewNumber)

    @property
    def begun(self) -> bool:
        """Has there been a view, of this coordinator or of the one before?"""
        return self._last.count > 0 or self.view is not None

    @property
    def exposed(self) -> int:
        """How many shards would be lost with one server."""
        return 0 if self.view is None else len(self.view.primary.keys() - self.in_step)

    def first(
        self, shards: Sequence[Shard], members: Membership, deals: tuple[Deal, ...], *, bringer: str, origin: str
    ) -> View:
        """A view that makes everything before it void: all begin from snapshot `origin`, or what `bringer` brings.

        ValueError when there is no server.
        """
        number = self._next_number()
        primary, backup = first_homes(shards, members.servers, self.replication)
        view = View(
            number=number, since=number, workers=_workers(members), servers=tuple(members.servers.values()),
            deals=deals, primary=primary, backup=backup, origin=origin, first=bringer,
        )  # fmt: skip
        return msgspec.structs.replace(view, met=meetings(view, None))

    def following(
        self, shards: Sequence[Shard], members: Membership, deals: tuple[Deal, ...], *, ending: bool
    ) -> View | None:
        """The view that follows the one in force from who is here now; None when a shard is lost."""
        assert self.view is not None
        before, servers = self.view, members.servers
        surviving = surviving_primaries(before, servers, self.in_step)
        if surviving is None:
            return None
        primary, backup = rebalanced(before, surviving, shards, servers, self.in_step, self.replication)
        view = msgspec.structs.replace(
            before, number=self._next_number(), workers=_workers(members), servers=tuple(servers.values()),
            deals=deals, primary=primary, backup=backup, ending=ending,
        )  # fmt: skip
        return msgspec.structs.replace(view, met=meetings(view, before))

    def adopt(self, view: View) -> None:
        """`view` is in force from now on."""
        goes_on = self.view is not None and self.view.since == view.since
        self.in_step = still_in_step(view, self.view, self.in_step) if self.view is not None and goes_on else set()
        self.view, self._last = view, view.number

    def backups_in_step(self, server: str, backups: Mapping[int, ViewNumber]) -> bool:
        """`server` says that its backups of these shards, as they met in that view, are in step; is that new?

        It counts of shards whose primary it is, and whose backup is still the one that it met then.
        """
        assert self.view is not None
        view = self.view
        new = {
            shard for shard, met in backups.items() if view.primary.get(shard) == server and view.met.get(shard) == met
        } - self.in_step
        self.in_step |= new
        return bool(new)

    def _next_number(self) -> ViewNumber:
        return ViewNumber(self.epoch, self._last.count + 1 if self._last.epoch == self.epoch else 1)


def _workers(members: Membership) -> tuple[Member, ...]:
    return tuple(members.workers[id] for id in members.proposed if id in members.workers)
