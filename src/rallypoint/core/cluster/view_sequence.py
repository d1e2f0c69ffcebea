"""Makes the views that a coordinator publishes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import msgspec

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.layout import Shard
from rallypoint.core.placing import view_change
from rallypoint.core.placing.pinned import nearest_aggregators
from rallypoint.core.placing.placement import place, place_backups
from rallypoint.core.placing.uplinks import Situation, Uplinks
from rallypoint.core.placing.view_change import Placing, contributing, contributors, first_homes, still_caught_up
from rallypoint.core.view import Assignment, Member, StandingOrders, View, ViewNumber

Aggregation: TypeAlias = Callable[..., dict[str, str]]
Contributing: TypeAlias = Callable[..., dict[str, tuple[int, ...]]]

P = ParamSpec("P")
R = TypeVar("R")


class Remembered(Generic[P, R]):
    """A function, which returns its last answer again if its arguments are equal to the last ones.

    Nothing but the arguments may decide its answer, and nobody may change them or the answer afterwards. Example: with
    `placed = Remembered(place)` the second of two calls `placed(shards, ("a", "b"))` places nothing.

    It is no closure, so that a machine which has one can be recorded (`observe.recording`).
    """

    __slots__ = ("_function", "_last")

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._last: tuple[object, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._last is None or self._last[0] != (args, kwargs):
            self._last = (args, kwargs), self._function(*args, **kwargs)
        return self._last[1]


@dataclass(slots=True)
class ViewSequence:
    """The view in force, and the views that may follow it. A view that is made changes nothing before `adopt(view)`.

    Attributes:
        epoch: the coordinator's epoch (I10).
        replication: with 2, every shard has a backup; with 0 none moves but in a new generation.
        aggregates: workers may use aggregators; else views give them none.
        view: the view in force; None before the first.
        caught_up: the shards whose backup holds all that was published: that backup may become primary.
        arrived: the shards whose third server (`View.incoming`) does.
        complete: every view of earlier coordinators that had an effect is known.
        orders: those of the next view, but for `handover`, `warming` and `ending`, which follow with it.
        speeds: see `View`.
        uplinks: by how much less the links of servers behind narrow uplinks count.
    """

    epoch: int
    replication: int
    aggregates: bool = True
    view: View | None = None
    caught_up: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    complete: bool = False
    orders: StandingOrders = field(default_factory=StandingOrders)
    speeds: dict[str, float] = field(default_factory=dict)
    uplinks: Uplinks = field(default_factory=Uplinks)
    _last: ViewNumber = field(default_factory=ViewNumber)
    _placing: Placing = field(default_factory=lambda: Placing(Remembered(place), Remembered(place_backups)))
    _nearest: Aggregation = field(default_factory=lambda: Remembered(nearest_aggregators))
    _contributing: Contributing = field(default_factory=lambda: Remembered(contributing))

    @property
    def begun(self) -> bool:
        """True if there has been a view, of this coordinator or an earlier one."""
        return self._last.count > 0 or self.view is not None

    @property
    def exposed(self) -> int:
        """The number of shards without a backup that has caught up: one server's loss would lose them."""
        return 0 if self.view is None else len(self.view.primary.keys() - self.caught_up)

    def go_on_from(self, view: View | None, caught_up: Iterable[int], *, goes_on: bool) -> None:
        """Put in force what an earlier coordinator has left; `goes_on`: the next view is not paused."""
        self.view, self.caught_up = view, set(caught_up)
        self.orders, self.speeds = (StandingOrders(), {}) if view is None else (view.orders, dict(view.speeds))
        self.order(handover=None, warming=(), ending=False, paused=None if goes_on else self.orders.paused)

    def order(self, **changes: Any) -> None:
        """Change what the next view orders."""
        self.orders = msgspec.structs.replace(self.orders, **changes)

    def first(
        self, shards: Sequence[Shard], members: Membership, assignments: tuple[Assignment, ...], *, uploader: str,
            origin: str, ending: bool = False,
    ) -> View:  # fmt: skip
        """Make a view that begins a new generation: all members start from snapshot `origin`, or, if that is "", from
        what the worker `uploader` uploads.

        Raises ValueError when there is no server.
        """
        number = self._next_number()
        racks = self.uplinks.factors(self.situation(members, assignments), anew=True)
        primary, backup = first_homes(shards, members.staying, self.replication, self._speeds(members), racks)
        view = View(
            number=number, generation=number, workers=_workers(members), servers=tuple(members.servers.values()),
            assignments=assignments, primary=primary, backup=backup, origin=origin, uploader=uploader,
            orders=msgspec.structs.replace(self.orders, ending=ending), speeds=self._speeds(members),
            **self._aggregation(members, assignments),
        )  # fmt: skip
        return self._completed(view, None)

    def following(
        self, shards: Sequence[Shard], members: Membership, assignments: tuple[Assignment, ...], *, ending: bool,
        moves_before: int | None = None, warming: Sequence[str] = (), settled: bool = False,
    ) -> View | None:  # fmt: skip
        """Make the view that follows the one in force, from the members that are here; None if a shard is lost.

        `moves_before`: shards that could change their primary stay, and move before this step (`orders.handover`).
        `settled`: no update is on its way, so a shard's primary and backup are at the same version.
        """
        assert self.view is not None
        before, servers = msgspec.structs.replace(self.view, speeds=self._speeds(members)), members.servers
        surviving = view_change.surviving_primaries(before, servers, self.caught_up)
        if surviving is None:
            return None
        away = not self.replication or not members.awaited.isdisjoint(servers)
        racks = self.uplinks.factors(self.situation(members, assignments))
        how = replace(
            self._placing, staying=members.staying, racks=racks, hold=away, apart=members.apart, arrived=self.arrived,
            settled=settled,
        )  # fmt: skip
        known = before, surviving, shards, servers, self.caught_up, self.replication
        primary, backup, incoming = view_change.rebalanced(*known, how)
        stays = primary != surviving and moves_before is not None
        if stays:
            primary, backup, incoming = view_change.rebalanced(*known, replace(how, stay=True))
        orders = msgspec.structs.replace(
            self.orders, handover=moves_before if stays else None, warming=tuple(warming), ending=ending
        )
        view = msgspec.structs.replace(
            before, number=self._next_number(), workers=_workers(members), servers=tuple(servers.values()),
            assignments=assignments, primary=primary, backup=backup, gaps=self._gaps(before), orders=orders,
            **self._aggregation(members, assignments),
        )  # fmt: skip
        view = msgspec.structs.replace(view, incoming=view_change.incomings(view, before, incoming))
        whole = view_change.carried(view, before, self.caught_up, self.arrived) if settled else set()
        return self._completed(view, before, whole)

    def forgetting(self, view: View) -> View:
        """`view`, which follows the one in force, with those contributors only that the two assign something to."""
        assert self.view is not None
        known = contributors(self.view, None)
        before = msgspec.structs.replace(self.view, contributors=known)
        return msgspec.structs.replace(view, contributors=contributors(view, before, self._contributing))

    def with_backup_task(self, worker: str, replica: int) -> View | None:
        """Make the view in which `worker` and its aggregator may also contribute `replica`; None if it may already."""
        assert self.view is not None
        own = self.view.contributors.get(worker, ())
        if replica in own:
            return None
        more = {**self.view.contributors, worker: tuple(sorted((*own, replica)))}
        view = msgspec.structs.replace(self.view, number=self._next_number(), contributors=more)
        return msgspec.structs.replace(view, contributors=contributors(view, view), gaps=self._gaps(self.view))

    def _gaps(self, before: View) -> tuple[tuple[ViewNumber, ViewNumber], ...]:
        """The gaps in the history of the view that follows `before`."""
        joins = self.complete or before.number.epoch == self.epoch
        return before.gaps if joins else (*before.gaps, (before.number, ViewNumber(self.epoch)))

    def is_outrun_by(self, number: ViewNumber) -> bool:
        """True if the view of that number may have had effects in this generation that the view in force ignores."""
        if self.view is None or number < self.view.generation:
            return False
        return any(known < number < went_on for known, went_on in self._gaps(self.view))

    def adopt(self, view: View) -> None:
        """Put `view` in force."""
        goes_on = self.view is not None and self.view.generation == view.generation
        before = self.view if goes_on else None
        self.caught_up = set() if before is None else still_caught_up(view, before, self.caught_up, self.arrived)
        here = {} if before is None else before.incoming
        self.arrived = {s for s in self.arrived & view.incoming.keys() & here.keys() if view.incoming[s] == here[s]}
        self.view, self._last, self.speeds = view, view.number, dict(view.speeds)

    def backups_caught_up(self, server: str, backups: Mapping[int, ViewNumber]) -> bool:
        """Note that `server` says that the backups of these shards have caught up. Returns True if any is new.

        `backups`: shard -> the view in which the two were paired, or in which a third server came beside them. A claim
        counts only if `server` is the shard's primary and the pair is still the same.
        """
        assert self.view is not None
        view = self.view
        own = {shard: paired for shard, paired in backups.items() if view.primary.get(shard) == server}
        third = {shard: one.paired for shard, one in view.incoming.items()}
        new = {shard for shard, paired in own.items() if view.paired.get(shard) == paired} - self.caught_up
        came = {shard for shard, paired in own.items() if third.get(shard) == paired} - self.arrived
        self.caught_up |= new
        self.arrived |= came
        return bool(new or came)

    def situation(self, members: Membership, assignments: Sequence[Assignment]) -> Situation:
        """What matters for uplinks, of the members that are here."""
        here = self._aggregation(members, tuple(assignments))["aggregator_of"] if self.uplinks.told else {}
        return Situation(
            members.staying, self._speeds(members), _workers(members), assignments, members.aggregators, here,
            self.replication,
        )  # fmt: skip

    def _aggregation(self, members: Membership, assignments: tuple[Assignment, ...]) -> dict[str, Any]:
        """The aggregators, and which workers use them."""
        here = tuple(members.aggregators.values())
        assigned = assignments[-1].replicas if assignments else {}
        used = self._nearest(_workers(members), here, assigned) if self.aggregates else {}
        return {"aggregators": here, "aggregator_of": used}

    def _speeds(self, members: Membership) -> dict[str, float]:
        """What was measured of the servers that are here."""
        return {server: self.speeds[server] for server in sorted(self.speeds.keys() & members.servers.keys())}

    def _completed(self, view: View, before: View | None, whole: AbstractSet[int] = frozenset()) -> View:
        """The view with all that follows from it and from the one before, in the same generation. `whole`: see
        `pairings`."""
        paired, homed = view_change.pairings(view, before, whole), view_change.homings(view, before)
        may = contributors(view, before, self._contributing)
        return msgspec.structs.replace(view, paired=paired, homed=homed, contributors=may)

    def _next_number(self) -> ViewNumber:
        return ViewNumber(self.epoch, self._last.count + 1 if self._last.epoch == self.epoch else 1)


def _workers(members: Membership) -> tuple[Member, ...]:
    return tuple(members.workers[id] for id in members.proposed if id in members.workers)
