"""How fast the links of servers are, from what members say of the bytes that went through them.

Each beat of a worker (or an aggregator) says for each server how many bytes it has sent there, and for how many seconds
some were on their way: bytes over busy seconds is what the link gave. Only ratios count: a worker's own slow link makes
all of its figures small. For each server the median of the workers' ratios is taken, so a few who lie change nothing. A
server says the same of what it has sent, of itself alone: it can only make itself slower by that, never faster, because
the lower of the two counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from rallypoint.core.plan.topology import clamped

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
