"""The replicas' own optimizers on a simulated worker, which the real `InnerStates` picks from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.local import InnerStates
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.replicas.contents import Content, combine


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
