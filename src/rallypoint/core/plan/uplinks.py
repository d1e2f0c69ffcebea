"""How many of the bytes servers behind a rack's narrow uplink get.

In a synchronous step each client (a worker, or an aggregator for all of its workers) sends every shard to its server
and gets it back. Of C clients c are in a rack, whose servers have a share X of the bytes. Through its uplink go, in
each direction and in units of K (the bytes of all parameters),

    c (1 - X)        what clients inside push to servers outside (the other way: the versions that they get)
    (C - c) X        the versions that clients outside get from servers inside (the other way: what they push)
    X                with two copies: what servers inside send to backups outside

Servers' own links carry C X, spread over them. The time of a step is that of the fullest link. Each of these times is
linear in X, so for a given time there is a least and a greatest share of every rack; the best time is the least one for
which shares that sum up to 1 are within these bounds. It is found by bisection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import fsum

_HALVINGS = 60
_ROUNDING = 1e-9


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


def clients_of(workers: Iterable[str], rack_of: Mapping[str, str], aggregator_of: Mapping[str, str]) -> Counter[str]:
    """How many clients servers have in each rack: `workers` that compute, or the aggregators that they use."""
    return Counter(rack_of[client] for client in {aggregator_of.get(worker, worker) for worker in workers})


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
