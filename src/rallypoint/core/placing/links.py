"""Places shards anew when the links of servers turn out to be other than the placement takes them for.

Moving costs: shards are copied, and a step is computed once more. So it is done only if links are busy for a part of
the time, if the fullest link would take a seventh less, if the same has been measured for two seconds, and not while
shards move. After each such move the next one waits: 10 s, 20 s, ... up to five minutes. No measurement can make shards
move all the time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rallypoint.core.layout import Shard
from rallypoint.core.placing.placement import loads_of, place
from rallypoint.core.plan.topology import clamped, gain, weights_of
from rallypoint.core.view import Member, View

# ---- How fast the links of servers are, from what members say of the bytes that went through them ----
#
# Each beat of a worker (or an aggregator) says for each server how many bytes it has sent there, and for how many
# seconds some were on their way: bytes over busy seconds is what the link gave. Only ratios count: a worker's own slow
# link makes all of its figures small. For each server the median of the workers' ratios is taken, so a few who lie
# change nothing. A server says the same of what it has sent, of itself alone: it can only make itself slower by that,
# never faster, because the lower of the two counts.

_DECAY = 0.8  # of what earlier beats said, with each beat: half of it counts after three
_MOMENT = 0.01  # a link that was busy for less of the time says nothing
MOST_RATE = 1e15  # bytes a second
_LEAST_RATE = 1.0  # bytes a second: ratios of what is less could vanish
_MOST_SERVERS = 1000  # of which one member's words are kept: as many as a beat may name
_ALIKE = 1.1  # a link that differs less from the median one counts as that


@dataclass(frozen=True, slots=True)
class Paced:
    """What one side of a link has sent, summed over beats: bytes a second, and the share of the time in which some were
    on their way; and how many beats count."""

    rate: float = 0.0
    busy: float = 0.0
    beats: float = 0.0

    def plus(self, other: Paced) -> Paced:
        """Both, of which this one is older and counts less."""
        return Paced(
            self.rate * _DECAY + other.rate, self.busy * _DECAY + other.busy, self.beats * _DECAY + other.beats
        )


@dataclass(slots=True)
class LinkSpeeds:
    """What members have said since the last `clear`.

    least: a member's figures count from so many of its beats on. (After four, (1 - 0.8 ** 4) / 0.2 = 2.95 count.)
    """

    least: float = 2.9
    _said: dict[str, dict[str, Paced]] = field(default_factory=dict)  # by who says it, then by server
    _beats: dict[str, float] = field(default_factory=dict)

    def heard(self, member: str, paced: Mapping[str, tuple[float, float]]) -> None:
        """A member's beat says what it has sent: see `core.protocol.Beat`. What cannot be is ignored."""
        if not paced and member not in self._said:
            return
        said = self._said.setdefault(member, {})
        self._beats[member] = self._beats.get(member, 0.0) * _DECAY + 1.0
        for server in said.keys() | paced.keys():
            if server not in said and len(said) >= _MOST_SERVERS:
                continue  # it has made names up
            rate, busy = paced.get(server, (0.0, 0.0))
            if 0.0 <= rate <= MOST_RATE and 0.0 <= busy <= 1.0:  # (not NaN)
                said[server] = said.get(server, Paced()).plus(Paced(rate, busy, 1.0))

    def forget(self, member: str) -> None:
        """The member is gone: what it said and what was said of it."""
        self._said.pop(member, None)
        self._beats.pop(member, None)
        for said in self._said.values():
            said.pop(member, None)

    def clear(self) -> None:
        """Forget everything: what was said until now is of another placement."""
        self._said.clear()
        self._beats.clear()

    def speeds(self, servers: Collection[str]) -> dict[str, float]:
        """How fast each of these servers' links is, compared with the median one; only those of which enough is known.
        """
        up = self._by_workers(servers)
        own = {server: self._rates(server).get(server, 0.0) for server in servers}
        down = _relative({server: rate for server, rate in own.items() if rate > 0})
        found = {server: min(speed, down.get(server, speed)) for server, speed in up.items()}
        return {server: clamped(speed) for server, speed in _relative(found).items()}

    def busiest(self, servers: Collection[str]) -> float:
        """The share of the time in which the busiest of these servers' links carried something; 0 if not known."""
        found = [[said[server] for _, said in self._others(servers) if server in said] for server in servers]
        return max((median(one.busy / one.beats for one in paced) for paced in found if paced), default=0.0)

    def _by_workers(self, servers: Collection[str]) -> dict[str, float]:
        heard: dict[str, list[float]] = {}
        for member, _ in self._others(servers):
            rates = {server: rate for server, rate in self._rates(member).items() if server in servers}
            if len(rates) > 1:
                for server, ratio in _relative(rates).items():
                    heard.setdefault(server, []).append(ratio)
        return {server: median(ratios) for server, ratios in heard.items()}

    def _others(self, servers: Collection[str]) -> list[tuple[str, dict[str, Paced]]]:
        """Who has said something, without servers: they send to one another for reasons of their own."""
        return [(member, said) for member, said in self._said.items() if member not in servers]

    def _rates(self, member: str) -> dict[str, float]:
        """Bytes a busy second, by server."""
        if self._beats.get(member, 0.0) < self.least:
            return {}
        said = self._said.get(member, {})
        return {
            server: paced.rate / paced.busy
            for server, paced in said.items()
            if paced.rate >= _LEAST_RATE and paced.busy > _MOMENT * paced.beats
        }


def alike(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """True if both say nearly the same of the same servers."""
    return one.keys() == other.keys() and all(1 / _ALIKE <= one[s] / other[s] <= _ALIKE for s in one)


def settled(speeds: Mapping[str, float]) -> dict[str, float]:
    """Speeds as they are placed by: two digits, and those near the median one are like it."""
    near = {server for server, speed in speeds.items() if 1 / _ALIKE <= speed <= _ALIKE}
    return {server: 1.0 if server in near else float(f"{speed:.2g}") for server, speed in speeds.items()}


def _relative(rates: Mapping[str, float]) -> dict[str, float]:
    """The rates over their median. (Of two it is the higher: the other is the slow one.)"""
    if not rates:
        return {}
    ordered = sorted(rates.values())
    middle = ordered[len(ordered) // 2]
    return {server: rate / middle for server, rate in rates.items()}


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
