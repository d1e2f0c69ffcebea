"""Which shards a round is for: all of them, or one fragment's in turn (streaming DiLoCo; Douillard et al., 2025).

Where shards take turns a round is called a *tick*. A shard's own version counts its own updates; workers and the
coordinator count ticks. One version of a shard is right for several ticks: from the one after its last update up to the
tick at which it contributes next, and by that one it is known to whoever counts ticks. With one fragment ticks and
versions are the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

EVERY_TICK = -1  # the fragment of shards that take no turns: buffers


class Cadence(msgspec.Struct, frozen=True):
    """The turns of a job's shards.

    All functions are total: a tick or version below 0 (nothing yet) stays as it is, and those after the end, which come
    never, count on as if everything were due.

    Attributes:
        fragments: F; fragment f contributes at ticks f, f + F, f + 2F, ..., and everything at the last one.
        ticks: how many there are.
        fragment_of: each shard's fragment, or EVERY_TICK; of no meaning when F is 1.
    """

    fragments: int = 1
    ticks: int = 0
    fragment_of: tuple[int, ...] = ()

    def due(self, shard: int, tick: int) -> bool:
        """Does the shard take contributions at this tick?"""
        return self.next_due(shard, tick) == tick

    def next_due(self, shard: int, tick: int) -> int:
        """The first tick from `tick` on at which the shard takes contributions; from the end on, `tick`."""
        if tick < 0 or tick >= self.ticks or self._always(shard):
            return tick
        return min(tick + (self.fragment_of[shard] - tick) % self.fragments, self.ticks - 1)

    def updates_before(self, shard: int, tick: int) -> int:
        """The shard's own version that is right for a tick; `ticks` is the end of the job."""
        if tick <= 0 or self._always(shard):
            return tick
        if tick >= self.ticks:
            return self.updates_before(shard, self.ticks - 1) + 1 + tick - self.ticks
        return max(0, -((self.fragment_of[shard] - tick) // self.fragments))

    def updates(self, shard: int) -> int:
        """The shard's own version at the end of the job."""
        return self.updates_before(shard, self.ticks)

    def tick_of(self, shard: int, version: int) -> int:
        """The tick at which the shard, at its own version `version`, takes contributions next; `ticks` after the last.

        That version is right for that tick, and for those before it back to the one after the update that made it.
        """
        if version < 0 or self._always(shard):
            return version
        if (beyond := version - self.updates(shard)) >= 0:
            return self.ticks + beyond
        return min(self.fragment_of[shard] + version * self.fragments, self.ticks - 1)

    def begun(self, shard: int, version: int) -> int:
        """The first tick that this version of the shard is right for."""
        return version if version <= 0 else self.tick_of(shard, version - 1) + 1

    def changes(self, shard: int, tick: int, later: int) -> bool:
        """Does the shard have an update between these ticks?"""
        return self.updates_before(shard, tick) != self.updates_before(shard, later)

    def witness(self, tick: int) -> int:
        """The shard whose update stands for the tick in the ledger: the first that is due."""
        return 0 if self.fragments == 1 else self.fragment_of.index(tick % self.fragments)

    def _always(self, shard: int) -> bool:
        return self.fragments == 1 or self.fragment_of[shard] == EVERY_TICK


TOGETHER = Cadence()


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
