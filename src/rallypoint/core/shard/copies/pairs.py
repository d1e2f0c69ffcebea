"""The servers that have copies of this server's shards, and which of them are being filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.view import View, ViewNumber

Copy = tuple[int, bool]  # a shard, and whether its backup is meant or its third server
Pair = tuple[str, ViewNumber, ViewNumber]  # the other server, and in which views we became a pair, and we the primary


@dataclass(slots=True)
class Pairs:
    """Of each shard that is primary here: its backup, and the third server (`View.incoming`).

    `filling`: to whom the whole state is on its way.
    """

    known: dict[Copy, Pair] = field(default_factory=dict)
    filling: set[Copy] = field(default_factory=set)

    def adopt(self, index: int, view: View, *, primary: bool) -> tuple[bool, bool, bool]:
        """Note the shard's pairs in `view`; none if it is not `primary` here.

        Returns whether the backup is new, whether it was the third server, and whether there is a new third server.
        """
        homed, third = view.homed.get(index, view.generation), view.incoming.get(index)
        backup = (view.backup[index], view.paired[index], homed) if primary and index in view.backup else None
        other = (third.server, third.paired, homed) if primary and third is not None else None
        if (backup, other) == (self.known.get((index, False)), self.known.get((index, True))):
            return False, False, False
        new: dict[Copy, Pair | None] = {
            (index, False): backup, (index, True): other,
        }  # fmt: skip
        before = {copy: self.known.pop(copy, None) for copy in new}
        self.known |= {copy: pair for copy, pair in new.items() if pair is not None}
        arrived = backup is not None and before[index, True] == backup
        still = {copy for copy in self.filling & new.keys() if new[copy] == before[copy]}
        if arrived and (index, True) in self.filling:
            still = {(index, False)}
        self.filling = (self.filling - new.keys()) | still
        fresh, third_fresh = (new[copy] is not None and new[copy] != before[copy] for copy in new)
        return fresh and not arrived, arrived, third_fresh

    def forget(self, index: int) -> None:
        """The shard is not here any more."""
        for copy in ((index, False), (index, True)):
            self.known.pop(copy, None)
            self.filling.discard(copy)

    def server(self, index: int, *, incoming: bool) -> str:
        """The shard's backup, or its third server."""
        return self.known[index, incoming][0]

    def replicating(self, index: int, machine: ShardMachine) -> list[str]:
        """The servers to which each update of the shard is sent."""
        return [self.known[index, i][0] for i in (False, True) if machine.copies.of(i).replicating]

    def caught_up(self, machines: Mapping[int, ShardMachine], *, incoming: bool) -> dict[int, ViewNumber]:
        """The shards whose backup (or third server) may be promoted, and for each the view that paired the two."""
        of = sorted(machines.items())
        return {index: self.known[index, incoming][1] for index, one in of if one.copies.of(incoming).caught_up}
