"""How many of the bytes each server gets: as much as its link can carry, compared with the others.

A weight is a link's speed over that of the median server. Members say how fast their links are, and measure those of
servers; none may starve the others by what it says, so each weight has a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median

from rallypoint.core.view import Member

_LEAST_MBIT = 1e-3  # who says less says nothing
LEAST, MOST = 1 / 16, 16.0  # of a weight: what one server can be worth, compared with the median


def weights_of(
    servers: Mapping[str, Member], measured: Mapping[str, float], racks: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The weight of each server, by id; {} if all are alike. What was `measured` counts before what was told.

    What a host's link carries is shared by the servers that are on it. A server of which nothing is known is taken for
    the median one. `racks`: by what the links of a rack's servers count, for its uplink's sake; 1 if it is not there.
    """
    found = {id: clamped(speed) for id, speed in _relative(servers, measured)[0].items()}
    if racks:
        found = {id: clamped(weight * racks.get(servers[id].near, 1.0)) for id, weight in found.items()}
    return {} if len(set(found.values())) < 2 else found


def mbit_of(servers: Mapping[str, Member], measured: Mapping[str, float]) -> dict[str, float]:
    """Mbit/s of each server's link, as it was measured or told, else as the median one's; {} if nobody was told any."""
    speeds, middle = _relative(servers, measured)
    return {id: clamped(speed) * middle for id, speed in speeds.items()} if middle else {}


def _relative(servers: Mapping[str, Member], measured: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Each server's link compared with the median one that was told; and that one's Mbit/s (0: none was told)."""
    sharing = Counter(_machine(member) for member in servers.values())
    told = {
        id: member.link_mbit / sharing[_machine(member)]
        for id, member in servers.items()
        if member.link_mbit >= _LEAST_MBIT
    }
    middle = median(told.values()) if told else 0.0
    return {id: measured.get(id) or (told[id] / middle if id in told else 1.0) for id in servers}, middle


def clamped(weight: float) -> float:
    """The weight within its limits."""
    return min(MOST, max(LEAST, weight))


def gain(load: Mapping[str, float], speeds: Mapping[str, float]) -> float:
    """How many times longer the fullest link takes than it has to: 1.0 if bytes go to servers as their `speeds` are.

    `load` is what each of these servers gets now (in any unit), `speeds` what its link carries.
    """
    everything = sum(load[server] for server in speeds)
    if not everything:
        return 1.0
    slowest = max(load[server] / speed for server, speed in speeds.items())
    return slowest * sum(speeds.values()) / everything


def _machine(member: Member) -> tuple[str, str]:
    """What tells one machine's servers from another's: hosts may have the same name, and addresses be loopback's."""
    return member.host, member.address.rpartition(":")[0]
