"""Which state of its own optimizer a replica begins a round of local steps with, where it is kept from round to round.

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
