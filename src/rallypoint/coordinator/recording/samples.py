"""Which samples of members' machines and links are kept in the event log, and under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.view import View
from rallypoint.net.messages import LinkSample, Sampled

_EVERY_S = 4.0  # of a member: a little less than members' own period
_MOST_A_SECOND = 20.0  # of all members together: in a large job each is kept less often


@dataclass(slots=True)
class Samples:
    """Decides which samples count. Its size has a bound: that of the view's members."""

    _kept: dict[str, float] = field(default_factory=dict)  # member -> when its last sample was kept

    def take(self, member: str, sample: Sampled, view: View | None, now: float) -> Sampled | None:
        """Return the sample as it is logged: with its member, its host, and links by member. None: it is not kept.

        `now` in seconds. A member that has no part in the view is not kept; nor are links to who is not in it.
        """
        if view is None:
            return None
        everybody = {one.id: one for one in (*view.workers, *view.servers, *view.aggregators)}
        if member not in everybody:
            return None
        every = max(_EVERY_S, len(everybody) / _MOST_A_SECOND)
        if now - self._kept.get(member, float("-inf")) < every:
            return None
        self._kept = {one: when for one, when in self._kept.items() if one in everybody}
        self._kept[member] = now
        names = {one.address: one.id for one in (*view.servers, *view.aggregators)}
        links = _named(sample.links, names)
        return msgspec.structs.replace(sample, member=member, host=everybody[member].host[:200], links=links)


def _named(links: Mapping[str, LinkSample], names: Mapping[str, str]) -> dict[str, LinkSample]:
    return {names[address]: link for address, link in links.items() if address in names}
