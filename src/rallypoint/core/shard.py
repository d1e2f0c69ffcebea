"""The server's machine, one per shard: events in, effects out. It decides; `server/reducer.py` does.

A shard has one primary, which sums and publishes, and perhaps one backup, which applies the same updates and
acknowledges them. The backup first gets the whole state (Fill), then every update (Apply with `replicate`). From its
first acknowledgement on, the primary publishes nothing that the backup does not hold (I4); once that is so for all that
has been published, the backup is in step, and may be promoted.

A payload is named here by a `Ticket`, an opaque number that the shell maps to a buffer. Every ticket that comes in goes
out again in exactly one of Take, Add or Drop, so no buffer can be forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.policy import Policy, Verdict

Ticket = int


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Initialise:
    """The first worker brings version 0."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Contribute:
    """A contribution arrived: named by (shard, step, replica), weighted, perhaps known to be not finite."""

    step: int
    replica: int
    weight: float
    ticket: Ticket
    finite: bool = True


@dataclass(frozen=True, slots=True)
class Decide:
    """All servers know this step's norms and flags: apply with the gradient scaled by `scale`, or skip (None)."""

    step: int
    scale: float | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The whole state at `version` is in place: from a snapshot (a primary), or from the primary (a backup)."""

    version: int


@dataclass(frozen=True, slots=True)
class Replicated:
    """The primary's update of `step` came: the finished gradient, scaled; or nothing is to change (`skip`)."""

    step: int
    skip: bool
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Acked:
    """The backup holds `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """A new view: who we are to this shard. `fresh` says that the backup, if there is one, holds nothing yet."""

    primary: bool
    backup: bool
    fresh: bool


@dataclass(frozen=True, slots=True)
class FillBackup:
    """The backup's turn to get the whole state has come."""


@dataclass(frozen=True, slots=True)
class CaptureAt:
    """A snapshot is wanted of version `version`."""

    version: int


Event = (
    Initialise | Contribute | Decide | Loaded | Replicated | Acked | Assigned | FillBackup | CaptureAt
)  # fmt: skip


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Install:
    """The ticket's payload becomes the parameters at version 0."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Take:
    """The ticket's payload, times `weight`, becomes the sum (a backup's: the finished gradient)."""

    ticket: Ticket
    weight: float


@dataclass(frozen=True, slots=True)
class Add:
    """The ticket's payload, times `weight`, is added to the sum."""

    ticket: Ticket
    weight: float


@dataclass(frozen=True, slots=True)
class Hold:
    """The ticket waits for its turn."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Drop:
    """The ticket's payload is not needed; `fault` says why if the sender is at fault, else it is a harmless repeat."""

    ticket: Ticket
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Forget the sum in progress, if there is one."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The sum of `step` is complete: divide by `total_weight`. Measure it if a decision is awaited."""

    step: int
    total_weight: float
    measure: bool
    not_finite: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the finished mean gradient of `step`, scaled; with None leave the parameters as they are.

    With `replicate` the scaled gradient goes to the backup too.
    """

    step: int
    scale: float | None
    replicate: bool = False


@dataclass(frozen=True, slots=True)
class Publish:
    """Version `version` may be seen by everybody who follows."""

    version: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Send the whole state, at `version`, to the backup."""

    version: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the primary that `version` is held here."""

    version: int


@dataclass(frozen=True, slots=True)
class InStep:
    """The backup holds all that has been published, and will before anything else is: it may be promoted."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Keep the state as it is now, at `version`, for the snapshot; or, with `missed`, it is too late: `version` now."""

    version: int
    missed: bool = False


Effect = (
    Install | Take | Add | Hold | Drop | Abandon | Finish | Apply | Publish | Fill | Acknowledge | InStep | Capture
)  # fmt: skip


@dataclass(slots=True)
class _Held:
    ticket: Ticket
    weight: float


