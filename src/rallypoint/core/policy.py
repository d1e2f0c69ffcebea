"""Ways to synchronise, and when a server applies contributions: the only place where modes differ on a server.

Two families. *Aligned* policies have rounds: all followers see version t, contribute to round t, and version t+1 is
made of that (Sync, LocalSteps over it). Under *streaming* ones each replica has a clock of its own: its
contributions are applied as they come, and what goes back answers one follower (BoundedStaleness, Async).
"""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from rallypoint.core.optimizer import SGD


class Verdict(enum.Enum):
    """What becomes of a contribution that has just arrived."""

    ADD = "add"
    HOLD = "hold"
    DROP = "drop"
    REJECT = "reject"


class Ledger(Protocol):
    """What a policy may know about a shard."""

    @property
    def version(self) -> int:
        """Updates applied so far; under an aligned policy also the round in progress."""

    @property
    def expected(self) -> int:
        """Replicas that contribute to the shard: R, or 1 for buffers."""

    @property
    def added(self) -> int:
        """Contributions in the sum in progress."""

    @property
    def slowest(self) -> int:
        """The lowest clock: steps of which every replica's contribution has been applied."""

    @property
    def visible(self) -> int:
        """The lowest clock in what is published, which is behind while the backup has not acknowledged."""

    def knows(self, replica: int) -> bool:
        """Is this replica's next contribution here already, in the sum or held?"""

    def clock(self, replica: int) -> int:
        """The step of this replica's next contribution; under an aligned policy the round in progress."""


class Policy(Protocol):
    """When contributions are applied, and who may see what comes of it."""

    @property
    def streaming(self) -> bool:
        """Does each replica have a clock of its own?"""

    def clocks(self, contributors: int) -> int:
        """How many of a shard's contributors have a clock of their own there: all of them, or 0."""

    def admit(self, ledger: Ledger, step: int, replica: int) -> Verdict:
        """What to do with replica `replica`'s contribution to step `step`."""

    def complete(self, ledger: Ledger) -> bool:
        """May the sum in progress be applied?"""

    def serve(self, ledger: Ledger, clock: int) -> bool:
        """May a follower have the parameters for a replica's step `clock`?"""

    def rate(self, ledger: Ledger, staleness: int) -> float:
        """How many times the learning rate a contribution counts that is so many updates late."""


class Sync(msgspec.Struct, frozen=True, tag="sync", forbid_unknown_fields=True):
    """Every round has all R contributions, summed in replica order 0..R-1 (I1, I3).

    A contribution to a round that is over is a repeat and is dropped (I2). One to a round that has not begun is not for
    us: nobody can compute round t+1 before having every shard at t+1, so it is for a primary that has replaced us.

    With `quorum` the first that many of a round's contributions to a shard are enough, in the order in which they come,
    and the rest are dropped and counted (backup workers; Chen et al., 2016). The bytes then depend on who was quick.
    """

    quorum: int | None = None

    @property
    def streaming(self) -> bool:
        return False

    def clocks(self, contributors: int) -> int:
        return 0

    def admit(self, ledger: Ledger, step: int, replica: int) -> Verdict:
        if replica >= ledger.expected or step > ledger.version:
            return Verdict.REJECT
        if step < ledger.version or ledger.knows(replica):
            return Verdict.DROP
        if self.quorum is not None:
            return Verdict.ADD if ledger.added < self._needed(ledger) else Verdict.DROP
        return Verdict.ADD if replica == ledger.added else Verdict.HOLD

    def complete(self, ledger: Ledger) -> bool:
        return ledger.added == self._needed(ledger)

    def serve(self, ledger: Ledger, clock: int) -> bool:
        return True

    def rate(self, ledger: Ledger, staleness: int) -> float:
        return 1.0

    def _needed(self, ledger: Ledger) -> int:
        return ledger.expected if self.quorum is None else min(self.quorum, ledger.expected)


class _OnArrival(msgspec.Struct, frozen=True):
    """What streaming policies share: a replica's contributions are taken in its own order, each once (I2).

    Each counts a share, 1/R, of the learning rate: a step of all replicas moves the parameters as far as one of Sync
    does, so that rates carry over.
    """

    @property
    def streaming(self) -> bool:
        return True

    def clocks(self, contributors: int) -> int:
        return contributors

    def _arrives(self, ledger: Ledger, step: int, replica: int) -> Verdict:
        if replica >= ledger.expected or step > ledger.clock(replica):
            return Verdict.REJECT
        return Verdict.DROP if step < ledger.clock(replica) or ledger.knows(replica) else Verdict.ADD


