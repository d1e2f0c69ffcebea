"""Which steps are audited, and who audits whom: pure functions of the job's record and the view.

Workers and servers both compute them, so no message begins an audit. Example with ``audit=0.01``: about one step in a
hundred is audited. In such a step every worker sends each replica as a leaf of its own (I3: the sum has the same
bytes), and computes as many replicas of other workers after its own. Servers compare the two.

All replicas of a step, and not a replica now and then: a step takes as long as the worker with the most to do. So the
share of time that audits take is `audit` itself, whatever the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from hashlib import blake2b

from rallypoint.core.view import View

_ALL = 1 << 64


@dataclass(frozen=True, slots=True)
class Audits:
    """The audits of one job: of a `share` of its steps, chosen by `seed`. `replicas`: R."""

    seed: int
    share: float
    replicas: int

    def audited(self, step: int) -> bool:
        """True if the contributions to this step are audited, whoever is here."""
        return _drawn(self.seed, step) < self.share * _ALL

    def auditor(self, view: View, step: int, replica: int) -> str:
        """The worker that computes this replica once more; "" if nobody computes at that step who can audit its owner.

        One on another host, if no host has more than half of the replicas. Each worker audits as many replicas as it
        has, where none has more than half of them: the replica's place among all, shifted by a random distance. (Of
        workers of several kinds, each kind is dealt with by itself.)
        """
        home = view.owner(step, replica)
        if len(able := peers(view, step, home)) < 2:
            return ""
        hosts = {member.id: member.host for member in view.workers}
        assigned = view.assigned(step)
        places = sorted((hosts.get(worker, ""), worker, r) for worker in able for r in assigned[worker])
        for kind in (0, 1):
            most = max(Counter(place[kind] for place in places).values(), default=0)
            if 2 * most <= len(places):
                shift = most + _drawn(self.seed, step, "shift") % (len(places) - 2 * most + 1)
                at = next(i for i, place in enumerate(places) if place[2] == replica)
                return places[(at + shift) % len(places)][1]
        return self.another(view, step, replica, {home})

    def another(self, view: View, step: int, replica: int, but: Container[str]) -> str:
        """A worker that computes at `step`, can audit the replica's owner, and is not among `but`; "" if there is none.

        One on another host than the replica's owner, if possible. Else all are equally likely.
        """
        hosts = {member.id: member.host for member in view.workers}
        home = hosts.get(owner := view.owner(step, replica))
        able = [worker for worker in peers(view, step, owner) if worker not in but]
        drawn = {worker: _drawn(self.seed, step, f"{replica} {worker}") for worker in able}
        return min(able, default="", key=lambda worker: (hosts.get(worker) == home, drawn[worker]))

    def duties(self, view: View, worker: str, step: int) -> tuple[int, ...]:
        """The replicas of `step` that `worker` computes for others: as auditor, or as the third of a dispute."""
        named = {d.replica for d in view.orders.disputes if d.step == step and d.third == worker}
        if self.audited(step):
            named |= {r for r in range(self.replicas) if self.auditor(view, step, r) == worker}
        return tuple(sorted(named - set(view.replicas_of(worker, step))))

    def may_contribute(self, view: View, worker: str, step: int) -> bool:
        """True if servers hear `worker` on any replica of this step.

        Also on one that it does not audit in this view: it may have audited it when it sent that, and counts it as
        delivered.
        """
        return worker in view.contributors and self.audited(step)


def computing(view: View, step: int) -> list[str]:
    """The workers with replicas at `step`, ascending: they have its version, and can compute others of it."""
    return sorted(worker for worker, own in view.assigned(step).items() if own)


def alike(view: View, worker: str) -> set[str]:
    """The workers of the view whose machines give the same bytes for a probe as this one's, itself included."""
    kernels = {member.id: member.kernels for member in view.workers}
    return {other for other, its in kernels.items() if its == kernels.get(worker)}


def peers(view: View, step: int, worker: str) -> list[str]:
    """The workers that compute at `step` and can audit each other and `worker`, ascending."""
    return sorted(alike(view, worker).intersection(computing(view, step)))


def _drawn(seed: int, step: int, what: str = "") -> int:
    """A number below 2^64 that looks random."""
    return int.from_bytes(blake2b(f"{seed} {step} {what}".encode(), digest_size=8, person=b"audit").digest())
