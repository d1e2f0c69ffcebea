"""Decides by how much less the links of servers behind narrow uplinks count when shards are placed.

It is decided anew with each view in which servers have come or gone: shards move then in any case. While the same
servers are here, workers that come and go change it only if the fullest link would take a seventh less for ten seconds;
after each such move the next one waits: 30 s, 60 s, ... up to ten minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from rallypoint.core.plan.topology import mbit_of
from rallypoint.core.view import Assignment, Member

_WORTH_IT = 1.15  # the fullest link takes so many times as long as it would
_LONGEST_REST_S = 600.0
_HALVINGS = 60
_ROUNDING = 1e-9


# How many of the bytes servers behind a rack's narrow uplink get.
#
# In a synchronous step each client (a worker, or an aggregator for all of its workers) sends every shard to its server
# and gets it back. Of C clients c are in a rack, whose servers have a share X of the bytes. Through its uplink go, in
# each direction and in units of K (the bytes of all parameters),
#
#     c (1 - X)        what clients inside push to servers outside (the other way: the versions that they get)
#     (C - c) X        the versions that clients outside get from servers inside (the other way: what they push)
#     X                with two copies: what servers inside send to backups outside
#
# Servers' own links carry C X, spread over them. The time of a step is that of the fullest link. Each of these times is
# linear in X, so for a given time there is a least and a greatest share of every rack; the best time is the least one
# for which shares that sum up to 1 are within these bounds. It is found by bisection.


@dataclass(frozen=True, slots=True)
class Rack:
    """A rack: its `clients`, Mbit/s of its servers' links together, and of its uplink (0: not told, it limits nothing).
    """

    clients: int
    speed: float
    uplink_mbit: float = 0.0


Racks = Mapping[str, Rack]


def shares(racks: Racks, copies: int = 1, floor: float = 0.0) -> dict[str, float]:
    """The share of all bytes that each rack's servers should have; they sum up to 1. At least one rack has servers.

    Within what the best time allows, racks get bytes as their servers' links are. `floor`: no step takes less than
    this (K / Mbit/s), for reasons that are not ours; a placement need not be better than that.
    """
    clients, even = sum(rack.clients for rack in racks.values()), _even(racks)
    if not clients:
        return even
    fast, slow = floor, max(floor, duration(racks, even, copies)) * (1 + _ROUNDING)
    if _fits(racks, clients, copies, floor):
        slow = floor
    for _ in range(_HALVINGS):
        middle = (fast + slow) / 2
        fast, slow = (fast, middle) if _fits(racks, clients, copies, middle) else (middle, slow)
    bounds = {name: _bounds(rack, clients, copies, slow) for name, rack in racks.items()}
    return _filled(racks, {name: bound for name, bound in bounds.items() if bound is not None})


def duration(racks: Racks, shares: Mapping[str, float], copies: int = 1) -> float:
    """The time of the fullest link in a step with these shares, in K / (Mbit/s)."""
    clients = sum(rack.clients for rack in racks.values())
    times = [0.0]
    for name, rack in racks.items():
        share = shares.get(name, 0.0)
        times.append(clients * share / rack.speed if share else 0.0)
        if rack.uplink_mbit:
            times.append((rack.clients + _slope(rack, clients, copies) * share) / rack.uplink_mbit)
    return max(times)


def aggregated(racks: Racks) -> dict[str, Rack]:
    """The racks, as they would be with one aggregator in each that has several clients and a narrow uplink."""
    return {
        name: Rack(1 if rack.uplink_mbit and rack.clients > 1 else rack.clients, rack.speed, rack.uplink_mbit)
        for name, rack in racks.items()
    }


def factors(racks: Racks, wanted: Mapping[str, float]) -> dict[str, float]:
    """By what a server's link counts in each rack, so that racks get the shares `wanted`; at most 1."""
    even = _even(racks)
    found = {name: wanted.get(name, 0.0) / even[name] for name, rack in racks.items() if rack.speed}
    most = max(found.values())
    return {name: factor / most for name, factor in found.items()}


