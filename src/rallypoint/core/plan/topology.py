"""What a user tells of the machines: each host's rack, and how fast its link is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Annotated

import msgspec

from rallypoint.core.typed import Name, build_now
from rallypoint.core.view import Member
from rallypoint.errors import meant

MOST_MBIT = 1e9
Mbit = Annotated[float, msgspec.Meta(ge=0.0, le=MOST_MBIT)]


class HostFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host's rack ("": not told), and how many Mbit/s its link carries in each direction (0: not told)."""

    rack: Name = ""
    link_mbit: Mbit = 0.0


class RackFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many Mbit/s a rack's uplink carries in each direction (0: not told, it limits nothing)."""

    uplink_mbit: Mbit = 0.0


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is told of each host, by its name or its address, and of each rack. A host that is not in it is like most
    others."""

    hosts: dict[Name, HostFacts] = {}
    racks: dict[Name, RackFacts] = {}

    @property
    def uplinks(self) -> dict[str, float]:
        """Rack -> Mbit/s of its uplink, where that was told."""
        return {rack: facts.uplink_mbit for rack, facts in self.racks.items() if facts.uplink_mbit}

    def of(self, member: Member) -> HostFacts:
        """What is told of the member's host: under the name that the host gives itself, or the address at which the
        member listens."""
        by_name = self.hosts.get(member.host)
        return self.hosts.get(_host_of(member.address), HostFacts()) if by_name is None else by_name

    def nowhere(self, members: Iterable[Member]) -> list[str]:
        """A sentence about each told host or rack that none of these members is in, with the nearest name that one
        has; and one if uplinks cannot count."""
        everybody = list(members)
        here = {one.host for one in everybody} | {_host_of(one.address) for one in everybody if one.address}
        racks = {one.near for one in everybody} - {""}
        said = [
            f"the topology tells of {host}, and no worker or server is on it{meant(host, sorted(here))}"
            for host in self.hosts if host not in here
        ]  # fmt: skip
        said += [
            f"the topology tells of rack {rack}, and no worker or server is in it{meant(rack, sorted(racks))}"
            for rack in self.racks if rack not in racks
        ]  # fmt: skip
        if self.uplinks and not any(one.link_mbit for one in everybody if one.address):
            said.append("the topology tells uplink_mbit and no server's link_mbit: without that, uplinks do not count")
        return said

    def told(self, member: Member) -> Member:
        """The member with what is told of its host, where it was not started with another word."""
        if not self.hosts:
            return member
        facts = self.of(member)
        return msgspec.structs.replace(
            member, near=member.near or facts.rack, link_mbit=member.link_mbit or facts.link_mbit
        )


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


build_now(Topology)


# How many of the bytes each server gets: as much as its link can carry, compared with the others.
#
# A weight is a link's speed over that of the median server. Members say how fast their links are, and measure those of
# servers; none may starve the others by what it says, so each weight has a limit.

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
