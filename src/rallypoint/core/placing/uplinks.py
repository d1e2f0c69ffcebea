"""Decides by how much less the links of servers behind narrow uplinks count when shards are placed.

It is decided anew with each view in which servers have come or gone: shards move then in any case. While the same
servers are here, workers that come and go change it only if the fullest link would take a seventh less for ten seconds;
after each such move the next one waits: 30 s, 60 s, ... up to ten minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.plan.topology import mbit_of
from rallypoint.core.plan.uplinks import Rack, aggregated, clients_of, duration, factors, shares
from rallypoint.core.view import Assignment, Member

_WORTH_IT = 1.15  # the fullest link takes so many times as long as it would
_LONGEST_REST_S = 600.0


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
        clients = clients_of([worker for worker in computing if worker in near], near, self.aggregator_of)
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
