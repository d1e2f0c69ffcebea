"""Who holds the model's state, and how the job finds it again when some of it is lost: two strategies.

`ServersHoldState`: shards are lost with their servers; then the job goes back to the last snapshot.
`WorkersHoldState` (AllReduce): each worker has all of the state and servers have none of it, so nothing moves between
servers. Whenever a worker without the state is to take part, or servers come or go, a new generation begins from what
one worker uploads. It loses the step in progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.state_holders import StateHolders
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.view import Assignment, View


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody has to come first."""


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """Go back to the newest snapshot; `lost` says what was lost."""

    lost: str


@dataclass(frozen=True, slots=True)
class FromWorker:
    """All go on from `version`, which `uploader` has."""

    uploader: str
    version: int


Plan = Wait | FromSnapshot | FromWorker


class Recovery(Protocol):
    """The strategy of one job, chosen once from its record (`strategies_for`).

    A strategy that knows nothing of workers is `ServersHoldState`: copy it to write another.
    """

    no_snapshot: str  # why the job ends when its state is lost and there is no snapshot
    workers_end_it: bool  # can workers that come end a recovery? Servers always can
    workers_store: bool  # workers write snapshots, not servers

    @property
    def reached(self) -> Mapping[str, int]:
        """The workers that have the state, with the version that each has reached: for the journal."""

    def recovered(self, reached: Mapping[str, int], *, moved: bool) -> None:
        """An earlier coordinator knew this; `moved`: something has been computed under its view."""

    def replication(self, wanted: int) -> int:
        """How many servers are to hold each shard."""

    def exposed(self, shards: int) -> int:
        """Of so many shards without a backup that has caught up, how many would be lost with one server."""

    def has(self, worker: str, version: int) -> bool:
        """`worker` says that it has come to `version`; True if the journal should know."""

    def gone(self, worker: str) -> bool:
        """`worker` is gone; True if the journal should know."""

    def uploaded(self, worker: str) -> None:
        """`worker` has uploaded the first weights."""

    def begins(self, *, stored: bool) -> None:
        """A new generation begins; `stored`: from a snapshot."""

    def published(self, view: View) -> None:
        """`view` is in force."""

    def ends_with(self, worker: str, view: View) -> bool:
        """Has what this generation begins with been lost with `worker`?"""

    def needs_new_generation(
        self, before: View, assignments: Sequence[Assignment], members: Membership, *, ending: bool
    ) -> bool:
        """May a view with these assignments and members not simply follow `before`?"""

    def plan(self, members: Membership, active: Sequence[str], computing: Sequence[str]) -> Plan:
        """How the job goes on after a loss."""

    def first_writers(self, uploader: str, servers: Sequence[str]) -> list[str]:
        """Who writes the snapshot of version 0."""

    def writers(self, servers: Sequence[str], computing: Sequence[str]) -> list[str]:
        """Who writes a snapshot."""

    def awaited(self, members: Membership, terms: Terms) -> str:
        """What a recovery waits for, as a phrase; "" for a snapshot or servers."""

    def hands_over(self, view: View) -> bool:
        """Does the generation of `view` go on from a version that was reached before it? Then no step is stale."""


@dataclass(slots=True)
class ServersHoldState:
    """Shards are the servers': each is lost if its primary dies before a backup has caught up."""

    no_snapshot: str = (
        "parameters were lost with their servers and there is no snapshot to go back to: set replication to 2, or "
        "snapshots to every so many seconds"
    )
    workers_end_it: bool = False
    workers_store: bool = False

    @property
    def reached(self) -> Mapping[str, int]:
        return {}

    def recovered(self, reached: Mapping[str, int], *, moved: bool) -> None:
        pass

    def replication(self, wanted: int) -> int:
        return wanted

    def exposed(self, shards: int) -> int:
        return shards

    def has(self, worker: str, version: int) -> bool:
        return False

    def gone(self, worker: str) -> bool:
        return False

    def uploaded(self, worker: str) -> None:
        pass

    def begins(self, *, stored: bool) -> None:
        pass

    def published(self, view: View) -> None:
        pass

    def ends_with(self, worker: str, view: View) -> bool:
        return False

    def needs_new_generation(
        self, before: View, assignments: Sequence[Assignment], members: Membership, *, ending: bool
    ) -> bool:
        return False

    def plan(self, members: Membership, active: Sequence[str], computing: Sequence[str]) -> Plan:
        return FromSnapshot("parameters are lost with their servers: going back to the last snapshot")

    def first_writers(self, uploader: str, servers: Sequence[str]) -> list[str]:
        return list(servers)

    def writers(self, servers: Sequence[str], computing: Sequence[str]) -> list[str]:
        return list(servers)

    def awaited(self, members: Membership, terms: Terms) -> str:
        return ""

    def hands_over(self, view: View) -> bool:
        return False


@dataclass(slots=True)
class WorkersHoldState:
    """The model and its optimizer's state are the workers'; servers only average."""

    holders: StateHolders = field(default_factory=StateHolders)
    no_snapshot: str = (
        "no worker is left that has the model's state, and there is no snapshot to go back to: use more workers, or "
        "set snapshots to every so many seconds"
    )
    workers_end_it: bool = True
    workers_store: bool = True

    @property
    def reached(self) -> Mapping[str, int]:
        return self.holders.reached

    def recovered(self, reached: Mapping[str, int], *, moved: bool) -> None:
        self.holders.reached, self.holders.moved = dict(reached), moved

    def replication(self, wanted: int) -> int:
        return 1  # there is nothing on a server that could be lost

    def exposed(self, shards: int) -> int:
        return 0

    def has(self, worker: str, version: int) -> bool:
        return self.holders.has(worker, version)

    def gone(self, worker: str) -> bool:
        return self.holders.reached.pop(worker, -1) >= 0

    def uploaded(self, worker: str) -> None:
        self.holders.uploaded(worker)

    def begins(self, *, stored: bool) -> None:
        self.holders.begin(safe=stored)

    def published(self, view: View) -> None:
        self.holders.moved = self.holders.moved or bool(view.assignments)

    def ends_with(self, worker: str, view: View) -> bool:
        return worker == view.uploader and not self.holders.safe

    def needs_new_generation(
        self, before: View, assignments: Sequence[Assignment], members: Membership, *, ending: bool
    ) -> bool:
        return self.holders.needs_new_generation(before, assignments, members, ending=ending)

    def plan(self, members: Membership, active: Sequence[str], computing: Sequence[str]) -> Plan:
        uploader = self.holders.uploader(computing, active, members.present)
        if not members.servers or (uploader and not active):
            return Wait()
        if not uploader:
            lost = "the model's state is lost with the workers that had it: going back to the last snapshot"
            return FromSnapshot(lost)
        return FromWorker(uploader, self.holders.reached[uploader])

    def first_writers(self, uploader: str, servers: Sequence[str]) -> list[str]:
        return [uploader]

    def writers(self, servers: Sequence[str], computing: Sequence[str]) -> list[str]:
        return list(computing)

    def awaited(self, members: Membership, terms: Terms) -> str:
        if not self.holders.reached or not members.servers:
            return ""
        return f"workers to go on with the state that is here (at least {terms.workers_min} are wanted)"

    def hands_over(self, view: View) -> bool:
        return not view.origin
