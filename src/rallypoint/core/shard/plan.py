"""What a server's machine needs to know of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.audits.choice import Audits
from rallypoint.core.audits.shard import AuditedShard
from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.policy import Policy
from rallypoint.core.shard.clip import ClipMachine, Rule
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.view import ViewNumber


@dataclass(frozen=True, slots=True)
class Plan:
    """What the machine needs to know of the job.

    `expected[i]` replicas contribute to shard i, `rounds` times each; staggered, as often as `cadence` says. To the
    `carried` (shards of carried state) only the named one does. `measured` shards count in the global norm
    (parameters), `decides` wait for a decision that all servers take together. Where the `rule` examines, every other
    shard is decided by its own server.
    """

    policy: Policy
    expected: Sequence[int]
    measured: frozenset[int]
    decides: frozenset[int]
    rule: Rule = field(default_factory=Rule)
    rounds: int = 0
    buffer_policy: Policy | None = None  # None: the same as for the parameters
    compensates: bool = False
    cadence: Cadence = TOGETHER
    audits: Audits | None = None
    carried: Mapping[int, int] = field(default_factory=dict)
    keyed: bool = False  # each shard counts its own updates, and any worker may begin it

    def rounds_of(self, index: int) -> int:
        """The shard's own version at the end of the job."""
        return self.rounds if self.cadence.together else self.cadence.updates(index)

    def clip(self, generation: ViewNumber) -> ClipMachine | None:
        """A new machine for what all servers decide together in this generation; None if they decide nothing."""
        decided = sorted(self.decides)
        return ClipMachine(decided, frozenset(), self.rule, generation) if decided else None

    def machine(self, index: int, *, primary: bool) -> ShardMachine:
        """A new machine for the shard."""
        policy = self.policy if self.buffer_policy is None or index in self.measured else self.buffer_policy
        kind = ShardMachine if self.audits is None else AuditedShard
        return kind(
            policy, self.expected[index], index in self.decides or self.rule.examines, primary=primary,
            rounds=self.rounds_of(index), chooses=policy.chooses and index in self.decides, skips=self.rule.examines,
            compensates=self.compensates and index in self.measured, lowest=self.carried.get(index, 0),
        )  # fmt: skip
