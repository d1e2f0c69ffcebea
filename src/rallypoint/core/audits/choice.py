"""Which contributions are audited, and by whom: pure functions of the job's record and the view.

Workers and servers both compute them, so no message begins an audit. Example with ``audit=0.01``: about one in a
hundred (step, replica) is audited. Its owner sends it as a leaf of its own (I3: the sum has the same bytes). Another
worker of that step computes the same replica after its own ones, and sends it too. Servers compare the two.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from hashlib import blake2b

from rallypoint.core.view import View

_ALL = 1 << 64


@dataclass(frozen=True, slots=True)
class Audits:
    """The audits of one job: a `share` of its contributions, chosen by `seed`. `replicas`: R."""

    seed: int
    share: float
    replicas: int

    def audited(self, step: int, replica: int) -> bool:
        """True if this contribution is audited, whoever is here."""
        return _drawn(self.seed, step, replica) < self.share * _ALL

    def chosen(self, step: int) -> tuple[int, ...]:
        """The replicas of `step` that are audited, ascending."""
        return tuple(replica for replica in range(self.replicas) if self.audited(step, replica))

    def auditor(self, view: View, step: int, replica: int) -> str:
        """The worker that computes this replica once more; "" if nobody but its owner computes at that step."""
        return self.another(view, step, replica, {owner(view, step, replica)})

    def another(self, view: View, step: int, replica: int, but: Container[str]) -> str:
        """A worker that computes at `step` and is not among `but`; "" if there is none.

        One on another host than the replica's owner, if possible. Else all are equally likely.
        """
        hosts = {member.id: member.host for member in view.workers}
        home = hosts.get(owner(view, step, replica))
        able = [worker for worker in computing(view, step) if worker not in but]
        return min(able, default="", key=lambda w: (hosts.get(w) == home, _drawn(self.seed, step, replica, w), w))

    def duties(self, view: View, worker: str, step: int) -> tuple[int, ...]:
        """The replicas of `step` that `worker` computes for others: as auditor, or as the third of a dispute."""
        named = {d.replica for d in view.disputes if d.step == step and d.third == worker}
        audits = {r for r in self.chosen(step) if self.auditor(view, step, r) == worker}
        return tuple(sorted((named | audits) - set(view.replicas_of(worker, step))))

    def may_contribute(self, view: View, worker: str, step: int, replicas: Iterable[int]) -> bool:
        """True if servers hear `worker` on these replicas although they are not its own.

        Also from who is not the auditor in this view: it may have been when it sent that, and counts it as delivered.
        """
        return worker in view.contributors and all(self.audited(step, replica) for replica in replicas)


def owner(view: View, step: int, replica: int) -> str:
    """The worker that the view assigns this replica to; "" if there is none."""
    return next((worker for worker, own in view.assigned(step).items() if replica in own), "")


def computing(view: View, step: int) -> list[str]:
    """The workers with replicas at `step`, ascending: they have its version, and can compute others of it."""
    return sorted(worker for worker, own in view.assigned(step).items() if own)


def _drawn(seed: int, step: int, replica: int, worker: str = "") -> int:
    """A number below 2^64 that looks random."""
    named = f"{seed} {step} {replica} {worker}".encode()
    return int.from_bytes(blake2b(named, digest_size=8, person=b"audit").digest())
