"""The replicas' own optimizers on a simulated worker, which the real `InnerStates` picks from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.local import Drift, GoneAhead, InnerStates, OwnParameters
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Content, Names, Trained, combine


@dataclass(slots=True)
class Inner:
    """The state of a replica's own optimizer: a name, and the one that the round was begun with. 0: a new one."""

    round: int
    whole: bool = False
    name: int = 0
    before: int = 0

    def begin(self, round: int) -> None:
        assert round == self.round + 1, f"round {round} is begun with the inner state of round {self.round}"
        self.round, self.whole, self.before = round, False, self.name

    def go_back(self) -> None:
        self.whole, self.name = False, self.before

    def step_back(self) -> None:
        """No replica goes ahead without a delay."""
        raise AssertionError(f"round {self.round - 1} is begun once more after round {self.round}")


class InnerOptimizers:
    """What a worker's replicas keep. Without a delay no replica goes ahead, and a version replaces what they have."""

    def __init__(self, name: str, job: SimulatedJob) -> None:
        self._name, self._job = name, job
        self._states = InnerStates(job.keeps_inner, Inner)
        self._state = Inner(-1)  # of the replica in progress
        self._generation = ViewNumber()
        self._begun: dict[tuple[ViewNumber, int, int], int] = {}  # generation, round, replica -> state
        self._made: dict[tuple[int, int], tuple[int, ViewNumber]] = {}  # replica, state -> round, generation

    def begin(self, round: int, replica: int, generation: ViewNumber) -> float:
        """Make the first step: until the round is over the state is that of half a round. Returns the part of the
        round's time that is to pass before the first contribution, beside that of the contributions."""
        self._generation = generation
        self._state = state = self._states.begin(round, replica, generation)
        what = f"{self._name}: round {round} of replica {replica}"
        same = self._begun.setdefault((generation, round, replica), state.name)
        assert state.name == same, f"{what} is begun with two inner states"
        made = self._made.get((replica, state.name))
        fits = state.name == 0 or made == (round - 1, generation)
        assert fits, f"{what} is begun with the inner state of (round, generation) {made}, in {generation}"
        state.name = combine(state.name, round, 23)
        return 0.0

    def contribution(self, shard: int, round: int, replica: int, model: Sequence[Content]) -> Content:
        began_with = (*model, self._state.before) if self._job.same_bytes else model
        gradient = self._job.gradient(shard, round, replica, began_with)
        audits = self._job.audits
        return gradient if audits is None else audits.computed(self._name, round, gradient)

    def made(self, round: int, replica: int, model: Sequence[Content]) -> None:
        """The last step of the round is made."""
        if not self._job.inner:
            return
        self._state.name = self._job.inner_after(self._state.before, round, replica, model)
        self._made[replica, self._state.name] = (round, self._generation)
        self._states.made(replica)

    def abandoned(self) -> None:
        """The replica in progress is stale."""

    def install(self) -> None:
        """A version is about to be copied into the model."""

    def installed(self, model: Sequence[Content]) -> None:
        """The model holds a version."""

    def goes_ahead(self, round: int, replica: int, generation: ViewNumber) -> bool:
        """Can the replica begin this round before its version is here? If so, it does."""
        return False

    def gone_ahead(self) -> None:
        """It has made as many steps as it can."""


# Replicas that go on from their own parameters, and mix a version in some steps later (LocalSteps with a delay).
#
# What decides is real: `InnerStates`, `OwnParameters` and `GoneAhead` of `core/worker/`. `worker/sources/local.py` is
# the counterpart of what stands around them here.


@dataclass(slots=True)
class Drifting(Inner):
    """A replica's optimizer, with the state that the round before was begun with."""

    drift: Drift[Names] | None = None
    earlier: int = 0

    def begin(self, round: int) -> None:
        earlier = self.before
        Inner.begin(self, round)
        self.earlier = earlier

    def step_back(self) -> None:
        """The round before is computed once more."""
        if self.drift is not None and self.drift.earlier is not None:
            self.round, self.before = self.round - 1, self.earlier
            self.drift.step_back()


class _Model:
    """What the model's tensors hold: a replica's parameters, a version, or half a round's work."""

    def __init__(self, shards: int) -> None:
        self.start: Names = (GARBAGE,) * shards  # the version
        self.values: Names = self.start

    def version(self) -> Names:
        return self.start

    def load(self, values: Names) -> None:
        self.values = values

    def save(self, spare: Names | None) -> Names:
        return self.values


class DelayedReplicas(InnerOptimizers):
    """The replicas of one worker. `begin` and `goes_ahead` compute at once what the steps come to."""

    def __init__(self, name: str, job: SimulatedJob) -> None:
        super().__init__(name, job)
        self._kept: InnerStates[Drifting] = InnerStates(job.keeps_inner, Drifting, ahead=True)
        self._model = _Model(job.shards)
        self._own: OwnParameters[Drifting, Names] = OwnParameters(self._kept, self._model, delayed=True)
        self._ahead: GoneAhead[ViewNumber] = GoneAhead()
        self._going: tuple[int, int, ViewNumber] | None = None
        self._contributions: Names = ()
        self._contributed: dict[tuple[ViewNumber, int, int], Names] = {}  # generation, round, replica

    def begin(self, round: int, replica: int, generation: ViewNumber) -> float:
        rounds, seconds = self._job.rounds, 0.0
        if (began_in := self._ahead.resume(round, replica, generation)) is None:
            state = self._own.begin(round, replica, generation)
            self._step(state, rounds.first_steps(self._trained(state), round, replica))
            seconds = rounds.ahead / rounds.steps
        else:
            assert began_in == generation, f"{self._name}: round {round} of replica {replica} was begun in {began_in}"
            state = self._own.resume(replica)
        mixes = self._own.mixes(round, replica)
        self._step(state, rounds.other_steps(self._trained(state), round, replica, self._model.start, mixes=mixes))
        self._contributions = self._trained(state).contributions(round, replica, self._model.start)
        known = self._contributed.setdefault((generation, round, replica), self._contributions)
        assert known == self._contributions, (
            f"{self._name}: round {round} of replica {replica} has two values: it was computed again (I2)"
        )
        return seconds

    def contribution(self, shard: int, round: int, replica: int, model: Sequence[Content]) -> Content:
        return self._contributions[shard]

    def made(self, round: int, replica: int, model: Sequence[Content]) -> None:
        self._kept.made(replica)

    def abandoned(self) -> None:
        self._model.values = (GARBAGE,) * self._job.shards
        self._own.drop()

    def install(self) -> None:
        self._own.put_away()
        self._model.load(self._model.start)

    def installed(self, model: Sequence[Content]) -> None:
        self._model.start = self._model.values = tuple(model)

    def goes_ahead(self, round: int, replica: int, generation: ViewNumber) -> bool:
        if self._ahead.is_over(round, replica, generation):
            return False
        if not self._own.may_go_ahead(round, replica, generation):
            return False
        state = self._own.begin(round, replica, generation)
        self._step(state, self._job.rounds.first_steps(self._trained(state), round, replica))
        self._going = (round, replica, generation)
        return True

    def gone_ahead(self) -> None:
        assert self._going is not None
        self._ahead.made(*self._going, self._going[2])

    def _trained(self, state: Drifting) -> Trained:
        return Trained(self._model.values, state.name)

    def _step(self, state: Drifting, trained: Trained) -> None:
        self._model.values, state.name = trained.values, trained.state
