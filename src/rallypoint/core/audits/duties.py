"""What a worker computes for audits, and what it adds up of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.audits.choice import Audits, peers
from rallypoint.core.sums.presum import Presum
from rallypoint.core.view import View, ViewNumber


@dataclass(slots=True)
class Duties:
    """What worker `me` computes for others' audits: in a job without audits, nothing."""

    me: str
    replicas: tuple[int, ...] = ()  # of the step in progress

    def plan(self, view: View, step: int, presum: Presum) -> None:
        """A step begins, or a view is in force: plan these replicas, and what is added up."""
        presum.plan(view.replicas_of(self.me, step))

    def takes(self, view: View, step: int, replica: int) -> bool:
        """True if servers take this replica's contribution from this worker."""
        return view.takes(self.me, (replica,))


@dataclass(slots=True)
class AuditDuties(Duties):
    """The same in a job with `audits`. Nothing is added up in a step that is audited."""

    audits: Audits = field(kw_only=True)
    # The step, the view's number, is it alone, replicas to send anyway
    _planned: tuple[int, ViewNumber, bool, frozenset[int]] = (-1, ViewNumber(), False, frozenset())

    def plan(self, view: View, step: int, presum: Presum) -> None:
        """Servers keep digests of what waits for another opinion. So where the opinion that they have is to be enough
        now (this worker is left alone, or nobody can decide a dispute) this worker sends again. So it does if it has
        missed views: in one of them it may not have been enough.
        """
        own = view.replicas_of(self.me, step)
        audited = step >= 0 and self.audits.audited(step)
        self.replicas = self.audits.duties(view, self.me, step) if audited else ()
        presum.plan(() if audited else own)
        alone = audited and peers(view, step, self.me) == [self.me]
        open = frozenset(d.replica for d in view.disputes if d.step == step and not d.third and d.replica in own)
        before, number, was_alone, were_open = self._planned
        self._planned = (step, view.number, alone, open)
        missed = view.number not in (number, ViewNumber(number.epoch, number.count + 1))
        if before == step:
            presum.forget(own if alone and (missed or not was_alone) else open - (frozenset() if missed else were_open))

    def takes(self, view: View, step: int, replica: int) -> bool:
        """True if servers take this replica's contribution from this worker."""
        return self.audits.may_contribute(view, self.me, step) or view.takes(self.me, (replica,))
