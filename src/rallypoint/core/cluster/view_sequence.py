"""The views that a coordinator publishes, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.view_change import first_homes, pairings, rebalanced, still_caught_up, surviving_primaries
from rallypoint.core.layout import Shard
from rallypoint.core.view import Assignment, Member, View, ViewNumber


@dataclass(slots=True)
class ViewSequence:
    """The view in force and those that may follow it; nothing counts before it is adopted.

    Attributes:
        epoch: the coordinator's (I10).
        replication: with 2, every shard has a backup.
        view: the one in force; None before the first.
        caught_up: the shards whose backup holds all that has been published, and may be promoted.
    """

    epoch: int
    replication: int
    view: View | None = None
    caught_up: set[int] = field(default_factory=set)
    _last: ViewNumber = field(default_factory=ViewNumber)

    @property
    def begun(self) -> bool:
        """Has there been a view, of this coordinator or of the one before?"""
        return self._last.count > 0 or self.view is not None

    @property
    def exposed(self) -> int:
        """How many shards would be lost with one server."""
        return 0 if self.view is None else len(self.view.primary.keys() - self.caught_up)

    def first(
        self, shards: Sequence[Shard], members: Membership, assignments: tuple[Assignment, ...], *, uploader: str,
            origin: str
    ) -> View:
        """A view that makes everything before it stale: all begin from snapshot `origin`, or what `uploader` uploads.

        ValueError when there is no server.
        """
        number = self._next_number()
        primary, backup = first_homes(shards, members.staying, self.replication)
        view = View(
            number=number, generation=number, workers=_workers(members), servers=tuple(members.servers.values()),
            assignments=assignments, primary=primary, backup=backup, origin=origin, uploader=uploader,
        )  # fmt: skip
        return msgspec.structs.replace(view, paired=pairings(view, None))

    def following(
        self, shards: Sequence[Shard], members: Membership, assignments: tuple[Assignment, ...], *, ending: bool
    ) -> View | None:
        """The view that follows the one in force from who is here now; None when a shard is lost."""
        assert self.view is not None
        before, servers = self.view, members.servers
        surviving = surviving_primaries(before, servers, self.caught_up)
        if surviving is None:
            return None
        primary, backup = rebalanced(
            before, surviving, shards, servers, self.caught_up, self.replication, members.staying
        )
        view = msgspec.structs.replace(
            before, number=self._next_number(), workers=_workers(members), servers=tuple(servers.values()),
            assignments=assignments, primary=primary, backup=backup, ending=ending,
        )  # fmt: skip
        return msgspec.structs.replace(view, paired=pairings(view, before))

    def adopt(self, view: View) -> None:
        """`view` is in force from now on."""
        goes_on = self.view is not None and self.view.generation == view.generation
        before = self.view if goes_on else None
        self.caught_up = set() if before is None else still_caught_up(view, before, self.caught_up)
        self.view, self._last = view, view.number

    def backups_caught_up(self, server: str, backups: Mapping[int, ViewNumber]) -> bool:
        """`server` says that its backups of these shards, as they met in that view, have caught up; is that new?

        It counts of shards whose primary it is, and whose backup is still the one that it met then.
        """
        assert self.view is not None
        view = self.view
        new = {
            shard for shard, paired in backups.items() if view.primary.get(shard) == server and view.paired.get(shard)
            == paired
        } - self.caught_up
        self.caught_up |= new
        return bool(new)

    def _next_number(self) -> ViewNumber:
        return ViewNumber(self.epoch, self._last.count + 1 if self._last.epoch == self.epoch else 1)


def _workers(members: Membership) -> tuple[Member, ...]:
    return tuple(members.workers[id] for id in members.proposed if id in members.workers)
