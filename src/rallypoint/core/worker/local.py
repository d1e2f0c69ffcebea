"""What is kept of a replica between two rounds of local steps: its own optimizer's state, its own parameters.

The state is the worker's: it does not follow the replica to another worker, and is lost with this one. Example: replica
3 makes rounds 0 to 6 here, its state goes on from each to the next. At round 7 it is assigned to another worker, where
it begins from zero. When it comes back for round 9, it begins from zero again: the state after round 6 is out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rallypoint.core.view import ViewNumber


class InnerState(Protocol):
    """A replica's optimizer: the round that it is in, and whether it has made all steps of that round."""

    round: int
    whole: bool

    def begin(self, round: int) -> None:
        """It goes on to the next round."""

    def go_back(self) -> None:
        """The round is begun once more, with what it was begun with."""

    def step_back(self) -> None:
        """The round before is begun once more: steps of this one were made too early (LocalSteps with a delay).

        Leaves `round` unchanged if what that round was begun with is not kept.
        """


State = TypeVar("State", bound=InnerState)


@dataclass(slots=True)
class InnerStates(Generic[State]):
    """One worker's. `new(round)` makes one that is zero; without `keeps` every round begins with such a one.

    Attributes:
        kept: by replica.
        generation: the one that all of them belong to.
        ahead: a replica may begin a round while others here are still to make the round before (LocalSteps with a
            delay: the links to the servers are down, say, and come back).
    """

    keeps: bool
    new: Callable[[int], State]
    kept: dict[int, State] = field(default_factory=dict)
    generation: ViewNumber = field(default_factory=ViewNumber)
    ahead: bool = False

    def begin(self, round: int, replica: int, generation: ViewNumber) -> State:
        """The replica's state as it begins this round: zero, unless the replica has just made the one before here."""
        if not self.keeps:
            return self.new(round)
        if self.generation != generation:  # after a roll-back all of it is stale
            self.generation = generation
            self.kept.clear()
        # What was computed elsewhere meanwhile has left its state there.
        oldest = round - 2 if self.ahead else round - 1
        self.kept = {r: state for r, state in self.kept.items() if state.round >= oldest}
        state = self.kept.get(replica)
        if state is not None and state.round == round + 1:
            state.step_back()
        if state is not None and state.round == round:
            state.go_back()
        elif state is not None and state.round == round - 1 and state.whole:
            state.begin(round)
        else:
            state = self.kept[replica] = self.new(round)
        return state

    def made(self, replica: int) -> None:
        """The replica has made all steps of its round."""
        if replica in self.kept:
            self.kept[replica].whole = True


R = TypeVar("R")


@dataclass(slots=True)
class GoneAhead(Generic[R]):
    """Of one replica at a time: the one that is computed first in the next round. `R` is what the steps came to."""

    _of: tuple[int, int, ViewNumber] | None = None  # round, replica, generation
    _results: R | None = None

    def has(self, round: int, replica: int) -> bool:
        """True if the first steps of this round were computed for the replica, stale or not."""
        return self._of is not None and self._of[:2] == (round, replica)

    def is_over(self, round: int, replica: int, generation: ViewNumber) -> bool:
        """True if they were computed, and are not stale: the replica has to wait for the version now."""
        return self._of == (round, replica, generation)

    def made(self, round: int, replica: int, generation: ViewNumber, results: R) -> None:
        """The first steps are made. They began in `generation`."""
        self._of, self._results = (round, replica, generation), results

    def resume(self, round: int, replica: int, generation: ViewNumber) -> R | None:
        """The version is here: return what the steps came to; None if the replica made none, or they are stale."""
        if self._of is None or self._of[1] != replica:
            return None
        (of, results), (self._of, self._results) = (self._of, self._results), (None, None)
        return results if of == (round, replica, generation) else None


V = TypeVar("V")


