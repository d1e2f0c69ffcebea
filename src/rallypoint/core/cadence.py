"""The shards that a round updates: all of them, or in a *staggered* round some (layers at their own frequency;
streaming DiLoCo, Douillard et al., 2025).

A shard's own version counts its own updates; workers and the coordinator count rounds. One version of a shard is right
for several rounds. Example: a shard is updated in rounds 1, 3 and 5. Its version 0 is right for rounds 0 and 1, its
version 1 for rounds 2 and 3. Where every round updates every shard, rounds and versions are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

EVERY_ROUND = -1  # in place of a period: of buffers, which are due in every round


class Period(msgspec.Struct, frozen=True):
    """Due in round `first`, and in every `every`-th round after it. `first` is below `every`."""

    every: int
    first: int

    def has(self, round: int) -> bool:
        """Is it due in this round, if the job had no end?"""
        return round % self.every == self.first


class Cadence(msgspec.Struct, frozen=True):
    """When the shards of a job are due.

    Every method takes any number: a round or version below 0 (nothing yet) stays as it is; those after the end, which
    never come, count on as if every shard were due.

    In every round some shard with a period has to be due (see `first_empty`): workers wait for each other by it.

    Attributes:
        periods: the different periods. In the last round every shard is due. Empty: all are due in every round.
        rounds: how many there are.
        period_of: the index in `periods` for each shard, or EVERY_ROUND; not used where `periods` is empty.
    """

    periods: tuple[Period, ...] = ()
    rounds: int = 0
    period_of: tuple[int, ...] = ()

    @property
    def together(self) -> bool:
        """Are all shards due in every round?"""
        return not self.periods

    def due(self, shard: int, round: int) -> bool:
        """Does the shard take contributions in this round?"""
        return self.next_due(shard, round) == round

    def next_due(self, shard: int, round: int) -> int:
        """The first round from `round` on in which the shard takes contributions; from the end on, `round`."""
        if round < 0 or round >= self.rounds or (period := self._period(shard)) is None:
            return round
        return min(round + (period.first - round) % period.every, self.rounds - 1)

    def updates_before(self, shard: int, round: int) -> int:
        """The shard's own version that is right for a round; `rounds` is the end of the job."""
        if round <= 0 or (period := self._period(shard)) is None:
            return round
        if round >= self.rounds:
            return self.updates_before(shard, self.rounds - 1) + 1 + round - self.rounds
        return max(0, -((period.first - round) // period.every))

    def updates(self, shard: int) -> int:
        """The shard's own version at the end of the job."""
        return self.updates_before(shard, self.rounds)

    def round_of(self, shard: int, version: int) -> int:
        """The round in which the shard, at its own version `version`, contributes next; `rounds` after the last.

        That version is right for that round, and for those before it back to the one after the update that made it.
        """
        if version < 0 or (period := self._period(shard)) is None:
            return version
        if (beyond := version - self.updates(shard)) >= 0:
            return self.rounds + beyond
        return min(period.first + version * period.every, self.rounds - 1)

    def begun(self, shard: int, version: int) -> int:
        """The first round that this version of the shard is right for."""
        return version if version <= 0 else self.round_of(shard, version - 1) + 1

    def changes(self, shard: int, round: int, later: int) -> bool:
        """Does the shard have an update between these rounds?"""
        return self.updates_before(shard, round) != self.updates_before(shard, later)

    def witness(self, round: int) -> int:
        """The shard whose update stands for the round in the ledger: the first one with a period that is due."""
        if round < 0 or round >= self.rounds - 1:
            return 0  # everything is
        return min((self.period_of.index(index) for index, period in enumerate(self.periods) if period.has(round)),
            default=0)

    def _period(self, shard: int) -> Period | None:
        """None where the shard is due in every round."""
        return None if not self.periods or self.period_of[shard] == EVERY_ROUND else self.periods[self.period_of[shard]]


TOGETHER = Cadence()


def cycle(periods: Iterable[Period]) -> int:
    """The rounds after which the pattern repeats."""
    return math.lcm(*(period.every for period in periods))


def first_empty(periods: Sequence[Period]) -> int | None:
    """The first round in which nothing would be due; None if there is none."""
    return next((round for round in range(cycle(periods)) if not any(period.has(round) for period in periods)), None)


def cut_evenly(sizes: Sequence[int], parts: int) -> list[int]:
    """The part of each of a row of things, cut into `parts` runs of about equal size, none of them empty.

    Needs at least as many things as parts.
    """
    reach = [0]
    for size in sizes:
        reach.append(reach[-1] + size)
    cuts = [0]
    for part in range(1, parts):
        possible = range(cuts[-1] + 1, len(sizes) - (parts - part) + 1)
        cuts.append(min(possible, key=lambda cut: abs(reach[cut] * parts - reach[-1] * part)))
    return [sum(cut <= index for cut in cuts) - 1 for index in range(len(sizes))]
