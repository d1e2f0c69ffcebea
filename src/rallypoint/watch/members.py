"""Who was what and when: a line of spans for each member."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rallypoint.net.messages import Members

_MOST_SPANS = 200  # of a member
_MOST_MEMBERS = 4096
_GONE = "gone"


@dataclass(slots=True)
class Timelines:
    """For each member the times (s) at which its state changed, and to what.

    States: ``computing``, ``standby``, ``server``, ``aggregator``, ``gone``. Of a member with very many changes the
    oldest are forgotten, and of very many members those that have been gone for longest.
    """

    spans: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    revision: int = 0

    def take(self, members: Members, t: float) -> tuple[list[str], list[str]]:
        """A new view, at time `t`. Returns who has come and who has gone."""
        now = dict(self._states(members))
        before = self.here
        for member in [*now, *(before - now.keys())]:
            self._change(member, t, now.get(member, _GONE))
        self._forget()
        return sorted(now.keys() - before, key=by_number), sorted(before - now.keys(), key=by_number)

    @property
    def here(self) -> set[str]:
        """The members that are here."""
        return {member for member, spans in self.spans.items() if spans[-1][1] != _GONE}

    def over(self, t: float) -> None:
        """The job has ended: nobody is here any more."""
        for member in self.here:
            self._change(member, t, _GONE)

    def rows(self) -> list[dict[str, object]]:
        """The members in the order of their names: servers, aggregators, workers."""
        names = sorted(self.spans, key=by_number)
        return [{"id": name, "spans": [[round(t, 2), state] for t, state in self.spans[name]]} for name in names]

    def _states(self, members: Members) -> Iterable[tuple[str, str]]:
        yield from ((worker, "computing") for worker in members.workers)
        yield from ((worker, "standby") for worker in members.standby)
        yield from ((server, "server") for server in members.servers)
        yield from ((one, "aggregator") for one in members.aggregators)

    def _change(self, member: str, t: float, state: str) -> None:
        spans = self.spans.setdefault(member, [])
        if spans and spans[-1][1] == state:
            return
        spans.append((t, state))
        del spans[:-_MOST_SPANS]
        self.revision += 1

    def _forget(self) -> None:
        while len(self.spans) > _MOST_MEMBERS:
            gone = [member for member, spans in self.spans.items() if spans[-1][1] == _GONE]
            if not gone:
                return
            del self.spans[min(gone, key=lambda member: self.spans[member][-1][0])]


def by_number(name: str) -> tuple[str, int, str]:
    """A key that sorts worker2 before worker10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0), name
