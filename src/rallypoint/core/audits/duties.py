"""What a worker computes for audits, and what it adds up of a step."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.audits.choice import Audits
from rallypoint.core.sums.presum import Presum
from rallypoint.core.view import View


@dataclass(slots=True)
class Duties:
    """The replicas of one step that worker `me` computes for others' audits. Without `audits` there are none."""

    me: str
    audits: Audits | None = None
    replicas: tuple[int, ...] = ()

    def plan(self, view: View, step: int, presum: Presum) -> None:
        """A step begins, or a view is in force: plan the replicas, and what is added up: nothing that is audited."""
        own = view.replicas_of(self.me, step)
        if self.audits is not None:
            self.replicas = self.audits.duties(view, self.me, step) if step >= 0 else ()
            own = tuple(replica for replica in own if not self.audits.audited(step, replica))
        presum.plan(own)

    def takes(self, view: View, step: int, replica: int) -> bool:
        """True if servers take this replica's contribution from this worker."""
        audited = self.audits is not None and self.audits.may_contribute(view, self.me, step, (replica,))
        return audited or view.takes(self.me, (replica,))
