"""The machine of a shard in a job with audits: it adds an audited contribution when two workers agree on its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.audits.opinions import Opinions
from rallypoint.core.policy import Verdict
from rallypoint.core.shard import events
from rallypoint.core.shard.effects import Effect
from rallypoint.core.shard.machine import ShardMachine


@dataclass(slots=True)
class AuditedShard(ShardMachine):
    """The state of one shard. A contribution with a digest is audited. `opinions.view` is the view in force."""

    opinions: Opinions = field(default_factory=Opinions)

    def _contribute(self, event: events.Contribute) -> list[Effect]:
        if not event.digest or not self._takes(event):
            return ShardMachine._contribute(self, event)
        accepted, effects = self.opinions.hear(event)
        return [*effects, *ShardMachine._contribute(self, event)] if accepted else effects

    def _takes(self, event: events.Contribute) -> bool:
        """False if it would be dropped anyway."""
        if not self.primary or self.version < 0 or self._sum.fault(event):
            return False
        verdict = self.policy.admit(self, event.step, event.replica - self.lowest)
        return verdict is Verdict.ADD and not self._sum.covers(event)

    def _forget_step(self) -> list[Effect]:
        self.opinions.clear()
        return ShardMachine._forget_step(self)

    def validate(self) -> None:
        """Raise AssertionError, with a sentence, if the machine is in a state that it can never reach."""
        ShardMachine.validate(self)
        assert self.primary or not self.opinions.replicas, "a backup has opinions"
        assert not any(map(self._sum.knows, self.opinions.replicas)), "opinions on what is accepted"