@dataclass(slots=True)
class ShardMachine:
    """One shard's ledger. `expected` is R for parameters, 1 for buffers (replica 0's are kept).

    With `decides` the shard waits, once its sum is finished, for the decision that all servers take together
    (global-norm clipping, or skipping a step that is not finite).
    """

    policy: Policy
    expected: int
    decides: bool = False
    primary: bool = True
    version: int = -1  # updates applied here
    published: int = -1  # what followers may see; behind `version` while the backup has not acknowledged
    added: int = 0
    awaiting: bool = False
    unfilled: bool = False  # there is a backup that has not been sent the state
    in_step: bool = False
    _fed: bool = False  # the backup gets every update
    _strict: bool = False  # nothing is published that the backup does not hold
    _acked: int = -1
    _capture_at: int = -1
    _decision: Decide | None = None  # one that came before the sum was finished (buffers are not measured)
    _held: dict[int, _Held] = field(default_factory=dict)
    _total: float = 0.0
    _not_finite: list[int] = field(default_factory=list)

    def knows(self, replica: int) -> bool:
        return replica < self.added or replica in self._held

    @property
    def missing(self) -> list[int]:
        """The replicas whose contribution to the step in progress has not arrived."""
        return [r for r in range(self.added, self.expected) if r not in self._held]

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; the effects are to be run in order."""
        match event:
            case Initialise(ticket=ticket):
                return self._initialise(ticket)
            case Contribute():
                return self._contribute(event)
            case Decide():
                return self._decide(event)
            case Loaded(version=version):
                return self._loaded(version)
            case Replicated():
                return self._replicated(event)
            case Acked(version=version):
                return self._acknowledged(version)
            case Assigned():
                return self._assigned(event)
            case FillBackup():
                return self._fill()
            case CaptureAt(version=version):
                return self._capture(version)

    # ---- the primary ----

    def _initialise(self, ticket: Ticket) -> list[Effect]:
        if self.version >= 0 or not self.primary:
            return [Drop(ticket)]
        self.version = 0
        return [Install(ticket), *self._captured(), *self._publish()]

    def _contribute(self, event: Contribute) -> list[Effect]:
        if not self.primary or self.version < 0:
            return [Drop(event.ticket)]  # it was sent under an older view; its worker will send it again
        match self.policy.admit(self, event.step, event.replica):
            case Verdict.REJECT if event.replica < self.expected:
                # Of a step that has not begun here: its worker has seen the version of a newer primary than us.
                return [Drop(event.ticket)]
            case Verdict.REJECT:
                fault = f"replica {event.replica} does not contribute to this shard (it has {self.expected})"
                return [Drop(event.ticket, fault)]
            case Verdict.DROP:
                return [Drop(event.ticket)]
            case Verdict.HOLD:
                self._note(event)
                self._held[event.replica] = _Held(event.ticket, event.weight)
                return [Hold(event.ticket)]
            case Verdict.ADD:
                self._note(event)
                return [self._add(event.ticket, event.weight), *self._add_held(), *self._finish()]

    def _note(self, event: Contribute) -> None:
        if not event.finite:
            self._not_finite.append(event.replica)

    def _add(self, ticket: Ticket, weight: float) -> Effect:
        first = self.added == 0
        self.added += 1
        self._total += weight
        return Take(ticket, weight) if first else Add(ticket, weight)

    def _add_held(self) -> list[Effect]:
        effects: list[Effect] = []
        while (held := self._held.pop(self.added, None)) is not None:
            effects.append(self._add(held.ticket, held.weight))
        return effects

    def _finish(self) -> list[Effect]:
        if not self.policy.complete(self):
            return []
        finish = Finish(self.version, self._total, self.decides, tuple(sorted(self._not_finite)))
        if not self.decides:
            return [finish, *self._advance(1.0)]
        if self._decision is not None and self._decision.step == self.version:
            return [finish, *self._advance(self._decision.scale)]
        self.awaiting = True
        return [finish]

    def _decide(self, event: Decide) -> list[Effect]:
        if event.step != self.version or not self.primary:
            return []
        if self.awaiting:
            return self._advance(event.scale)
        self._decision = event
        return []

    def _advance(self, scale: float | None) -> list[Effect]:
        applied = Apply(self.version, scale, replicate=self._fed)
        self.version += 1
        self.added, self._total, self.awaiting = 0, 0.0, False
        self._not_finite.clear()
        return [applied, *self._captured(), *self._publish()]

    def _publish(self) -> list[Effect]:
        """Publish what may be, if there is anything new."""
        if self.version == self.published or (self._strict and self._acked < self.version):
            return []
        self.published = self.version
        return [Publish(self.version)]

    def _fill(self) -> list[Effect]:
        if not (self.primary and self.unfilled and self.version >= 0):
            return []
        self.unfilled, self._fed = False, True
        return [Fill(self.version)]

    def _acknowledged(self, version: int) -> list[Effect]:
        if not (self.primary and self._fed):
            return []
        self._acked = max(self._acked, version)
        self._strict = True
        effects = self._publish()
        if not self.in_step and self._acked >= self.published:
            self.in_step = True
            effects.append(InStep())
        return effects

    # ---- the backup ----

    def _replicated(self, event: Replicated) -> list[Effect]:
        if self.primary or self.version < event.step:
            return [Drop(event.ticket)]  # from a primary that has been replaced, or from before our state came
        if self.version > event.step:
            return [Drop(event.ticket), Acknowledge(self.version)]
        applied = Apply(self.version, None if event.skip else 1.0)
        self.version += 1
        return [Take(event.ticket, 1.0), applied, Acknowledge(self.version)]

    # ---- either ----

    def _loaded(self, version: int) -> list[Effect]:
        self.version = version
        if not self.primary:
            return [Acknowledge(version)]
        self.published = -1
        return [*self._captured(), *self._publish()]

    def _assigned(self, event: Assigned) -> list[Effect]:
        promoted, demoted = event.primary and not self.primary, self.primary and not event.primary
        self.primary = event.primary
        effects: list[Effect] = self._forget_step() if promoted or demoted else []
        if demoted:
            self.version = self.published = -1  # whoever is primary now will send its state
        if event.fresh or not event.backup or promoted:
            self.unfilled = event.primary and event.backup
            self._fed = self.in_step = False
            # A backup that lost its link still counts as one that may be promoted: nothing passes it by.
            self._strict = self._strict and event.backup and not promoted and not event.fresh
            self._acked = -1
        if promoted:
            self.published = -1
        if event.primary and self.version >= 0:
            effects += self._publish()
        return effects

    def relinked(self) -> None:
        """The link to the backup was lost, with what was under way: it must be sent the whole state again."""
        if self._fed:
            self.unfilled, self._fed = True, False
            self._acked = -1

    def _forget_step(self) -> list[Effect]:
        effects: list[Effect] = [Drop(held.ticket) for _, held in sorted(self._held.items())]
        self._held.clear()
        self.added, self._total, self.awaiting, self._decision = 0, 0.0, False, None
        self._not_finite.clear()
        self._capture_at = -1
        return [*effects, Abandon()]

    def _capture(self, version: int) -> list[Effect]:
        if not self.primary or self.version > version:
            return [Capture(max(self.version, version + 1), missed=True)]
        self._capture_at = version
        return self._captured()

    def _captured(self) -> list[Effect]:
        if self._capture_at < 0 or self.version != self._capture_at:
            return []
        self._capture_at = -1
        return [Capture(self.version)]
