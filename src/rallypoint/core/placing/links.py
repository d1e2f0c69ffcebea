"""Places shards anew when the links of servers turn out to be other than the placement takes them for.

Moving costs: shards are copied, and a step is computed once more. So it is done only if links are busy for a part of
the time, if the fullest link would take a seventh less, if the same has been measured for two seconds, and not while
shards move. After each such move the next one waits: 10 s, 20 s, ... up to five minutes. No measurement can make shards
move all the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.layout import Shard
from rallypoint.core.placing.placement import loads_of, place
from rallypoint.core.plan.measured import LinkSpeeds, alike, settled
from rallypoint.core.plan.topology import gain, weights_of
from rallypoint.core.view import Member, View

_BUSY = 0.15  # of the time, the busiest link: else steps do not wait for links
_WORTH_IT = 1.15  # the fullest link takes so many times as long as it would
_LONGEST_REST_S = 300.0


@dataclass(slots=True)
class MeasuredLinks:
    """What is known of the links of servers, and when shards were moved for it. Every `now` is in seconds.

    speeds: what members say.
    settle_s: speeds count when they have been measured for so many seconds.
    rest_s: after a move the next one waits so long; it doubles with each move.
    """

    speeds: LinkSpeeds = field(default_factory=LinkSpeeds)
    settle_s: float = 2.0
    rest_s: float = 10.0
    _homes: Mapping[int, str] = field(default_factory=dict)
    _wished: tuple[float, dict[str, float]] | None = None  # speeds that are worth a move, since when
    _rested: float = 0.0  # no move before this time

    def look(
        self, view: View, caught_up: set[int], shards: Sequence[Shard], servers: Mapping[str, Member], now: float,
        racks: Mapping[str, float] | None = None,
    ) -> dict[str, float] | None:
        """Return the speeds by which shards are to be placed from now on; None: as before.

        `servers` are those on which shards may be, `caught_up` the shards whose backups hold them. `racks`: see
        `weights_of`.
        """
        if view.primary != self._homes or view.backup.keys() - caught_up or view.incoming:
            self._homes, self._wished = view.primary, None
            self.speeds.clear()  # shards have moved, or do now: what was measured was of other traffic
            return None
        wanted = None if now < self._rested else self._wanted(view, shards, servers, racks)
        if wanted is None:
            self._wished = None
            return None
        if self._wished is None or not alike(wanted, self._wished[1]):
            self._wished = now, wanted
        if now < self._wished[0] + self.settle_s:
            return None
        self._rested, self.rest_s = now + self.rest_s, min(2 * self.rest_s, _LONGEST_REST_S)
        self._wished = None
        return wanted

    def _wanted(
        self, view: View, shards: Sequence[Shard], servers: Mapping[str, Member], racks: Mapping[str, float] | None
    ) -> dict[str, float] | None:
        """The speeds by which a placement would be worth a move; None if there are none."""
        if len(servers) < 2 or self.speeds.busiest(servers) < _BUSY:
            return None
        found = settled(self.speeds.speeds(servers))
        if not found:
            return None
        wanted = {**{server: speed for server, speed in view.speeds.items() if server in servers}, **found}
        weights = weights_of(servers, wanted, racks)
        speeds = weights or dict.fromkeys(servers, 1.0)
        placed = place(shards, sorted(servers), view.primary, weights)
        before, after = loads_of(shards, view.primary), loads_of(shards, placed)
        if before.keys() - servers.keys():  # a server is being emptied
            return None
        return wanted if gain(before, speeds) >= _WORTH_IT * gain(after, speeds) else None


def said_of(speeds: Mapping[str, float]) -> str:
    """A sentence for people, about speeds by which shards are placed now."""
    other = [f"{server}'s {speed:.2g}" for server, speed in sorted(speeds.items()) if speed != 1.0]
    if not other:
        return "shards move: the links of all servers are alike"
    return f"shards move: the links of servers, compared with the median one: {', '.join(other)}"
