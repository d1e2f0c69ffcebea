"""Pinned assignments: each worker has one replica, and nobody else computes it (`rp.wrap`).

A script's own loop has its own batches, so a replica whose worker is gone waits until a process takes its place: one of
the same name, or one that has no replica. Example: R = 3, w0 to w2 have replicas 0 to 2. w1 is gone: nobody computes.
w3 comes: it has replica 1, and the others keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rallypoint.core.view import Assignment, Member, View

Pins = Mapping[int, str]  # replica -> the worker that has it, or had it last


def pinned_assignments(pins: Pins, workers: Sequence[str], replicas: int) -> tuple[Assignment, ...]:
    """Give each of `workers` its replica: the one it has in `pins`, or else the lowest that none of them has.

    Nobody computes unless there is a worker for each replica: then the result is empty.
    """
    if len(workers) < replicas:
        return ()
    kept = {worker: replica for replica, worker in sorted(pins.items()) if worker in workers and replica < replicas}
    free = iter(replica for replica in range(replicas) if replica not in kept.values())
    new = sorted((worker for worker in workers if worker not in kept), key=lambda name: (len(name), name))
    given = kept | dict(zip(new, free, strict=False))
    return (Assignment(0, {worker: (given[worker],) for worker in sorted(given)}),)


def pins_after(pins: Pins, view: View) -> dict[int, str]:
    """The pins after this view: where nobody computes, who may still contribute keeps its replica."""
    known = dict(pins) | {own[0]: worker for worker, own in view.contributors.items() if len(own) == 1}
    for assignment in view.assignments:
        known.update({own[0]: worker for worker, own in assignment.replicas.items() if own})
    return known


def lost_place(view: View, me: str, replica: int) -> str:
    """A sentence why `me`, which has computed `replica`, cannot go on; "" if it can, or may get it back."""
    own = view.replicas_of(me, 0)
    if not view.assigned(0) or own == (replica,):
        return ""
    other = next((worker for worker, its in view.assigned(0).items() if replica in its), "nobody")
    return f"replica {replica} is computed by {other} now, who took its place while {me} was given up"


def lost_step(position: int, replica: int, step: int, its: int) -> str:
    """A sentence why a loop that is at `position` cannot go on with (`step`, `its` replica); "" if it can.

    It can send its gradient of `position` again, or begin the next step: its data is there.
    """
    if its != replica:
        return f"this process has computed replica {replica}, and is to compute replica {its}"
    if step in (position, position + 1):
        return ""
    where = "has gone back" if step < position else "has gone on"
    return f"the job {where} to step {step}, and this process is at step {position}"


# Which aggregator each worker uses: one that was started near the same place.


def nearest_aggregators(
    workers: Iterable[Member], aggregators: Iterable[Member], assigned: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Worker -> the aggregator that it may use, for all workers that have one near them.

    A worker uses the aggregators whose `near` is its own. (Who was started without one is near all others without.) If
    there are several, each gets as many workers, with neighbouring replicas (I3): of 4 workers with 2 replicas each and
    2 aggregators, the first gets the replicas 0..3. `assigned`: worker -> its replicas.
    """
    places: dict[str, list[str]] = {}
    for aggregator in aggregators:
        places.setdefault(aggregator.near, []).append(aggregator.id)
    at: dict[str, list[str]] = {}
    for member in workers:
        at.setdefault(member.near, []).append(member.id)
    found: dict[str, str] = {}
    for place, here in places.items():
        near = at.get(place, [])
        near.sort(key=lambda worker: (not assigned.get(worker), assigned.get(worker, ()), worker))
        for index, worker in enumerate(near):
            found[worker] = sorted(here)[index * len(here) // len(near)]
    return found


# Until when a worker may contribute what was assigned to it earlier, and is somebody else's by now.


LATE = 8  # steps: so late a report of a replica that its worker has no more is still believed
_STEADY = 10.0  # heartbeats after which a coordinator that took over knows which step is in progress
_NEVER = 1 << 62


@dataclass(slots=True)
class Lately:
    """Attributes:
    until: the step until which anything counts that was assigned before the newest assignment.
    """

    until: int = _NEVER
    _steady: float = 0.0  # the time (s) from which on the step in progress is known

    def begins(self, now: float, heartbeat: float) -> None:
        """A coordinator begins at time `now` (s). Who takes over has to hear the step in progress: it has a
        `heartbeat`, and others have 0."""
        self._steady = now + _STEADY * heartbeat

    def published(self, view: View, before: View | None, known: int, now: float) -> None:
        """`view` follows `before`, at time `now` (s), while `known` is the highest step that is known to be reached."""
        if before is None or (view.contributors, view.assignments) != (before.contributors, before.assignments):
            last = view.assignments[-1].start if view.assignments else 0
            self.until = max(known, last) if now >= self._steady else _NEVER

    def over(self, applied: int) -> bool:
        """True if no server takes a contribution any more that was assigned before the newest assignment, as `applied`
        is the highest step that a server has applied: the other shards are at most one step behind it."""
        return applied > self.until + LATE
