"""Before which step shards change their servers, and which workers are warm: so that nobody waits for either.

A shard that is to move is copied in the background, as the backup of its primary. When all that move have caught up,
they change their primaries in one view. What workers have sent to the old primaries of the step in progress would be
lost by that, and computed once more. So the view before it says a step that nobody has begun yet (`orders.handover`):
workers compute what is before it, and wait. Each says when it holds this version. When all who compute do, nothing is
on its way, and the shards move: no link has to end. The wait is one message to the coordinator and one back. If one
does not say it two seconds after another, shards move all the same, and some replicas may be computed once more.
Shards of a server that leaves do so after ten seconds in any case: its machine may be about to go.

A worker that joins has to fetch all parameters first. If it were given replicas at once, the others would wait for it.
So it is told to fetch versions (`orders.warming`), says when it holds one, and then gets replicas. A worker that takes
over from one that is gone gets them at once, as ever: others wait for these in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.view import View

_AHEAD = 2  # steps after the furthest one known: no worker has begun that step yet
_PATIENCE_S = 2.0
_LEAVING_S = 10.0  # of 30 s, which clouds and Kubernetes give at least


@dataclass(slots=True)
class Handover:
    """What workers have said in this generation.

    Attributes:
        reached: worker -> the highest version that it holds, of those that were asked for.
        warm: the workers that have held a version.
    """

    reached: dict[str, int] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)
    _asked: dict[str, int] = field(default_factory=dict)  # cold worker -> the step that was known when it came
    _first: tuple[int, float] | None = None  # the step before which shards move, and when the first worker was there
    _leaving_at: float | None = None  # when a server that leaves began to wait for such a step

    def restart(self) -> None:
        """A new generation begins."""
        self.reached.clear()
        self.warm.clear()
        self._asked.clear()
        self._first = self._leaving_at = None

    def forget(self, worker: str) -> None:
        self.warm.discard(worker)
        self._asked.pop(worker, None)
        self.reached.pop(worker, None)

    def says(self, worker: str, version: int, view: View) -> None:
        """A worker says that it holds this version. More than the view asks for counts as that."""
        # An older one than servers have now (two of them) is what it held when it came. The higher of these two may be
        # one that `known` expects, and that comes at the end of a long step.
        if worker in view.orders.warming and version + 1 >= self._asked.get(worker, 0):
            self.warm.add(worker)
        if view.orders.handover is not None:
            self.reached[worker] = max(self.reached.get(worker, -1), min(version, view.orders.handover))

    def hurries(self, view: View, leaving: Collection[str], now: float) -> bool:
        """True if a server that leaves has waited too long for the step before which its shards move."""
        if view.orders.handover is None or view.holders.isdisjoint(leaving):
            self._leaving_at = None
            return False
        self._leaving_at = now if self._leaving_at is None else self._leaving_at
        return now >= self._leaving_at + _LEAVING_S

    def before(
        self, view: View, known: int, computing: Sequence[str], ends: Sequence[int | None], now: float
    ) -> int | None:
        """The step before which shards move that all have caught up; None: they move now.

        `known`: the highest step that is known to be reached. `computing`: the workers that compute. `ends`: steps that
        will not be computed for now (a pause, the job's end); None counts for none. `now` is in seconds.
        """
        wanted = known + _AHEAD if view.orders.handover is None else view.orders.handover
        at = min([wanted, *(end for end in ends if end is not None)])
        there = [worker for worker in computing if self.reached.get(worker, -1) >= at]
        if there and (self._first is None or self._first[0] != at):
            self._first = at, now
        late = self._first is not None and self._first[0] == at and now >= self._first[1] + _PATIENCE_S
        return None if len(there) == len(computing) or (there and late) else at

    def all_there(self, view: View, computing: Sequence[str], ends: Sequence[int | None]) -> bool:
        """True if shards are to move before a step, and all workers that compute hold its version."""
        if view.orders.handover is None:
            return False
        at = min([view.orders.handover, *(end for end in ends if end is not None)])
        return all(self.reached.get(worker, -1) >= at for worker in computing)

    def cold(self, active: Sequence[str], assigned: Mapping[str, tuple[int, ...]], known: int) -> list[str]:
        """The active workers that are to fetch a version before they get replicas. `assigned`: who has which now;
        `known`: the highest step that is known to be reached.

        None of them if there is nobody to compute meanwhile, or if a worker that had replicas is gone.
        """
        found = [worker for worker in active if worker not in assigned and worker not in self.warm] if assigned else []
        if not found:
            return []
        here = set(active)
        for worker in found:
            self._asked.setdefault(worker, known)
        return [] if any(own for worker, own in assigned.items() if worker not in here) else found
