"""For AllReduce: which workers have the model's state, and when a worker without it needs a new generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.view import Assignment, View


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
        if not before.ending:  # then all follow
            having &= _assigned(before.assignments[-1:])
        wanted = _assigned(assignments) | (members.present if ending else set())
        return not wanted <= having


def _assigned(assignments: Iterable[Assignment]) -> set[str]:
    return {worker for assignment in assignments for worker, own in assignment.replicas.items() if own}
