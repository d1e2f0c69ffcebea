"""The modes of synchronisation, and the policies: when a server applies contributions and serves versions.

*Aligned* policies have rounds: all workers compute from version t, and their contributions make version t+1 (Sync, and
LocalSteps over it). Under *streaming* policies each replica has a clock of its own: a server applies its contributions
as they come, and sends the parameters that this replica needs next (BoundedStaleness, Async).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar

import msgspec

from rallypoint.core.optimizer import SGD
from rallypoint.core.typed import CountFromOne, CountFromZero, FromZero, SettingsType, Share

if TYPE_CHECKING:
    from rallypoint.core.shard.machine import ShardMachine


class Verdict(enum.Enum):
    """What a server does with a contribution that has just arrived."""

    ADD = "add"  # add it to the sum in progress
    HOLD = "hold"  # keep it for later
    DROP = "drop"  # ignore it: a repeat, or not needed
    REJECT = "reject"  # ignore it: it cannot be for this server now


class Policy(msgspec.Struct, frozen=True):
    """When a server applies contributions, and when it may serve a version: here as streaming policies do.

    They apply a replica's contributions in its own order, each once (I2). Each counts 1/R of the learning rate, so that
    a step of all R replicas moves the parameters about as far as a step of Sync does: the same learning rate can be
    used.
    """

    streaming: ClassVar[bool] = True  # each replica has a clock of its own

    @property
    def tree(self) -> bool:
        """True if a shard's sum is the tree over all replicas (I3): every round has all of them."""
        return False

    @property
    def chooses(self) -> bool:
        """True if an update leaves out some contributions, depending on when they arrive."""
        return not (self.streaming or self.tree)

    def clocks(self, contributors: int) -> int:
        """The number of a shard's contributors that have a clock of their own: all `contributors`, or 0."""
        return contributors if self.streaming else 0

    def admit(self, shard: ShardMachine, step: int, replica: int) -> Verdict:
        """Decide about the contribution of `replica` to `step`, counted from the first one that contributes."""
        if replica >= shard.expected or step > shard.clock(replica):
            return Verdict.REJECT
        return Verdict.DROP if step < shard.clock(replica) or shard.knows(replica) else Verdict.ADD

    def complete(self, shard: ShardMachine) -> bool:
        """True if the sum in progress may be applied."""
        return shard.added > 0

    def serve(self, shard: ShardMachine, clock: int) -> bool:
        """True if a worker may have the parameters for a replica's step `clock`."""
        return True

    def rate(self, shard: ShardMachine, staleness: int) -> float:
        """The factor of the learning rate for a contribution that was computed `staleness` updates ago."""
        return 1.0 / shard.expected


class Sync(Policy, metaclass=SettingsType, frozen=True, tag="sync", forbid_unknown_fields=True):
    """Every round has all R contributions, summed by a tree over replica numbers (I1, I3).

    A contribution to an earlier round is a repeat and is dropped (I2). One to a later round is rejected: no worker can
    compute round t+1 before it has every shard at t+1, so it is for a primary that has replaced this one.

    With `quorum`, a server applies the first `quorum` contributions of a round to a shard, in the order in which they
    arrive. It drops and counts the rest (backup workers; Chen et al., 2016). The bytes then depend on timing. A primary
    that replaces another one in the middle of a round takes the contributions that the other had chosen, if it had.
    """

    quorum: CountFromOne | None = None
    streaming: ClassVar[bool] = False

    @property
    def tree(self) -> bool:
        return self.quorum is None

    def admit(self, shard: ShardMachine, step: int, replica: int) -> Verdict:
        if replica >= shard.expected or step > shard.version:
            return Verdict.REJECT
        if step < shard.version:
            return Verdict.DROP
        if shard.chosen:
            if replica not in shard.chosen or shard.knows(replica):
                return Verdict.DROP
            return Verdict.ADD if replica == shard.chosen[shard.added] else Verdict.HOLD
        if self.quorum is not None and (shard.knows(replica) or shard.added >= self._needed(shard)):
            return Verdict.DROP
        return Verdict.ADD  # without a quorum, the tree knows which blocks are repeats

    def complete(self, shard: ShardMachine) -> bool:
        return shard.added == (shard.expected if self.quorum is None else self._needed(shard))

    def rate(self, shard: ShardMachine, staleness: int) -> float:
        return 1.0

    def _needed(self, shard: ShardMachine) -> int:
        return shard.expected if self.quorum is None else min(self.quorum, shard.expected)


