"""A host of the topology that nobody is on is said, with the nearest name."""

from __future__ import annotations

from rallypoint.core.plan.topology import HostFacts, Topology
from rallypoint.core.view import Member

MEMBERS = Member("worker0", "node1"), Member("server0", "node2", "10.0.0.7:4711")


def test_a_misspelt_host_is_said_with_the_name_that_is_meant() -> None:
    topology = Topology({"node1": HostFacts("a"), "10.0.0.7": HostFacts("b"), "noed2": HostFacts("b")})
    assert topology.nowhere(MEMBERS) == [
        "the topology tells of noed2, and no worker or server is on it: did you mean node2?"
    ]


def test_nothing_is_said_of_hosts_by_name_or_address_that_somebody_is_on() -> None:
    assert Topology({"node1": HostFacts("a"), "10.0.0.7": HostFacts("b")}).nowhere(MEMBERS) == []
    assert Topology().nowhere(MEMBERS) == []
