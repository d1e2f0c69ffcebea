"""Pinned assignments: each worker has one replica, and nobody else computes it (`rp.wrap`).

A script's own loop has its own batches, so a replica whose worker is gone waits until a process takes its place: one of
the same name, or one that has no replica. Example: R = 3, w0 to w2 have replicas 0 to 2. w1 is gone: nobody computes.
w3 comes: it has replica 1, and the others keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.core.view import Assignment, View

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
