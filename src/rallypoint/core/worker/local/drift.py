"""Where the parameters of each replica are, in jobs whose replicas go on from their own values from round to round.

A worker has one model, and may have several replicas. The model holds the values of one replica (or a version); those
of the others are kept aside. The source of a staggered job and the simulation use this with values of their own: flat
tensors here, names there.

With a delay a replica may compute the first steps of round t+1 before the version of that round is here. A server that
dies meanwhile makes it compute round t once more. So the values with which the round before began are kept, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.local.inner import InnerState, InnerStates

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
