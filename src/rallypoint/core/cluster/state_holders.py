"""Who carries the state of a job whose workers are stateful (AllReduce), and when somebody has to be given it.

Servers have none of it there, so nothing moves between them either: whenever a worker that has not the state is to take
part, or servers come or go, all begin again in a new view from what one worker brings. It loses the step in progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.view import Assignment, Member, View


@dataclass(slots=True)
class StateHolders:
    """What the coordinator knows of the state's whereabouts.

    Attributes:
        reached: the workers that have the state, each with the furthest step that it has reported: it is at that
            version, or at a later one.
        moved: a replica has been dealt since all began: the servers may have passed the version they began with, and
            who was not following then cannot any more.
        safe: the version that all begin with is whole on the servers, or in a snapshot.
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
        """`worker` has brought the first weights, so it has the state; not all may have come to the servers yet."""
        self.reached.setdefault(worker, 0)

    def begin(self, *, safe: bool) -> None:
        """All begin again."""
        self.moved, self.safe = False, safe

    def uploader(self, *preferred: Iterable[str]) -> str:
        """The worker that is to bring the state: the furthest of the first of these groups that has it; "" if none."""
        for among in preferred:
            if having := [worker for worker in among if worker in self.reached]:
                return max(having, key=lambda worker: (self.reached[worker], worker))
        return ""

    def needs_new_generation(
        self, before: View, assignments: Sequence[Assignment], workers: Mapping[str, Member], servers: Mapping[str,
            Member],
        present: Iterable[str], *, ending: bool,
    ) -> bool:  # fmt: skip
        """May a view with these deals and members not simply follow `before`?

        A worker has the state for sure if it has been dealt replicas in every view since all began, up to the last deal
        of each: such a one has never stopped to follow.
        """
        if set(before.servers) != set(servers.values()):
            return True
        if not self.moved:
            return False
        having = {member.id for member in before.workers if workers.get(member.id) == member}
        if not before.ending:  # then all follow
            having &= _assigned(before.assignments[-1:])
        wanted = _assigned(assignments) | (set(present) if ending else set())
        return not wanted <= having


def _assigned(assignments: Iterable[Assignment]) -> set[str]:
    return {worker for assignment in assignments for worker, own in assignment.replicas.items() if own}