class BoundedStaleness(_OnArrival, frozen=True, tag="bounded-staleness", forbid_unknown_fields=True):
    """Stale-synchronous (SSP; Ho et al., 2013): applied on arrival, but no replica runs more than `staleness` steps
    ahead of the slowest. With 0 nobody is ever ahead, a step's contributions are applied together: that is Sync."""

    staleness: int

    def admit(self, ledger: Ledger, step: int, replica: int) -> Verdict:
        verdict = self._arrives(ledger, step, replica)
        ahead = step > ledger.slowest + self.staleness
        return Verdict.HOLD if verdict is Verdict.ADD and ahead else verdict

    def complete(self, ledger: Ledger) -> bool:
        return ledger.added > 0

    def serve(self, ledger: Ledger, clock: int) -> bool:
        return clock <= ledger.visible + self.staleness

    def rate(self, ledger: Ledger, staleness: int) -> float:
        return 1.0 / ledger.expected


class Async(_OnArrival, frozen=True, tag="async", forbid_unknown_fields=True):
    """Applied on arrival, and nobody waits for anybody.

    Attributes:
        scale_by_staleness: divide a contribution's learning rate by its staleness, the updates that its shard has had
            since the parameters it was computed from, instead of by R (Zhang et al., 2016, "Staleness-aware Async-SGD",
            equation 6).
        delay_compensation: lambda of DC-ASGD (Zheng et al., 2017, equation 10): adds lambda * g * g * (now - then) to a
            gradient g; 0 does not. Servers then keep more versions.
        fold: so many contributions that have queued up at a busy server may be applied as one update, their mean at the
            sum of their rates. Not while there is a backup, which must hear of each.
    """

    scale_by_staleness: bool = False
    delay_compensation: float = 0.0
    fold: int = 1

    def admit(self, ledger: Ledger, step: int, replica: int) -> Verdict:
        return self._arrives(ledger, step, replica)

    def complete(self, ledger: Ledger) -> bool:
        return ledger.added >= self.fold

    def serve(self, ledger: Ledger, clock: int) -> bool:
        return True

    def rate(self, ledger: Ledger, staleness: int) -> float:
        return 1.0 / (max(1, staleness) if self.scale_by_staleness else ledger.expected)


class LocalSteps(msgspec.Struct, frozen=True, tag="local-steps", forbid_unknown_fields=True):
    """Local SGD (Stich, 2019) and DiLoCo (Douillard et al., 2023): `steps` steps of `optimizer` on the worker,
    then what they have changed goes to the servers as if it were a gradient (start minus local), and the `outer`
    optimizer there applies the replicas' mean.

    The worker's own optimizer state goes on from round to round with `keep_inner`; it is lost with the worker and
    starts from zero then, so that bytes depend on who died. Without, every round starts from zero, and is a pure
    function of its position: the same bytes whatever is killed.

    With more than one of `fragments` it is streaming DiLoCo (Douillard et al., 2025): the parameters are cut into so
    many runs of shards. A *staggered* round has steps / fragments steps and updates one of the runs, so that each is
    synchronised every `steps` steps. The last round updates all. Parameters that are not due go on from where their
    replica has left them. Groups of parameters may have a period of their own (`Group.sync_every`), whatever `steps`
    is.

    With a `delay` the exchange overlaps with computing (there, section 2.3): replicas get the result of a round only
    `delay` steps into the next one (fewer steps than a round has), and mix it with their own values:
    mix * version + (1 - mix) * own. Which version is mixed in at which step does not depend on when it comes.
    """

    steps: int
    outer: SGD = SGD(lr=0.7, momentum=0.9, nesterov=True)
    keep_inner: bool = True
    over: Sync | Async = Sync()
    fragments: int = 1
    delay: int = 0
    mix: float = 0.5


class AllReduce(msgspec.Struct, frozen=True, tag="all-reduce", forbid_unknown_fields=True):
    """Servers only average, as under Sync (the same order, the same idempotence); what they publish as version t+1 is
    the mean gradient of step t, and every worker steps an optimizer of its own with it, in order and without a gap.

    So workers hold the state (the model and its optimizer's), and servers hold none. A worker that joins, or was away,
    gets the state from one that has it, through the servers: a new generation begins with it. If no worker is left that
    has the state, the job goes back to the last snapshot.

    Attributes:
        own: the class of the optimizer that workers have in place of the job's; set by `job.train(own_optimizer=...)`.
    """

    own: str = ""


Mode = Sync | BoundedStaleness | Async | LocalSteps | AllReduce
ServerPolicy = Sync | BoundedStaleness | Async


def server_policy(mode: Mode) -> ServerPolicy:
    """When a server applies contributions under `mode`."""
    match mode:
        case LocalSteps():
            return mode.over
        case BoundedStaleness(staleness=0) | AllReduce():
            return Sync()
        case _:
            return mode
