"""Which shards a round is for: all of them, or those whose turn it is (layers at their own frequency; streaming DiLoCo,
Douillard et al., 2025).

Where shards take turns a round is called a *tick*. A shard's own version counts its own updates; workers and the
coordinator count ticks. One version of a shard is right for several ticks: from the one after its last update up to the
tick at which it contributes next, and by that one it is known to whoever counts ticks. Where no shard takes turns ticks
and versions are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

EVERY_ROUND = -1  # in place of a turn: shards that take none, which are buffers


class Period(msgspec.Struct, frozen=True):
    """Due at tick `first`, which is below `every`, and every so many ticks from there."""

    every: int
    first: int

    def has(self, round: int) -> bool:
        """Is it due at this tick, were there no end?"""
        return round % self.every == self.first


class Cadence(msgspec.Struct, frozen=True):
    """The turns of a job's shards.

    All functions are total: a tick or version below 0 (nothing yet) stays as it is, and those after the end, which come
    never, count on as if everything were due.

    At every tick some shard with a turn has to be due (see `first_empty`): nobody would wait for the others otherwise.

    Attributes:
        periods: when shards are due, each some shard's; everything is at the last tick. None: all are due in every
            round.
        rounds: how many there are.
        period_of: the index of each shard's turn, or EVERY_TICK; of no meaning where there are no turns.
    """

    periods: tuple[Period, ...] = ()
    rounds: int = 0
    period_of: tuple[int, ...] = ()

    @property
    def together(self) -> bool:
        """Are all shards due in every round?"""
        return not self.periods

    def due(self, shard: int, round: int) -> bool:
        """Does the shard take contributions at this tick?"""
        return self.next_due(shard, round) == round

    def next_due(self, shard: int, round: int) -> int:
        """The first tick from `round` on at which the shard takes contributions; from the end on, `round`."""
        if round < 0 or round >= self.rounds or (period := self._period(shard)) is None:
            return round
        return min(round + (period.first - round) % period.every, self.rounds - 1)

    def updates_before(self, shard: int, round: int) -> int:
        """The shard's own version that is right for a tick; `rounds` is the end of the job."""
        if round <= 0 or (period := self._period(shard)) is None:
            return round
        if round >= self.rounds:
            return self.updates_before(shard, self.rounds - 1) + 1 + round - self.rounds
        return max(0, -((period.first - round) // period.every))

    def updates(self, shard: int) -> int:
        """The shard's own version at the end of the job."""
        return self.updates_before(shard, self.rounds)

    def round_of(self, shard: int, version: int) -> int:
        """The tick at which the shard, at its own version `version`, takes contributions next; `rounds` after the last.

        That version is right for that tick, and for those before it back to the one after the update that made it.
        """
        if version < 0 or (period := self._period(shard)) is None:
            return version
        if (beyond := version - self.updates(shard)) >= 0:
            return self.rounds + beyond
        return min(period.first + version * period.every, self.rounds - 1)

    def begun(self, shard: int, version: int) -> int:
        """The first tick that this version of the shard is right for."""
        return version if version <= 0 else self.round_of(shard, version - 1) + 1

    def changes(self, shard: int, round: int, later: int) -> bool:
        """Does the shard have an update between these ticks?"""
        return self.updates_before(shard, round) != self.updates_before(shard, later)

    def witness(self, round: int) -> int:
        """The shard whose update stands for the tick in the ledger: the first with a turn that is due."""
        if round < 0 or round >= self.rounds - 1:
            return 0  # everything is
        return min((self.period_of.index(index) for index, period in enumerate(self.periods) if period.has(round)),
            default=0)

    def _period(self, shard: int) -> Period | None:
        """None where the shard is due at every tick."""
        return None if not self.periods or self.period_of[shard] == EVERY_ROUND else self.periods[self.period_of[shard]]


TOGETHER = Cadence()


def cycle(periods: Iterable[Period]) -> int:
    """After how many ticks everything begins anew."""
    return math.lcm(*(period.every for period in periods))


def first_empty(periods: Sequence[Period]) -> int | None:
    """The first tick at which nothing would be due; None if there is none."""
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
