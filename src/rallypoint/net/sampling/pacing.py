"""How fast the links of servers take what this member sends: bytes, and the time in which some were on their way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.core.view import View
from rallypoint.observe.usage import Flow, Pace, Traffic

_LEAST_BYTES = 256 << 10  # of one connection since the last beat: fewer say more of round trips than of links


@dataclass(slots=True)
class Pacing:
    """Makes what a member's beats say of links: ``since_last(...)``, of one thread."""

    traffic: Traffic
    _last: Mapping[Flow, Pace] = field(default_factory=dict)
    _then: float = 0.0

    def since_last(self, view: View | None, me: str, now: float) -> dict[str, tuple[float, float]]:
        """What was sent since the last call, by server of the `view`: see `core.cluster.events.Beat`.

        A server (`me`) says of itself what it has sent on the connections that it has accepted. `now` in seconds.
        """
        before, self._last = self._last, self.traffic.paces()
        seconds, self._then = now - self._then, now
        if view is None or seconds <= 0:
            return {}
        ids = {server.address: server.id for server in view.servers}
        accepted = me if me in ids.values() else ""
        found: dict[str, Pace] = {}
        for flow, pace in self._last.items():
            server = ids.get(flow.address, "") if flow.address else accepted
            sent = _between(before.get(flow, pace), pace)
            if server and sent.acknowledged >= _LEAST_BYTES:
                found[server] = _both(found.get(server, Pace()), sent)
        return {
            server: (round(pace.acknowledged / seconds), round(min(1.0, pace.busy / seconds), 6))
            for server, pace in found.items()
        }


def _between(before: Pace, after: Pace) -> Pace:
    return Pace(after.acknowledged - before.acknowledged, after.busy - before.busy)


def _both(one: Pace, other: Pace) -> Pace:
    """Two connections over one link, which are busy at the same time."""
    return Pace(one.acknowledged + other.acknowledged, max(one.busy, other.busy))
