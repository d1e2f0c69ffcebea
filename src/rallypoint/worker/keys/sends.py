"""What leaves a store's worker: frames of the machine's effects, and the values that may have to be sent again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rallypoint.core.keys import machine
from rallypoint.net.frames import LATEST, NEWEST, Header, Kind, wants
from rallypoint.net.messages import Report
from rallypoint.net.pool import bytes_of
from rallypoint.worker.exchange.link import ServerLink
from rallypoint.worker.exchange.links import Links

_NO_ROWS = memoryview(b"")


@dataclass(slots=True)
class Sends:
    """Runs effects on links. The exchange's lock guards the fields; `run` is called without it.

    Each value is memory of its own, which nobody writes to again: so it may be sent twice, and by two threads.

    Attributes:
        initial: by shard, a first value that is not known to be there.
        pushes: by shard and contributor, the step and values of a push that is not known to count.
        counted: by contributor, the last step that counts in some key.
    """

    keys: machine.KeyMachine
    links: Links
    initial: dict[int, torch.Tensor] = field(default_factory=dict)
    pushes: dict[tuple[int, int], tuple[int, torch.Tensor]] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)

    def clear(self) -> None:
        """A new generation: nothing of the one before is sent any more."""
        self.initial.clear()
        self.pushes.clear()
        self.counted.clear()

    def forget_counted(self) -> list[Report]:
        """Forget what need not be sent again. Returns reports of steps that count, for the coordinator."""
        lines, reports, view = self.keys.lines, list[Report](), self.keys.view
        for shard in [shard for shard in self.initial if not lines[shard].begins]:
            del self.initial[shard]
        for shard, contributor in [(s, c) for s, c in self.pushes if c not in lines[s].pushes]:
            del self.pushes[shard, contributor]
            step = (self.keys.next_step(shard, contributor) or 0) - 1
            if view is not None and step > self.counted.get(contributor, -1):
                self.counted[contributor] = step
                reports.append(Report(step, contributor, 0.0, 1.0, 0, generation=view.generation))
        return reports

    def run(self, effects: Sequence[machine.Effect]) -> None:
        """Send what the machine says, in order."""
        for effect in effects:
            if (link := self.links.get(effect.server)) is not None:  # else it has ended: a new one sends this again
                self._send(link, effect, Header(Kind.PUSH, self.keys.number, shard=effect.shard))

    def _send(self, link: ServerLink, effect: machine.Effect, header: Header) -> None:
        match effect:
            case machine.SendInitial(shard=shard):
                if (values := self.initial.get(shard)) is not None:
                    data = bytes_of(values)
                    link.push(header._replace(kind=Kind.INITIAL, length=len(data)), data, sent=_nothing)
            case machine.SendPush(shard=shard, contributor=contributor, step=step):
                at, values = self.pushes.get((shard, contributor), (-1, None))
                if values is not None and at == step:  # else it counts by now, or is of an older generation
                    data = bytes_of(values)
                    header = header._replace(replica=contributor, step=step, weight=1.0, length=len(data))
                    if self.keys.by_clocks:
                        known = max(0, self.keys.lines[shard].version)
                        header = header._replace(wants=wants(contributor), base=known)
                    link.push(header, data, sent=_nothing)
            case machine.SendWant(shard=shard, contributor=contributor):
                link.want(shard, contributor, self.keys.number)
            case machine.SendPull(number=number, version=version):
                newest = version == machine.NEWEST
                header = header._replace(kind=Kind.PULL_ROWS, base=number, flags=NEWEST if newest else 0)
                link.pull(header._replace(step=LATEST if newest else version), _NO_ROWS)


def _nothing() -> None:
    """A value's memory is not used again."""