def _slope(rack: Rack, clients: int, copies: int) -> int:
    """By how much more the uplink carries for each share of the bytes inside; it may be less than 0."""
    return clients - 2 * rack.clients + copies - 1


def _even(racks: Racks) -> dict[str, float]:
    everything = fsum(rack.speed for rack in racks.values())
    return {name: rack.speed / everything for name, rack in racks.items()}


def _bounds(rack: Rack, clients: int, copies: int, time: float) -> tuple[float, float] | None:
    """The least and the greatest share with which the rack's links take no longer than `time`; None if none does."""
    least, most = 0.0, min(1.0, time * rack.speed / clients)
    room, slope = time * rack.uplink_mbit - rack.clients, _slope(rack, clients, copies)
    if rack.uplink_mbit:
        if slope > 0:
            most = min(most, room / slope)
        elif slope < 0:
            least = max(least, room / slope)
        elif room < 0:
            return None
    return (least, most) if least <= most else None


def _fits(racks: Racks, clients: int, copies: int, time: float) -> bool:
    bounds = [_bounds(rack, clients, copies, time) for rack in racks.values()]
    found = [bound for bound in bounds if bound is not None]
    return len(found) == len(bounds) and fsum(low for low, _ in found) <= 1.0 <= fsum(high for _, high in found)


