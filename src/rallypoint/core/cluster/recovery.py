"""Two strategies for lost state: who holds the model's state, and how the job goes on when some of it is lost.

`ServersHoldState`: each shard is on its server. If it is lost with it, the job goes back to the last snapshot.
`WorkersHoldState` (AllReduce): each worker has the whole state, and servers have none. A new generation begins when a
worker without the state is to take part, or when servers come or go: one worker uploads the state, and all others start
from it. The step in progress is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.view import Assignment, View
from rallypoint.errors import NO_SNAPSHOT


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """Go back to the newest snapshot; `lost` is the sentence that says what was lost."""

    lost: str


@dataclass(frozen=True, slots=True)
class FromWorker:
    """Go on from `version`: the worker `uploader` has it and uploads it."""

    uploader: str
    version: int


Plan = FromSnapshot | FromWorker | None  # None: wait until more members have joined


@dataclass(slots=True)
class ServersHoldState:
    """Servers hold the state. A shard is lost if its primary dies while no backup has caught up.

    Attributes:
        reached: worker that has the state -> the highest step that it has reported. Its model is at that version or
            a later one.
    """

    reached: dict[str, int] = field(default_factory=dict)
    no_snapshot: str = NO_SNAPSHOT  # why the job ends, if the state is lost and there is no snapshot
    workers_end_it: bool = False  # True if a worker that joins can end a recovery; a server always can
    workers_store: bool = False  # True if workers write snapshots instead of servers

    def recovered(self, reached: Mapping[str, int], *, moved: bool) -> None:
        """Take over `reached` from the journal; `moved`: a step may have been computed in this generation."""

    def replication(self, wanted: int) -> int:
        """The number of servers that hold each shard, where the terms ask for `wanted`. 0: a server's shards cannot be
        given to another one before the next generation."""
        return wanted

    def exposed(self, shards: int) -> int:
        """The number of shards that the loss of one server could lose; `shards` have no backup that has caught up."""
        return shards

    def has(self, worker: str, version: int) -> bool:
        """`worker` reports that it has reached `version`. Returns True if the journal has to be written."""
        return False

    def gone(self, worker: str) -> bool:
        """`worker` is gone. Returns True if the journal has to be written."""
        return False

    def uploaded(self, worker: str) -> None:
        """`worker` has uploaded the first weights: it has the state. The servers may not have all of it yet."""

    def begins(self, *, stored: bool) -> None:
        """A new generation begins; `stored`: it starts from a snapshot."""

    def published(self, view: View) -> None:
        """`view` is in force."""

    def ends_with(self, worker: str, view: View) -> bool:
        """True if the loss of `worker` has lost the state with which the generation of `view` begins."""
        return False

    def needs_new_generation(
        self, before: View, assignments: Sequence[Assignment], members: Membership, *, ending: bool
    ) -> bool:
        """True if a view with these assignments and members needs a new generation, instead of following `before`."""
        return False

    def plan(self, members: Membership, active: Sequence[str], computing: Sequence[str]) -> Plan:
        """How the job goes on after a loss. `active`: the workers that may compute; `computing`: those that did."""
        return FromSnapshot("parameters are lost with their servers: going back to the last snapshot")

    def first_writers(self, uploader: str, servers: Sequence[str]) -> list[str]:
        """The members that write the snapshot of version 0."""
        return list(servers)

    def writers(self, servers: Sequence[str], computing: Sequence[str]) -> list[str]:
        """The members that write any later snapshot."""
        return list(servers)

    def writer_of(self, shard: int, writers: Sequence[str], view: View) -> str:
        """The one of a snapshot's writers that stores this shard."""
        return view.primary[shard]

    def awaited(self, members: Membership, terms: Terms) -> str:
        """A phrase for what a recovery waits for; "" if that is a snapshot or servers."""
        return ""

    def hands_over(self, view: View) -> bool:
        """True if the generation of `view` goes on from a version that workers reached: reports of steps before it
        still count."""
        return False


@dataclass(slots=True)
class WorkersHoldState(ServersHoldState):
    """Workers hold the model and the optimizer's state; servers only average.

    Attributes:
        moved: a replica has been assigned in this generation. The servers may be past its first version, and a worker
            that did not follow from the start cannot get that version any more.
        safe: the first version of this generation is complete on the servers, or in a snapshot.
    """

    no_snapshot: str = (
        "no worker is left that has the model's state, and there is no snapshot to go back to: use more workers, or "
        "set snapshots to every so many seconds"
    )
    workers_end_it: bool = True
    workers_store: bool = True
    moved: bool = True
    safe: bool = False

    def recovered(self, reached: Mapping[str, int], *, moved: bool) -> None:
        self.reached, self.moved = dict(reached), moved

    def replication(self, wanted: int) -> int:
        return 0  # there is nothing on a server that could be lost, or filled

    def exposed(self, shards: int) -> int:
        return 0

    def has(self, worker: str, version: int) -> bool:
        new = worker not in self.reached
        self.reached[worker] = max(version, self.reached.get(worker, -1))
        self.safe = True
        return new

    def gone(self, worker: str) -> bool:
        return self.reached.pop(worker, -1) >= 0

    def uploaded(self, worker: str) -> None:
        self.reached.setdefault(worker, 0)

    def begins(self, *, stored: bool) -> None:
        self.moved, self.safe = False, stored

    def published(self, view: View) -> None:
        self.moved = self.moved or bool(view.assignments)

    def ends_with(self, worker: str, view: View) -> bool:
        return worker == view.uploader and not self.safe

    def needs_new_generation(
        self, before: View, assignments: Sequence[Assignment], members: Membership, *, ending: bool
    ) -> bool:
        """A worker certainly has the state if it had replicas in the last assignment of every view of this generation:
        then it has followed all the time."""
        if set(before.servers) != set(members.servers.values()):
            return True
        if not self.moved:
            return False
        having = {member.id for member in before.workers if members.workers.get(member.id) == member}
        if not before.orders.ending:  # then all follow
            having &= _assigned(before.assignments[-1:])
        wanted = _assigned(assignments) | (members.present if ending else set())
        return not wanted <= having

    def uploader(self, *preferred: Iterable[str]) -> str:
        """Choose the worker that uploads the state: the one with the highest step in the first group that has any.

        Returns "" if no worker in any group has the state.
        """
        for among in preferred:
            if having := [worker for worker in among if worker in self.reached]:
                return max(having, key=lambda worker: (self.reached[worker], worker))
        return ""

    def plan(self, members: Membership, active: Sequence[str], computing: Sequence[str]) -> Plan:
        uploader = self.uploader(computing, active, members.present)
        if not members.servers or (uploader and not active):
            return None
        if not uploader:
            lost = "the model's state is lost with the workers that had it: going back to the last snapshot"
            return FromSnapshot(lost)
        return FromWorker(uploader, self.reached[uploader])

    def first_writers(self, uploader: str, servers: Sequence[str]) -> list[str]:
        return [uploader]

    def writers(self, servers: Sequence[str], computing: Sequence[str]) -> list[str]:
        return list(computing)

    def writer_of(self, shard: int, writers: Sequence[str], view: View) -> str:
        return writers[shard % len(writers)]

    def awaited(self, members: Membership, terms: Terms) -> str:
        if not self.reached or not members.servers:
            return ""
        return f"workers to go on with the state that is here (at least {terms.workers_min} are wanted)"

    def hands_over(self, view: View) -> bool:
        return not view.origin


def _assigned(assignments: Iterable[Assignment]) -> set[str]:
    return {worker for assignment in assignments for worker, own in assignment.replicas.items() if own}
