"""What workers have sent of audited contributions, on the server that holds the shard.

A contribution is *accepted* when two workers have sent the same bytes: the second one's are added. Of what came before
only the digest is kept. Example: worker a owns replica 3, b audits it.

    a: x   b: x            accepted: x, as b has sent it
    a: x   b: y            disputed: the coordinator names a third worker, c
    a: x   b: y   c: x     accepted: x, as c has sent it; b has lost
    a: x   b: y   c: z     disputed by three: the job stops

With one worker only nobody can audit: what it sends is accepted. The same rules are good after each death: whoever
becomes owner or auditor gives an opinion of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.audits.choice import computing, owner
from rallypoint.core.shard.effects import Accepted, Disputed, Drop, Effect
from rallypoint.core.shard.events import Contribute
from rallypoint.core.view import View

MOST = 8  # opinions on one contribution that are kept: workers that died give room to others
Opinion = tuple[bytes, float, bool, bool]


@dataclass(slots=True)
class Opinions:
    """The opinions on contributions to one shard's step in progress that are not accepted yet."""

    view: View | None = None
    _of: dict[int, dict[str, Opinion]] = field(default_factory=dict)  # by replica and worker

    @property
    def replicas(self) -> list[int]:
        """The replicas whose contribution waits for another opinion."""
        return sorted(self._of)

    def hear(self, event: Contribute) -> tuple[bool, list[Effect]]:
        """A worker has sent a contribution. Returns whether to add it, and effects.

        What a worker sends again takes the place of what it has sent before.
        """
        opinion = (event.digest, event.weight, event.finite, event.whole)
        known = self._of.setdefault(event.replica, {})
        known.pop(event.sender, None)
        if len(known) >= MOST:
            del known[next(iter(known))]
        known[event.sender] = opinion
        agreed = tuple(sorted(worker for worker, its in known.items() if its == opinion))
        others = tuple(sorted(worker for worker, its in known.items() if its != opinion))
        if len(agreed) > 1 or (not others and self._is_alone(event)):
            del self._of[event.replica]
            return True, [Accepted(event.step, event.replica, agreed, others)]
        if others and self._is_enough(event):
            del self._of[event.replica]
            return True, []
        disputed = [Disputed(event.step, event.replica, tuple(sorted(known)))] if others else []
        return False, [Drop(event.ticket), *disputed]

    def clear(self) -> None:
        """Forget all of them."""
        self._of.clear()

    def _is_alone(self, event: Contribute) -> bool:
        return self.view is not None and computing(self.view, event.step) == [event.sender]

    def _is_enough(self, event: Contribute) -> bool:
        """True if nobody can decide, and the owner's is to be taken: see `Dispute`."""
        if self.view is None or owner(self.view, event.step, event.replica) != event.sender:
            return False
        named = (event.step, event.replica, "")
        return any((dispute.step, dispute.replica, dispute.third) == named for dispute in self.view.disputes)