class BoundedStaleness(
    Policy, metaclass=SettingsType, frozen=True, tag="bounded-staleness", forbid_unknown_fields=True
):  # fmt: skip
    """Stale-synchronous (SSP; Ho et al., 2013): contributions are applied on arrival, but no replica runs more than
    `staleness` steps ahead of the slowest. With `staleness=0` it is Sync."""

    staleness: CountFromZero

    def admit(self, shard: ShardMachine, step: int, replica: int) -> Verdict:
        verdict = Policy.admit(self, shard, step, replica)
        ahead = step > shard.slowest + self.staleness
        return Verdict.HOLD if verdict is Verdict.ADD and ahead else verdict

    def serve(self, shard: ShardMachine, clock: int) -> bool:
        return clock <= shard.visible + self.staleness


class Async(Policy, metaclass=SettingsType, frozen=True, tag="async", forbid_unknown_fields=True):
    """Contributions are applied on arrival, and no replica waits for another.

    Attributes:
        scale_by_staleness: divide a contribution's learning rate by its staleness, the updates that its shard has had
            since the parameters it was computed from, instead of by R (Zhang et al., 2016, "Staleness-aware Async-SGD",
            equation 6).
        delay_compensation: lambda of DC-ASGD (Zheng et al., 2017, equation 10): adds lambda * g * g * (now - then) to a
            gradient g, which needs servers to keep more versions; 0 turns it off.
        fold: a busy server may apply up to `fold` queued contributions as one update: their mean, at the sum of their
            rates. Not with a backup, which applies each contribution by itself.
    """

    scale_by_staleness: bool = False
    delay_compensation: FromZero = 0.0
    fold: CountFromOne = 1

    def complete(self, shard: ShardMachine) -> bool:
        return shard.added >= self.fold

    def rate(self, shard: ShardMachine, staleness: int) -> float:
        return 1.0 / (max(1, staleness) if self.scale_by_staleness else shard.expected)


class LocalSteps(msgspec.Struct, metaclass=SettingsType, frozen=True, tag="local-steps", forbid_unknown_fields=True):
    """Local SGD (Stich, 2019) and DiLoCo (Douillard et al., 2023): the worker computes `steps` steps of `optimizer`,
    then pushes the change (start minus local) like a gradient. The servers apply the replicas' mean with `outer`.

    With `keep_inner`, a replica's inner optimizer state is kept from round to round. It is lost with its worker and
    then starts from zero, so the bytes depend on which workers died. With `keep_inner=False`, every round starts from
    zero: the job ends with the same bytes, whatever is killed.

    With more than one of `fragments` it is streaming DiLoCo (Douillard et al., 2025): the parameters are cut into
    F runs of shards. A *staggered* round has steps / fragments steps and updates one of the runs, so that each is
    synchronised every `steps` steps. Example: steps = 30, fragments = 3: every 10 steps one third is updated. The last
    round updates all. Parameters that are not due keep the replica's local values. Groups of parameters may have a
    period of their own (`Group.sync_every`), whatever `steps` is.

    With a `delay` the exchange overlaps with computing (Douillard et al., 2025, section 2.3): a replica uses the result
    of a round `delay` steps after the next round began (fewer steps than a round has), and mixes it with its own
    values: mix * version + (1 - mix) * own. The step at which this happens does not depend on when the result arrives.
    """

    steps: CountFromOne
    outer: SGD = SGD(lr=0.7, momentum=0.9, nesterov=True)
    keep_inner: bool = True
    over: Sync | Async = Sync()
    fragments: CountFromOne = 1
    delay: CountFromZero = 0
    mix: Share = 0.5


class AllReduce(msgspec.Struct, metaclass=SettingsType, frozen=True, tag="all-reduce", forbid_unknown_fields=True):
    """Servers only average, as under Sync (the same order, the same bytes). Version t+1 is the mean gradient of step t,
    and every worker steps its own optimizer with it, in order, for every version.

    So the workers hold the state (the model's and the optimizer's), and the servers hold none. A worker that joins, or
    was away, gets the state from a worker that has it, through the servers: a new generation begins. If no worker with
    the state is left, the job goes back to the last snapshot.

    Attributes:
        own: the class of the optimizer that workers have in place of the job's; set by `job.train(own_optimizer=...)`.
    """

    own: str = ""


Mode = Sync | BoundedStaleness | Async | LocalSteps | AllReduce
ServerPolicy = Sync | BoundedStaleness | Async


def server_policy(mode: Mode) -> ServerPolicy:
    """The policy that servers follow under `mode`. BoundedStaleness(0) and AllReduce are Sync for a server."""
    match mode:
        case LocalSteps():
            return mode.over
        case BoundedStaleness(staleness=0) | AllReduce():
            return Sync()
        case _:
            return mode
