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

EVERY_TICK = -1  # in place of a turn: shards that take none, which are buffers


class Turn(msgspec.Struct, frozen=True):
    """Due at tick `first`, which is below `every`, and every so many ticks from there."""

    every: int
    first: int

    def has(self, tick: int) -> bool:
        """Is it due at this tick, were there no end?"""
        return tick % self.every == self.first


class Cadence(msgspec.Struct, frozen=True):
    """The turns of a job's shards.

    All functions are total: a tick or version below 0 (nothing yet) stays as it is, and those after the end, which come
    never, count on as if everything were due.

    At every tick some shard with a turn has to be due (see `first_empty`): nobody would wait for the others otherwise.

    Attributes:
        turns: when shards are due, each some shard's; everything is at the last tick. None: all are due in every round.
        ticks: how many there are.
        turn_of: the index of each shard's turn, or EVERY_TICK; of no meaning where there are no turns.
    """

    turns: tuple[Turn, ...] = ()
    ticks: int = 0
    turn_of: tuple[int, ...] = ()

    @property
    def together(self) -> bool:
        """Are all shards due in every round?"""
        return not self.turns

    def due(self, shard: int, tick: int) -> bool:
        """Does the shard take contributions at this tick?"""
        return self.next_due(shard, tick) == tick

    def next_due(self, shard: int, tick: int) -> int:
        """The first tick from `tick` on at which the shard takes contributions; from the end on, `tick`."""
        if tick < 0 or tick >= self.ticks or (turn := self._turn(shard)) is None:
            return tick
        return min(tick + (turn.first - tick) % turn.every, self.ticks - 1)

    def updates_before(self, shard: int, tick: int) -> int:
        """The shard's own version that is right for a tick; `ticks` is the end of the job."""
        if tick <= 0 or (turn := self._turn(shard)) is None:
            return tick
        if tick >= self.ticks:
            return self.updates_before(shard, self.ticks - 1) + 1 + tick - self.ticks
        return max(0, -((turn.first - tick) // turn.every))

    def updates(self, shard: int) -> int:
        """The shard's own version at the end of the job."""
        return self.updates_before(shard, self.ticks)

    def tick_of(self, shard: int, version: int) -> int:
        """The tick at which the shard, at its own version `version`, takes contributions next; `ticks` after the last.

        That version is right for that tick, and for those before it back to the one after the update that made it.
        """
        if version < 0 or (turn := self._turn(shard)) is None:
            return version
        if (beyond := version - self.updates(shard)) >= 0:
            return self.ticks + beyond
        return min(turn.first + version * turn.every, self.ticks - 1)

    def begun(self, shard: int, version: int) -> int:
        """The first tick that this version of the shard is right for."""
        return version if version <= 0 else self.tick_of(shard, version - 1) + 1

    def changes(self, shard: int, tick: int, later: int) -> bool:
        """Does the shard have an update between these ticks?"""
        return self.updates_before(shard, tick) != self.updates_before(shard, later)

    def witness(self, tick: int) -> int:
        """The shard whose update stands for the tick in the ledger: the first with a turn that is due."""
        if tick < 0 or tick >= self.ticks - 1:
            return 0  # everything is
        return min((self.turn_of.index(index) for index, turn in enumerate(self.turns) if turn.has(tick)), default=0)

    def _turn(self, shard: int) -> Turn | None:
        """None where the shard is due at every tick."""
        return None if not self.turns or self.turn_of[shard] == EVERY_TICK else self.turns[self.turn_of[shard]]


TOGETHER = Cadence()


def cycle(turns: Iterable[Turn]) -> int:
    """After how many ticks everything begins anew."""
    return math.lcm(*(turn.every for turn in turns))


def first_empty(turns: Sequence[Turn]) -> int | None:
    """The first tick at which nothing would be due; None if there is none."""
    return next((tick for tick in range(cycle(turns)) if not any(turn.has(tick) for turn in turns)), None)


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
