"""What a worker computes for audits, and what it adds up of a step."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.audits.choice import Audits, peers
from rallypoint.core.sums.presum import Presum
from rallypoint.core.view import View


@dataclass(slots=True)
class Duties:
    """The replicas of one step that worker `me` computes for others' audits. Without `audits` there are none."""

    me: str
    audits: Audits | None = None
    replicas: tuple[int, ...] = ()
    _planned: tuple[int, bool, frozenset[int]] = (-1, False, frozenset())  # step, is it alone, replicas to send anyway

    def plan(self, view: View, step: int, presum: Presum) -> None:
        """A step begins, or a view is in force: plan these replicas, and what is added up, which is nothing in a step
        that is audited.

        Servers keep digests of what waits for another opinion. So where the opinion that they have is to be enough now
        (this worker is left alone, or nobody can decide a dispute) this worker sends again.
        """
        own = view.replicas_of(self.me, step)
        if self.audits is None:
            presum.plan(own)
            return
        audited = step >= 0 and self.audits.audited(step)
        self.replicas = self.audits.duties(view, self.me, step) if audited else ()
        presum.plan(() if audited else own)
        alone = audited and peers(view, step, self.me) == [self.me]
        open = frozenset(d.replica for d in view.disputes if d.step == step and not d.third and d.replica in own)
        before, self._planned = self._planned, (step, alone, open)
        if before[0] == step:
            presum.forget(own if alone and not before[1] else open - before[2])

    def takes(self, view: View, step: int, replica: int) -> bool:
        """True if servers take this replica's contribution from this worker."""
        audited = self.audits is not None and self.audits.may_contribute(view, self.me, step)
        return audited or view.takes(self.me, (replica,))