def _filled(racks: Racks, bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Shares within the bounds, as near to those of the racks' links as these allow; they sum up to 1."""
    even = _even(racks)

    def at(level: float) -> dict[str, float]:
        return {name: min(high, max(low, level * even[name])) for name, (low, high) in bounds.items()}

    level = _least(lambda level: fsum(at(level).values()) >= 1.0, 1.0 / min(s for s in even.values() if s))
    found = at(level)
    total = fsum(found.values())
    return {name: share / total for name, share in found.items()}


def _least(enough: Callable[[float], bool], most: float) -> float:
    """The least number from 0 to `most` that is enough."""
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# What is decided.


@dataclass(frozen=True, slots=True)
class Situation:
    """Who is here: servers that may have shards, how fast their links were measured (see `View.speeds`), the workers
    with their replicas, the aggregators and who uses them; `copies` of each shard."""

    servers: Mapping[str, Member]
    speeds: Mapping[str, float]
    workers: Sequence[Member]
    assignments: Sequence[Assignment]
    aggregators: Mapping[str, Member] = field(default_factory=dict)
    aggregator_of: Mapping[str, str] = field(default_factory=dict)
    copies: int = 1

    def racks(self, uplinks: Mapping[str, float]) -> dict[str, Rack]:
        """Everybody by rack; {} if there are no uplinks, or if nobody was told how fast servers' links are."""
        mbit = mbit_of(self.servers, self.speeds) if uplinks and self.assignments else {}
        if not mbit:
            return {}
        computing = [worker for worker, own in self.assignments[-1].replicas.items() if own]
        near = {one.id: one.near for one in (*self.workers, *self.aggregators.values())}
        # The servers' clients in each rack: workers that compute, or the aggregators that they use
        served = {self.aggregator_of.get(worker, worker) for worker in computing if worker in near}
        clients = Counter(near[client] for client in served)
        speed = dict.fromkeys([*clients, *uplinks], 0.0)
        for id, server in self.servers.items():
            speed[server.near] = speed.get(server.near, 0.0) + mbit[id]
        return {name: Rack(clients[name], speed[name], uplinks.get(name, 0.0)) for name in sorted(speed)}

    @property
    def floor(self) -> float:
        """The least time of a step, in K / (Mbit/s): that of the slowest worker's own link."""
        return 1.0 / min((one.link_mbit for one in self.workers if one.link_mbit >= 1e-3), default=float("inf"))

    @property
    def processes(self) -> frozenset[tuple[str, int]]:
        """The servers' ids and incarnations."""
        return frozenset((id, server.incarnation) for id, server in self.servers.items())


@dataclass(slots=True)
class Uplinks:
    """What was decided. Every `now` is in seconds.

    told: rack -> Mbit/s of its uplink.
    settle_s: another decision counts when it has been worth it for so many seconds.
    rest_s: after a move the next one waits so long; it doubles with each move.
    """

    told: Mapping[str, float] = field(default_factory=dict)
    settle_s: float = 10.0
    rest_s: float = 30.0
    _factors: dict[str, float] = field(default_factory=dict)
    _of: frozenset[tuple[str, int]] = frozenset()
    _wished: float | None = None  # since when a move is worth it
    _rested: float = 0.0  # no move before this time

    def factors(self, now: Situation, *, anew: bool = False) -> dict[str, float]:
        """Rack -> by what the links of its servers count; {}: no uplink matters. `anew`: nothing is placed yet."""
        if anew or self._of != now.processes:
            self._of, self._factors = now.processes, self._wanted(now)
        return self._factors

    def look(self, here: Situation, now: float) -> str:
        """Return why shards are placed anew from now on; "": they stay."""
        if not self.told or now < self._rested or self._of != here.processes:
            self._wished = None
            return ""
        racks, wanted = here.racks(self.told), self._wanted(here)
        if not racks or self._time(here, racks, self._factors) < _WORTH_IT * self._time(here, racks, wanted):
            self._wished = None
            return ""
        self._wished = now if self._wished is None else self._wished
        if now < self._wished + self.settle_s:
            return ""
        self._rested, self.rest_s = now + self.rest_s, min(2 * self.rest_s, _LONGEST_REST_S)
        self._wished, self._factors = None, wanted
        return "; ".join(["shards move: workers have come or gone", *self._placed(here, racks)])

    def said(self, here: Situation, *, aggregates: bool) -> list[str]:
        """Sentences for people about racks whose uplink matters, at the start. `aggregates`: aggregators may help."""
        racks = here.racks(self.told)
        return [*self._placed(here, racks), *(self._advice(here, racks) if aggregates else [])]

    def _placed(self, here: Situation, racks: Mapping[str, Rack]) -> list[str]:
        if not self._factors:
            return []
        even, wanted = _shares(racks, {}), _shares(racks, self._factors)
        gain = duration(racks, even, here.copies) / max(here.floor, duration(racks, wanted, here.copies))
        return [
            f"rack {name} has an uplink of {rack.uplink_mbit:g} Mbit/s: its servers get {wanted[name]:.0%} of the "
            f"bytes (by their own links it would be {even[name]:.0%}); the fullest link takes {gain:.2g} times less"
            for name, rack in racks.items() if rack.uplink_mbit and rack.speed and self._factors.get(name, 1.0) < 1.0
        ]  # fmt: skip

    def _advice(self, here: Situation, racks: Mapping[str, Rack]) -> list[str]:
        found = list[str]()
        for name, rack in racks.items():
            if not rack.uplink_mbit or rack.clients < 2:
                continue
            other = {**racks, name: aggregated({name: rack})[name]}
            now = self._time(here, racks, self._wanted(here))
            gain = now / max(here.floor, duration(other, shares(other, here.copies, here.floor), here.copies))
            if gain >= _WORTH_IT:
                found.append(
                    f"rack {name} has an uplink of {rack.uplink_mbit:g} Mbit/s for {rack.clients} workers: with an "
                    f"aggregator in it the fullest link takes {gain:.2g} times less (--aggregators)"
                )
        return found

    def _wanted(self, here: Situation) -> dict[str, float]:
        """The factors for these members; {} if it is not worth to place by them."""
        racks = here.racks(self.told)
        if not any(rack.clients for rack in racks.values()):
            return {}
        found = factors(racks, shares(racks, here.copies, here.floor))
        worth = self._time(here, racks, {}) >= 1.02 * self._time(here, racks, found)
        return found if worth else {}

    def _time(self, here: Situation, racks: Mapping[str, Rack], by: Mapping[str, float]) -> float:
        return max(here.floor, duration(racks, _shares(racks, by), here.copies))


def _shares(racks: Mapping[str, Rack], by: Mapping[str, float]) -> dict[str, float]:
    """The share of the bytes of each rack that follows from its factor."""
    links = {name: rack.speed * by.get(name, 1.0) for name, rack in racks.items()}
    everything = sum(links.values())
    return {name: link / everything for name, link in links.items()}
