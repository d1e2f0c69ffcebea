"""Links of simulated servers that are not alike and change: what members say of them, and how soon shards move."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.placing.links import MeasuredLinks
from rallypoint.core.plan.measured import LinkSpeeds
from rallypoint.core.protocol import Beat
from rallypoint.testing.simulation.network import Node
from rallypoint.testing.simulation.policies import Played, ResumedPlay, Uneven

if TYPE_CHECKING:
    from rallypoint.testing.simulation.plan import Plan

_SPEEDS = (0.05, 0.3, 0.5, 1.0, 1.0, 1.0, 3.0)
_CHANGES_S = 1.1  # so long a link stays as it is
_NONSENSE = (0.0, -1.0, math.nan, math.inf, 1e15, 1.0)


def uneven(plan: Plan) -> Plan:
    """The plan on servers whose links are not alike."""
    return replace(plan, terms=msgspec.structs.replace(plan.terms, measure_links=True))


def steady(plan: Plan) -> Plan:
    """The plan that `uneven` has changed."""
    return replace(plan, terms=msgspec.structs.replace(plan.terms, measure_links=False))


def on_uneven(played: Played) -> Uneven:
    """What `uneven` has made of what plays `played`."""
    assert not isinstance(played, Uneven | ResumedPlay)
    return Uneven(played)


def quick(machine: ClusterMachine) -> None:
    """Let shards move soon and often: a simulated job takes a few seconds."""
    if machine.terms.measure_links:
        machine.course.links = MeasuredLinks(LinkSpeeds(least=1.0), settle_s=0.0, rest_s=0.3)


def with_paces(beat: Beat, node: Node, role: str) -> Beat:
    """The beat with what its sender has measured of servers' links. Every seventh member tells nonsense."""
    world = node.world
    if not world.uneven:
        return beat
    period = int(world.now / _CHANGES_S)
    servers = [name for name in world.nodes if name.startswith("server")] if role != "server" else [node.name]
    chance = random.Random(f"{node.name} {period}")
    if chance.random() < 1 / 7:
        lies = {server: (chance.choice(_NONSENSE), chance.choice(_NONSENSE)) for server in servers}
        return msgspec.structs.replace(beat, paced=lies)
    speeds = {server: random.Random(f"{server} {period}").choice(_SPEEDS) for server in servers}
    return msgspec.structs.replace(beat, paced={server: (1e6 * speed, 0.9) for server, speed in speeds.items()})
