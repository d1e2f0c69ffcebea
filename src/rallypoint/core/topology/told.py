"""What a user tells of the machines: each host's rack, and how fast its link is."""

from __future__ import annotations

from collections.abc import Iterable
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
