"""Digests of what the members of a job send each other: they say where two runs of one job first differ."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import NamedTuple

import msgspec
from fuzz_frames import Frame
from fuzz_jobs import SERVERS, WORKERS
from fuzz_members import Tap

from rallypoint.net.channel import Channel
from rallypoint.net.frames import Kind

_ORDER = {Kind.INITIAL: 0, Kind.VERSION: 1, Kind.PUSH: 2}  # version t comes before the contributions to step t
_SHOWN = 6  # differences, of each kind


class SlotSent(NamedTuple):
    """What a frame says, apart from its values. In this order one follows from the other."""

    step: int
    order: int
    shard: int
    replica: int
    more: int  # of a block: the replicas beside the first
    codec: int

    @property
    def what(self) -> str:
        """As in "version 3"."""
        return ["the uploaded weights", f"version {self.step}", f"a contribution to step {self.step}"][self.order]

    @property
    def where(self) -> str:
        """As in "shard 2, replicas 0 to 1"."""
        replicas = f"replicas {self.replica} to {self.replica + self.more}" if self.more else f"replica {self.replica}"
        return f"shard {self.shard}" + (f", {replicas}" if self.order == _ORDER[Kind.PUSH] else "")


class Witness(Tap):
    """While active, keeps a digest of all values that the honest members of a job send. Strangers do not count."""

    def __init__(self) -> None:
        super().__init__()
        self._digests: dict[SlotSent, set[str]] = defaultdict(set)
        self._processes: set[tuple[str, int]] = set()  # of the job's own members: id and incarnation
        self._views = 0

    def sent(self, channel: Channel, frame: Frame) -> list[Frame]:
        header = frame.header
        if header.kind in _ORDER:
            pushed = header.kind is Kind.PUSH
            what = SlotSent(
                header.step, _ORDER[header.kind], header.shard, header.replica if pushed else 0,
                header.base if pushed else 0, header.codec,
            )  # fmt: skip
            self._digests[what].add(hashlib.blake2b(frame.payload, digest_size=4).hexdigest())
        elif header.kind is Kind.CONTROL:
            message = msgspec.msgpack.decode(frame.payload)
            if message["type"] == "NewView":
                self._saw(message["view"])
            elif message["type"] == "ViewChange":  # members: those who are gone, and (position, member) of the new
                new = {role: [one for _, one in message["change"][role][1]] for role in ("workers", "servers")}
                self._saw({**new, "number": message["change"]["rest"]["number"]})
        return []

    def _saw(self, view: dict[str, object]) -> None:
        members = [*view["workers"], *view["servers"]]  # type: ignore[misc]
        self._processes |= {(one["id"], one["incarnation"]) for one in members if one["id"] in (*SERVERS, *WORKERS)}
        self._views = max(self._views, view["number"][1])  # type: ignore[index]

    def differs_from(self, undisturbed: Witness) -> str:
        """Where this run first differs from the undisturbed one, as a sentence; and how far it came."""
        mine, theirs = self._digests, undisturbed._digests
        both = mine.keys() & theirs.keys()
        differing = sorted(what for what in both if mine[what] != theirs[what])
        versions = [what for what in mine if what.order == _ORDER[Kind.VERSION]]
        last = max((what.step for what in versions), default=-1)
        parts = [f"{len(differing)} of {len(both)} frames differ"]
        if differing:
            first = [what for what in differing if what[:2] == differing[0][:2]]
            parts.append(f"first {first[0].what}: {self._listed(first, undisturbed)}")
            ends = [what for what in differing if what.step == last and what.order == _ORDER[Kind.VERSION]]
            parts.append(f"version {last}, the last: {self._listed(ends, undisturbed)}")
        else:
            parts.append(f"so no worker was sent anything else; version {last} was the last")
        given_up = len(self._processes) - len({id for id, _ in self._processes})
        return "; ".join([*parts, f"{self._views} views, {given_up} members came back as new ones"])

    def _listed(self, those: list[SlotSent], undisturbed: Witness) -> str:
        """As in "shard 2 is 0a1b2c3d, not 4e5f6a7b"."""
        found = [
            f"{what.where} is {_either(self._digests[what])}, not {_either(undisturbed._digests[what])}"
            for what in those[:_SHOWN]
        ]
        return ", ".join([*found, *(["..."] if len(those) > _SHOWN else [])]) or "the same in all shards"


def _either(digests: set[str]) -> str:
    return " and ".join(sorted(digests))
