"""Which workers have the model's state, where workers hold it (AllReduce), and when somebody has to be given it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.view import Assignment, View


@dataclass(slots=True)
class StateHolders:
    """What the coordinator knows of who has the state.

    Attributes:
        reached: the workers that have the state, each with the furthest step that it has reported: it is at that
            version, or at a later one.
        moved: a replica has been assigned in this generation: the servers may have passed its first version, which a
            worker that does not follow could not get any more.
        safe: the first version of this generation is whole on the servers, or in a snapshot.
    """

    reached: dict[str, int] = field(default_factory=dict)
    moved: bool = True
    safe: bool = False

    def has(self, worker: str, step: int) -> bool:
        """`worker` has computed a replica of `step`; True if nothing was known of it."""
        new = worker not in self.reached
        self.reached[worker] = max(step, self.reached.get(worker, -1))
        self.safe = True
        return new

    def uploaded(self, worker: str) -> None:
        """`worker` has uploaded the first weights, so it has the state; not all may have come to the servers yet."""
        self.reached.setdefault(worker, 0)

    def begin(self, *, safe: bool) -> None:
        """A new generation begins."""
        self.moved, self.safe = False, safe

    def uploader(self, *preferred: Iterable[str]) -> str:
        """Choose the worker that uploads the state: the one with the highest step in the first group that has any.

        "" if none has it.
        """
        for among in preferred:
            if having := [worker for worker in among if worker in self.reached]:
                return max(having, key=lambda worker: (self.reached[worker], worker))
        return ""

    def needs_new_generation(
        self, before: View, assignments: Sequence[Assignment], members: Membership, *, ending: bool
    ) -> bool:
        """May a view with these assignments and members not simply follow `before`?

        A worker surely has the state if it had replicas in every view of this generation, up to the last assignment of
        each: then it has followed all the time.
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