@dataclass(slots=True)
class Drift(Generic[V]):
    """A replica's own parameters, where it does not start each round from the version.

    `began` is its parameters at the start of `round`, which may have to be computed again. `left` is its latest
    parameters, valid while `away` is true: while the model holds something else.
    """

    round: int
    began: V
    left: V | None = None
    away: bool = False
    fresh: int = 0  # the round that the replica started from the version
    earlier: V | None = None  # with a delay: its parameters at the start of the round before

    def step_back(self) -> None:
        """Go back to the start of the round before, to compute it again. Needs `earlier`."""
        assert self.earlier is not None
        self.round, self.began, self.earlier, self.away = self.round - 1, self.earlier, self.began, False


class DriftingState(InnerState, Protocol[V]):
    """A replica's optimizer, and where its parameters are; None before its first round here."""

    drift: Drift[V] | None


class Model(Protocol[V]):
    """What holds parameters on a worker."""

    def version(self) -> V:
        """A copy of the version that the worker holds."""

    def load(self, values: V) -> None:
        """Copy `values` into the model."""

    def save(self, spare: V | None) -> V:
        """Return a copy of what the model holds. `spare` may be used for it: nobody needs its values any more."""


S = TypeVar("S", bound=DriftingState)  # type: ignore[type-arg]


class OwnParameters(Generic[S, V]):
    """Loads and saves the parameters of a worker's replicas.

    Attributes:
        in_model: the replica whose parameters the model holds; None: it holds the version, or nothing usable.
    """

    def __init__(self, states: InnerStates[S], model: Model[V], *, delayed: bool) -> None:
        self.in_model: int | None = None
        self._states, self._model, self._delayed = states, model, delayed

    def begin(self, round: int, replica: int, generation: ViewNumber) -> S:
        """Load what the replica begins this round with into the model. Returns its state."""
        if self.in_model != replica:
            self.put_away()
        state = self._states.begin(round, replica, generation)
        drift: Drift[V] | None = state.drift
        if drift is None:
            state.drift = Drift(round, self._model.version(), fresh=round)
            self._model.load(state.drift.began)
        elif drift.round == round:
            drift.away = False
            self._model.load(drift.began)
        else:
            drift.round = round
            self._go_on(drift)
        self.in_model = replica
        return state

    def put_away(self) -> None:
        """Save the parameters of the replica in the model, because the model will hold something else."""
        state = None if self.in_model is None else self._states.kept.get(self.in_model)
        self.in_model = None
        if state is not None and state.drift is not None:
            state.drift.left = self._model.save(state.drift.left)
            state.drift.away = True

    def drop(self) -> None:
        """The model holds values of stale work: no replica continues from them."""
        self.in_model = None

    # ---- with a delay ----

    def may_go_ahead(self, round: int, replica: int, generation: ViewNumber) -> bool:
        """True if the round's first steps need no version: this worker has made the replica's round before."""
        state = self._states.kept.get(replica)
        here = state is not None and state.whole and state.round == round - 1
        return here and self._states.generation == generation

    def resume(self, replica: int) -> S:
        """Continue the round of a replica that has gone ahead. Returns its state."""
        if self.in_model != replica:
            self.put_away()
        state = self._states.kept[replica]
        drift: Drift[V] | None = state.drift
        self.in_model = replica
        if drift is not None and drift.away and drift.left is not None:
            drift.away = False
            self._model.load(drift.left)
        return state

    def mixes(self, round: int, replica: int) -> bool:
        """True if the version of `round` is mixed into the replica's parameters: it did not start from that version."""
        drift = self._states.kept[replica].drift
        return drift is not None and drift.fresh != round

    def _go_on(self, drift: Drift[V]) -> None:
        began, spare = drift.began, drift.earlier if self._delayed else drift.began
        if drift.away and drift.left is not None:
            drift.began, drift.left, drift.away = drift.left, spare, False
            self._model.load(drift.began)
        else:
            drift.began = self._model.save(spare)
        if self._delayed:
            drift.earlier = began
