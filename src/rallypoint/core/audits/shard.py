"""The machine of a shard in a job with audits: it adds an audited contribution when two workers agree on its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.audits.opinions import Opinions
from rallypoint.core.policy import Verdict
from rallypoint.core.shard import events
from rallypoint.core.shard.effects import Effect
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.view import View


@dataclass(slots=True)
class AuditedShard(ShardMachine):
    """The state of one shard. A contribution with a digest is audited."""

    opinions: Opinions = field(default_factory=Opinions)

    def viewed(self, view: View) -> list[Effect]:
        """A new view is in force here. Call it after `Assigned`."""
        self.opinions.view = view
        effects: list[Effect] = []
        for decided, accepted in self.opinions.settle(self.version):
            effects += decided if accepted is None else [*decided, *ShardMachine._contribute(self, accepted)]
        return effects

    def _contribute(self, event: events.Contribute) -> list[Effect]:
        if not event.digest or not self._takes(event):
            return ShardMachine._contribute(self, event)
        effects, accepted = self.opinions.hear(event)
        return effects if accepted is None else [*effects, *ShardMachine._contribute(self, accepted)]

    def _takes(self, event: events.Contribute) -> bool:
        """False if it would be dropped anyway."""
        if not self.primary or self.version < 0 or self._sum.fault(event):
            return False
        return self.policy.admit(self, event.step, event.replica) is Verdict.ADD and not self._sum.covers(event)

    def _forget_step(self) -> list[Effect]:
        return [*self.opinions.clear(), *ShardMachine._forget_step(self)]

    def validate(self) -> None:
        """Raise AssertionError, with a sentence, if the machine is in a state that it can never reach."""
        ShardMachine.validate(self)
        assert self.primary or not len(self.opinions), "a backup holds opinions"
        assert not any(self._sum.knows(replica) for replica in self.opinions._of), "an opinion on what is accepted"
