"""Two strategies for lost state: who holds the model's state, and how the job goes on when some of it is lost.

`ServersHoldState`: each shard is on its server. If it is lost with it, the job goes back to the last snapshot.
`WorkersHoldState` (AllReduce): each worker has the whole state, and servers have none. A new generation begins when a
worker without the state is to take part, or when servers come or go: one worker uploads the state, and all others start
from it. The step in progress is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.view import Assignment, View
from rallypoint.errors import NO_SNAPSHOT


@dataclass(slots=True)
class StateHolders:
    """The workers that have the state.

    Attributes:
        reached: worker that has the state -> the highest step that it has reported. Its model is at that version or
            a later one.
        moved: a replica has been assigned in this generation. The servers may be past its first version, and a worker
            that did not follow from the start cannot get that version any more.
        safe: the first version of this generation is complete on the servers, or in a snapshot.
    """

    reached: dict[str, int] = field(default_factory=dict)
    moved: bool = True
    safe: bool = False

    def has(self, worker: str, step: int) -> bool:
        """Note that `worker` has computed a replica of `step`. Returns True if it was not known to have the state."""
        new = worker not in self.reached
        self.reached[worker] = max(step, self.reached.get(worker, -1))
        self.safe = True
        return new

    def uploaded(self, worker: str) -> None:
        """Note that `worker` has uploaded the first weights: it has the state. The servers may not have all of it yet.
        """
        self.reached.setdefault(worker, 0)

    def begin(self, *, safe: bool) -> None:
        """Begin a new generation; `safe`: it starts from a snapshot."""
        self.moved, self.safe = False, safe

    def uploader(self, *preferred: Iterable[str]) -> str:
        """Choose the worker that uploads the state: the one with the highest step in the first group that has any.

        Returns "" if no worker in any group has the state.
        """
        for among in preferred:
            if having := [worker for worker in among if worker in self.reached]:
                return max(having, key=lambda worker: (self.reached[worker], worker))
        return ""

    def needs_new_generation(
        self, before: View, assignments: Sequence[Assignment], members: Membership, *, ending: bool
    ) -> bool:
        """True if a view with these assignments and members needs a new generation, instead of following `before`.

        A worker certainly has the state if it had replicas in the last assignment of every view of this generation:
        then it has followed all the time.
        """
        if set(before.servers) != set(members.servers.values()):
            return True
        if not self.moved:
            return False
        having = {member.id for member in before.workers if members.workers.get(member.id) == member}
        if not before.orders.ending:  # then all follow
            having &= _assigned(before.assignments[-1:])
        wanted = _assigned(assignments) | (members.present if ending else set())
        return not wanted <= having


def _assigned(assignments: Iterable[Assignment]) -> set[str]:
    return {worker for assignment in assignments for worker, own in assignment.replicas.items() if own}


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until more members have joined."""


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """Go back to the newest snapshot; `lost` is the sentence that says what was lost."""

    lost: str


@dataclass(frozen=True, slots=True)
class FromWorker:
    """Go on from `version`: the worker `uploader` has it and uploads it."""

    uploader: str
    version: int


Plan = Wait | FromSnapshot | FromWorker


class Recovery(Protocol):
    """The strategy of one job, chosen once from its record (`strategies_for`).

    `ServersHoldState` is the simplest implementation: copy it to write another.
    """

    no_snapshot: str  # the reason of the Abort when the state is lost and there is no snapshot
    workers_end_it: bool  # True if a worker that joins can end a recovery; a server always can
    workers_store: bool  # True if workers write snapshots instead of servers

    @property
    def reached(self) -> Mapping[str, int]:
        """For the journal: worker that has the state -> the version that it has reached."""

    def recovered(self, reached: Mapping[str, int], *, moved: bool) -> None:
        """Take over `reached` from the journal; `moved`: a step may have been computed in this generation."""

    def replication(self, wanted: int) -> int:
        """The number of servers that hold each shard, where the terms ask for `wanted`. 0: a server's shards cannot be
        given to another one before the next generation."""

    def exposed(self, shards: int) -> int:
        """The number of shards that the loss of one server could lose; `shards` have no backup that has caught up."""

    def has(self, worker: str, version: int) -> bool:
        """`worker` reports that it has reached `version`. Returns True if the journal has to be written."""

    def gone(self, worker: str) -> bool:
        """`worker` is gone. Returns True if the journal has to be written."""

    def uploaded(self, worker: str) -> None:
        """`worker` has uploaded the first weights."""

    def begins(self, *, stored: bool) -> None:
        """A new generation begins; `stored`: it starts from a snapshot."""

    def published(self, view: View) -> None:
        """`view` is in force."""

    def ends_with(self, worker: str, view: View) -> bool:
        """True if the loss of `worker` has lost the state with which the generation of `view` begins."""

    def needs_new_generation(
        self, before: View, assignments: Sequence[Assignment], members: Membership, *, ending: bool
    ) -> bool:
        """True if a view with these assignments and members needs a new generation, instead of following `before`."""

    def plan(self, members: Membership, active: Sequence[str], computing: Sequence[str]) -> Plan:
        """How the job goes on after a loss. `active`: the workers that may compute; `computing`: those that did."""

    def first_writers(self, uploader: str, servers: Sequence[str]) -> list[str]:
        """The members that write the snapshot of version 0."""

    def writers(self, servers: Sequence[str], computing: Sequence[str]) -> list[str]:
        """The members that write any later snapshot."""

    def writer_of(self, shard: int, writers: Sequence[str], view: View) -> str:
        """The one of a snapshot's writers that stores this shard."""

    def awaited(self, members: Membership, terms: Terms) -> str:
        """A phrase for what a recovery waits for; "" if that is a snapshot or servers."""

    def hands_over(self, view: View) -> bool:
        """True if the generation of `view` goes on from a version that workers reached: reports of steps before it
        still count."""


@dataclass(slots=True)
class ServersHoldState:
    """Servers hold the state. A shard is lost if its primary dies while no backup has caught up."""

    no_snapshot: str = NO_SNAPSHOT
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

    def writer_of(self, shard: int, writers: Sequence[str], view: View) -> str:
        return view.primary[shard]

    def awaited(self, members: Membership, terms: Terms) -> str:
        return ""

    def hands_over(self, view: View) -> bool:
        return False


@dataclass(slots=True)
class WorkersHoldState:
    """Workers hold the model and the optimizer's state; servers only average."""

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
        return 0  # there is nothing on a server that could be lost, or filled

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

    def writer_of(self, shard: int, writers: Sequence[str], view: View) -> str:
        return writers[shard % len(writers)]

    def awaited(self, members: Membership, terms: Terms) -> str:
        if not self.holders.reached or not members.servers:
            return ""
        return f"workers to go on with the state that is here (at least {terms.workers_min} are wanted)"

    def hands_over(self, view: View) -> bool:
        return not view.origin
