"""The shards that each round updates: all of them, or in a *staggered* round only some (streaming DiLoCo, Douillard et
al., 2025; layers with a frequency of their own).

A shard's own version counts its own updates; workers and the coordinator count rounds. A shard is *due* in the rounds
that update it. Example: a shard is due in rounds 1, 3 and 5.

    round                  0  1  2  3  4  5
    version that it uses   0  0  1  1  2  2

Where every shard is due in every round, rounds and versions are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec

EVERY_ROUND = -1  # in place of a period: for buffers, which are due in every round


class Period(msgspec.Struct, frozen=True):
    """Due in round `first`, and in every `every`-th round after it. `first` is below `every`."""

    every: int
    first: int

    def has(self, round: int) -> bool:
        """True if `round` is one of the period's rounds. Ignores that all shards are due in the job's last round."""
        return round % self.every == self.first

    def before(self, round: int) -> int:
        """The number of the period's rounds before `round`."""
        return (round - self.first + self.every - 1) // self.every

    def number(self, index: int) -> int:
        """The period's round with this index: the inverse of `before`."""
        return index * self.every + self.first


class Cadence(msgspec.Struct, frozen=True):
    """The rounds in which each shard of a job is due.

    Every method takes any round or version. Below 0 (nothing yet) it returns the number unchanged. After the end of the
    job it counts on as if every shard were due in every round.

    At least one shard with a period must be due in each round (see `first_empty`): workers wait for each other at it.

    Attributes:
        periods: the different periods; empty if all shards are due in every round.
        rounds: the number of rounds of the job.
        period_of: for each shard an index into `periods`, or EVERY_ROUND; not used where `periods` is empty.
    """

    periods: tuple[Period, ...] = ()
    rounds: int = 0
    period_of: tuple[int, ...] = ()

    @property
    def together(self) -> bool:
        """True if all shards are due in every round."""
        return not self.periods

    @property
    def written(self) -> Cadence:
        """The same as plain data, as it stands in the job's record."""
        return Cadence(self.periods, self.rounds, self.period_of)

    def due(self, shard: int, round: int) -> bool:
        """True if the shard takes contributions in this round."""
        return self.next_due(shard, round) == round

    def next_due(self, shard: int, round: int) -> int:
        """The first round from `round` on in which the shard is due; the number of rounds if there is none.

        At and after the job's end: `round` itself.
        """
        if round < 0 or round >= self.rounds or (period := self._period(shard)) is None:
            return round
        return min(period.number(period.before(round)), self._end)

    def updates_before(self, shard: int, round: int) -> int:
        """The shard's own version that `round` uses: its number of updates before that round."""
        if round <= 0 or (period := self._period(shard)) is None:
            return round
        if round >= self.rounds:
            return period.before(self._end) + 1 + round - self.rounds
        return period.before(round)

    def updates(self, shard: int) -> int:
        """The shard's own version at the end of the job."""
        return self.updates_before(shard, self.rounds)

    def round_of(self, shard: int, version: int) -> int:
        """The round in which the shard is due next when its own version is `version`; `rounds` after its last update.

        It is the last round that uses that version. The first one is `begun`.
        """
        if version < 0 or (period := self._period(shard)) is None:
            return version
        if (beyond := version - self.updates(shard)) >= 0:
            return self.rounds + beyond
        return min(period.number(version), self._end)

    def begun(self, shard: int, version: int) -> int:
        """The first round that uses this version of the shard."""
        return version if version <= 0 else self.round_of(shard, version - 1) + 1

    def changes(self, shard: int, round: int, later: int) -> bool:
        """True if the rounds `round` and `later` use different versions of the shard."""
        return self.updates_before(shard, round) != self.updates_before(shard, later)

    def witness(self, round: int) -> int:
        """The shard whose update the ledger counts as the round's: the first shard with a period that is due."""
        if round < 0 or round >= self._end:
            return 0  # everything is
        return min((self.period_of.index(index) for index, period in enumerate(self.periods) if period.has(round)),
            default=0)

    @property
    def _end(self) -> int:
        """The last round: all shards are due in it, also those whose period does not have it."""
        return self.rounds - 1

    def _period(self, shard: int) -> Period | None:
        """The shard's period; None where it is due in every round."""
        return None if not self.periods or self.period_of[shard] == EVERY_ROUND else self.periods[self.period_of[shard]]


class _Together(Cadence, frozen=True):
    """All shards are due in every round: rounds and versions are the same numbers. Asked several times for each shard
    and step, so it asks nothing further (I13)."""

    together: ClassVar[bool] = True  # no call

    def due(self, shard: int, round: int) -> bool:
        return True

    def next_due(self, shard: int, round: int) -> int:
        return round

    def updates_before(self, shard: int, round: int) -> int:
        return round

    def round_of(self, shard: int, version: int) -> int:
        return version

    def begun(self, shard: int, version: int) -> int:
        return version

    def changes(self, shard: int, round: int, later: int) -> bool:
        return round != later

    def witness(self, round: int) -> int:
        return 0


TOGETHER = _Together()


def cycle(periods: Iterable[Period]) -> int:
    """The number of rounds after which the pattern of due shards repeats."""
    return math.lcm(*(period.every for period in periods))


def first_empty(periods: Sequence[Period]) -> int | None:
    """The first round in which no period is due; None if there is no such round."""
    return next((round for round in range(cycle(periods)) if not any(period.has(round) for period in periods)), None)


def cut_evenly(sizes: Sequence[int], parts: int) -> list[int]:
    """Cut a sequence of items into `parts` runs of about equal size, none empty; return each item's run.

    Example: sizes [1, 1, 2, 2, 2], parts 2: [0, 0, 0, 1, 1]. Needs at least as many items as parts.
    """
    reach = [0]
    for size in sizes:
        reach.append(reach[-1] + size)
    cuts = [0]
    for part in range(1, parts):
        possible = range(cuts[-1] + 1, len(sizes) - (parts - part) + 1)
        cuts.append(min(possible, key=lambda cut: abs(reach[cut] * parts - reach[-1] * part)))
    return [sum(cut <= index for cut in cuts) - 1 for index in range(len(sizes))]
