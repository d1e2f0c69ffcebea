"""What the members' machines do and who talks to whom, from members' samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rallypoint.core.protocol import LinkSample, Sampled

_HISTORY = 40  # looks at a machine
_APART_S = 4.0  # between two of them: each member of a machine tells of it
_MOST_HOSTS, _MOST_MEMBERS, _MOST_LINKS = 1024, 4096, 16_384
_SHOWN_HOSTS, _SHOWN_SIDE = 64, 24  # on the page: machines; members on each side of the matrix of links


@dataclass(slots=True)
class Host:
    """A machine: its newest sample, when that was (s), and shares of processor and memory over time, in percent."""

    sample: Sampled
    t: float
    cpu: deque[int] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    memory: deque[int] = field(default_factory=lambda: deque(maxlen=_HISTORY))


@dataclass(slots=True)
class Machines:
    """The newest samples by machine, by member and by pair of members. Its size has a bound."""

    hosts: dict[str, Host] = field(default_factory=dict)
    members: dict[str, Sampled] = field(default_factory=dict)
    links: dict[tuple[str, str], LinkSample] = field(default_factory=dict)  # who dialed, whom
    revision: int = 0

    def take(self, sample: Sampled, t: float) -> None:
        """A member's sample, at time `t` (s)."""
        self.revision += 1
        if sample.member in self.members or len(self.members) < _MOST_MEMBERS:
            self.members[sample.member] = sample
        for old in [pair for pair in self.links if pair[0] == sample.member]:
            del self.links[old]
        for other, link in sample.links.items():
            if len(self.links) < _MOST_LINKS:
                self.links[sample.member, other] = link
        host = self.hosts.get(sample.host)
        if host is None:
            if len(self.hosts) >= _MOST_HOSTS:
                return
            host = self.hosts[sample.host] = Host(sample, float("-inf"))
        if t - host.t >= _APART_S or t < host.t:
            host.t, host.sample = t, sample
            host.cpu.append(round(100 * sample.cpu))
            host.memory.append(round(100 * sample.memory / max(1, sample.memory_total)))

    def forget(self, gone: Collection[str]) -> None:
        """These members are gone, and machines on which nobody is left."""
        for member in gone:
            self.members.pop(member, None)
        self.links = {pair: link for pair, link in self.links.items() if not set(pair) & set(gone)}
        here = {sample.host for sample in self.members.values()}
        self.hosts = {name: host for name, host in self.hosts.items() if name in here}
        self.revision += bool(gone)

    def told(self) -> dict[str, Any]:
        """What the page shows, for JSON: the machines with the busiest processors, and the pairs that talk most."""
        names = sorted(self.hosts, key=lambda name: -self.hosts[name].sample.cpu)[:_SHOWN_HOSTS]
        own: dict[str, list[Sampled]] = {name: [] for name in names}
        for sample in self.members.values():
            if sample.host in own:
                own[sample.host].append(sample)
        return {"hosts": [_told(name, self.hosts[name], own[name]) for name in sorted(names)],
                "more": len(self.hosts) - len(names), **self._matrix()}  # fmt: skip

    def _matrix(self) -> dict[str, Any]:
        bytes_of: dict[int, dict[str, float]] = {0: {}, 1: {}}
        for pair, link in self.links.items():
            for side, member in enumerate(pair):
                bytes_of[side][member] = bytes_of[side].get(member, 0.0) + link.sent + link.received
        sides = [
            sorted(sorted(those, key=lambda member: -those[member])[:_SHOWN_SIDE], key=by_number)
            for those in bytes_of.values()
        ]
        cells = [[self._cell(row, column) for column in sides[1]] for row in sides[0]]
        return {"links": {"rows": sides[0], "columns": sides[1], "cells": cells,
                          "members": [len(bytes_of[0]), len(bytes_of[1])]}}  # fmt: skip

    def _cell(self, row: str, column: str) -> list[float] | None:
        """Round trip (s), bytes a second to the column's member and from it; None if they have no link."""
        link = self.links.get((row, column))
        return None if link is None else [link.round_trip, link.sent, link.received]


def _told(name: str, host: Host, own: list[Sampled]) -> dict[str, Any]:
    sample = host.sample
    return {
        "name": name, "members": len(own), "cpu": list(host.cpu), "memory": list(host.memory),
        "used": sample.memory, "total": sample.memory_total, "own_cpu": round(sum(one.own_cpu for one in own), 2),
        "own_memory": sum(one.own_memory for one in own), "disk": [sample.disk_read, sample.disk_written],
        "network": [sample.network_sent, sample.network_received],
        "waited": max((one.waited_for_data for one in own), default=0.0),
        "gpus": [[gpu.busy, gpu.used, gpu.total] for gpu in sample.gpus],
    }  # fmt: skip


def by_number(name: str) -> tuple[str, int, str]:
    """A key that sorts worker2 before worker10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :][:18] or 0), name
