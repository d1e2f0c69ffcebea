"""What workers have computed of audited contributions, on the server that holds the shard.

A contribution is *accepted* when two workers have sent the same bytes. Example: worker a owns replica 3, b audits it.

    a: x   b: x            accepted: x
    a: x   b: y            disputed: the coordinator names a third worker, c
    a: x   b: y   c: y     accepted: y; a has lost, and what it sent is dropped
    a: x   b: y   c: z     disputed by three: the job stops

With one worker only nobody can audit: what it sends is accepted. The same rule is good after each death: whoever
becomes owner or auditor gives an opinion of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rallypoint.core.audits.choice import computing, owner
from rallypoint.core.shard.effects import Accepted, Disputed, Drop, Effect, Hold
from rallypoint.core.shard.events import Contribute
from rallypoint.core.view import View

MOST = 8  # opinions on one contribution that are kept: workers that die give room to others


@dataclass(slots=True)
class Opinions:
    """The audited contributions of one shard's step in progress that are not accepted yet."""

    view: View | None = None
    _of: dict[int, dict[str, Contribute]] = field(default_factory=dict)  # by replica and worker

    def __len__(self) -> int:
        """How many payloads are kept."""
        return sum(map(len, self._of.values()))

    def hear(self, event: Contribute) -> tuple[list[Effect], Contribute | None]:
        """A worker has sent a contribution. Returns effects, and the contribution to add if one is accepted now.

        What a worker sends again takes the place of what it has sent before.
        """
        known = self._of.setdefault(event.replica, {})
        effects: list[Effect] = []
        if (before := known.pop(event.sender, None)) is not None:
            effects.append(Drop(before.ticket))
        elif len(known) >= MOST:
            effects.append(Drop(known.pop(next(iter(known))).ticket))
        known[event.sender] = event
        accepted, decided = self._decide(event.replica, event.step)
        if accepted is not event:
            effects.append(Hold(event.ticket, credit=True))  # nobody may wait for credit to send another opinion
        return [*effects, *decided], accepted

    def settle(self, step: int) -> Iterator[tuple[list[Effect], Contribute | None]]:
        """A new view is in force: decide again. Yields the same as `hear`, for each contribution."""
        for replica in sorted(self._of):
            accepted, decided = self._decide(replica, step)
            yield decided, accepted

    def clear(self) -> list[Effect]:
        """Forget all of them."""
        dropped: list[Effect] = [Drop(one.ticket) for known in self._of.values() for one in known.values()]
        self._of.clear()
        return dropped

    def _decide(self, replica: int, step: int) -> tuple[Contribute | None, list[Effect]]:
        known = self._of[replica]
        groups: dict[tuple[bytes, float, bool, bool], list[str]] = {}
        for worker, one in known.items():
            groups.setdefault((one.digest, one.weight, one.finite, one.whole), []).append(worker)
        chosen = self._chosen(list(groups.values()), replica, step)
        if not chosen:
            return None, [Disputed(step, replica, tuple(sorted(known)))] if len(groups) > 1 else []
        accepted = known.pop(chosen[0])
        lost = tuple(sorted(worker for worker in known if worker not in chosen))
        dropped: list[Effect] = [Drop(one.ticket) for one in known.values()]
        del self._of[replica]
        return accepted, [*dropped, Accepted(step, replica, tuple(chosen), lost)]

    def _chosen(self, groups: list[list[str]], replica: int, step: int) -> list[str]:
        """The workers whose opinion is accepted; none yet if that is empty."""
        if (agreed := max(groups, key=len)) and len(agreed) > 1:
            return agreed
        if self.view is None:
            return []
        if len(groups) == 1:
            return [] if len(computing(self.view, step)) > 1 else agreed
        if any((d.step, d.replica, d.third) == (step, replica, "") for d in self.view.disputes):
            home = owner(self.view, step, replica)  # by `audit_action`: nobody is there who could decide
            return next((group for group in groups if home in group), agreed)
        return []
