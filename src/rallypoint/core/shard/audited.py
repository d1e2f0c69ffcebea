"""A shard in a job with audits: it adds an audited contribution when two workers agree on its bytes.

A contribution is *accepted* when two workers have sent the same bytes: the second one's are added. Of what came before
only the digest is kept. Example: worker a owns replica 3, b audits it.

    a: x   b: x            accepted: x, as b has sent it
    a: x   b: y            disputed: the coordinator names a third worker, c
    a: x   b: y   c: x     accepted: x, as c has sent it; b has lost
    a: x   b: y   c: z     disputed by three: the job stops

Where nobody can audit the owner, what it sends is accepted. The same rules are good after each death: whoever becomes
owner or auditor gives an opinion of its own. Opinions of workers on unlike machines are no reason for a dispute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rallypoint.core.audits import peers
from rallypoint.core.policy import Verdict
from rallypoint.core.shard.effects import Accepted, Disputed, Drop, Effect
from rallypoint.core.shard.events import Contribute
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.view import View

MOST = 8  # opinions on one contribution that are kept: workers that died give room to others


class Opinion(NamedTuple):
    """What a worker has sent: two agree if all but `kernels` is equal. `kernels` names its kind of machine."""

    digest: bytes
    weight: float
    finite: bool
    whole: bool
    kernels: bytes


@dataclass(slots=True)
class Opinions:
    """The opinions on contributions to one shard's step in progress that are not accepted yet.

    `accepted` counts the contributions that two workers have agreed on; `lost` those of them that others had computed
    otherwise.
    """

    view: View | None = None
    accepted: int = 0
    lost: int = 0
    _of: dict[int, dict[str, Opinion]] = field(default_factory=dict)  # by replica and worker

    @property
    def replicas(self) -> list[int]:
        return sorted(self._of)

    def hear(self, event: Contribute) -> tuple[bool, list[Effect]]:
        """A worker has sent a contribution. Returns whether to add it, and effects.

        What a worker sends again takes the place of what it has sent before.
        """
        opinion = Opinion(event.digest, event.weight, event.finite, event.whole, self._kernels(event.sender))
        known = self._of.setdefault(event.replica, {})
        known.pop(event.sender, None)
        if len(known) >= MOST:
            del known[next(iter(known))]
        known[event.sender] = opinion
        agreed = tuple(sorted(worker for worker, its in known.items() if its[:-1] == opinion[:-1]))
        others = tuple(sorted(
            worker for worker, its in known.items() if worker not in agreed and its.kernels == opinion.kernels
        ))  # fmt: skip
        if len(agreed) > 1 or (not others and self._is_alone(event)):
            del self._of[event.replica]
            self.accepted += len(agreed) > 1
            self.lost += bool(others)
            return True, [Accepted(event.step, event.replica, agreed, others)]
        if others and self._is_enough(event):
            del self._of[event.replica]
            return True, []
        heard = tuple(sorted((event.sender, *others)))
        disputed = [Disputed(event.step, event.replica, heard)] if others else []
        return False, [Drop(event.ticket), *disputed]

    def clear(self) -> None:
        self._of.clear()

    def _kernels(self, worker: str) -> bytes:
        members = () if self.view is None else self.view.workers
        return next((member.kernels for member in members if member.id == worker), b"")

    def _is_alone(self, event: Contribute) -> bool:
        """True if it comes from the replica's owner, and nobody is there who can audit that."""
        view = self.view
        if view is None or view.owner(event.step, event.replica) != event.sender:
            return False
        return peers(view, event.step, event.sender) == [event.sender]

    def _is_enough(self, event: Contribute) -> bool:
        """True if nobody can decide, and the owner's is to be taken: see `Dispute`."""
        view = self.view
        if view is None or view.owner(event.step, event.replica) != event.sender:
            return False
        named = (event.step, event.replica, "")
        return any((dispute.step, dispute.replica, dispute.third) == named for dispute in view.orders.disputes)


@dataclass(slots=True)
class AuditedShard(ShardMachine):
    """The state of one shard. A contribution with a digest is audited. `opinions.view` is the view in force."""

    opinions: Opinions = field(default_factory=Opinions)

    def _contribute(self, event: Contribute) -> list[Effect]:
        if not event.digest or not self._takes(event):
            return ShardMachine._contribute(self, event)
        accepted, effects = self.opinions.hear(event)
        return [*effects, *ShardMachine._contribute(self, event)] if accepted else effects

    def _takes(self, event: Contribute) -> bool:
        """False if it would be dropped anyway."""
        if not self.primary or self.version < 0 or self._sum.fault(event):
            return False
        verdict = self.policy.admit(self, event.step, event.replica - self.lowest)
        return verdict is Verdict.ADD and not self._sum.covers(event)

    def _forget_step(self) -> list[Effect]:
        self.opinions.clear()
        return ShardMachine._forget_step(self)

    def validate(self) -> None:
        ShardMachine.validate(self)
        assert self.primary or not self.opinions.replicas, "a backup has opinions"
        assert not any(map(self._sum.knows, self.opinions.replicas)), "opinions on what is accepted"
