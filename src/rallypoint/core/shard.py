"""The server's machine, one per shard: events in, effects out. It decides; `server/reducer.py` does.

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


Event = Initialise | Contribute | Decide


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Install:
    """The ticket's payload becomes the parameters at version 0."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Take:
    """The ticket's payload, times `weight`, becomes the sum."""

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
class Finish:
    """The sum of `step` is complete: divide by `total_weight`. Measure it if a decision is awaited."""

    step: int
    total_weight: float
    measure: bool
    not_finite: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the finished mean gradient of `step`, scaled; with None leave the parameters as they are."""

    step: int
    scale: float | None


@dataclass(frozen=True, slots=True)
class Publish:
    """Version `version` may be seen by everybody who follows."""

    version: int


Effect = Install | Take | Add | Hold | Drop | Finish | Apply | Publish


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
    version: int = -1
    added: int = 0
    awaiting: bool = False
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

    def _initialise(self, ticket: Ticket) -> list[Effect]:
        if self.version >= 0:
            return [Drop(ticket)]
        self.version = 0
        return [Install(ticket), Publish(0)]

    def _contribute(self, event: Contribute) -> list[Effect]:
        match self.policy.admit(self, event.step, event.replica):
            case Verdict.REJECT:
                return [Drop(event.ticket, self._fault(event))]
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

    def _fault(self, event: Contribute) -> str:
        if event.replica >= self.expected:
            return f"replica {event.replica} does not contribute to this shard (it has {self.expected})"
        return f"a contribution to step {event.step} while the shard is at version {self.version}"

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
        if event.step != self.version:
            return []
        if self.awaiting:
            return self._advance(event.scale)
        self._decision = event
        return []

    def _advance(self, scale: float | None) -> list[Effect]:
        applied = Apply(self.version, scale)
        self.version += 1
        self.added, self._total, self.awaiting = 0, 0.0, False
        self._not_finite.clear()
        return [applied, Publish(self.version)]
