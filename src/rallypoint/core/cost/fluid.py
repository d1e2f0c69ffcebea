"""A fluid model of links: every transfer flows at its fair share of the links that it uses, until one ends.

Shares are max-min fair (Bertsekas and Gallager, Data Networks, section 6.5.2): no transfer can get more without one
that has less getting less. TCP connections with equal round trips have equal shares over a long time. Over the seconds
of a step they have not: what that costs is taken from the capacity of ports (`core.cost.site.Losses`).

A transfer stands for as many equal ones as its weights say: four workers that push at once are one transfer, with
weight 1 on (any) worker's link and weight 4 on the server's::

    network = Network({"worker": 125e6, "server": 125e6})
    network.start("push", 1e6, {"worker": 1.0, "server": 4.0})     # 1 MB each: 31.25 MB/s each
    network.first_end()                                            # 0.032
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

_ENDS = 1e-9  # a transfer with so little left, of its bytes, has ended: rounding


Kind = tuple[tuple[str, float], ...]  # the links that a transfer uses, and how much of each


@dataclass(slots=True)
class Transfer:
    """Bytes that are left, of each of the equal transfers that it stands for; its rate at the moment."""

    left: float
    nbytes: float
    kind: Kind
    rate: float = 0.0


class Network:
    """Links with capacities (bytes a second), and the transfers under way on them."""

    def __init__(self, capacity: Mapping[str, float]) -> None:
        if min(capacity.values(), default=1.0) <= 0:
            raise ValueError("a link without capacity would never carry anything")
        self._capacity = dict(capacity)
        self._transfers: dict[Hashable, Transfer] = {}
        self._known: dict[tuple[Kind, ...], dict[Kind, float]] = {}  # the rates of transfers of these kinds
        self._shared = True  # the rates are those of the transfers that are under way

    def __len__(self) -> int:
        return len(self._transfers)

    def start(self, name: Hashable, nbytes: float, uses: Mapping[str, float]) -> None:
        """Begin a transfer. `uses`: link -> how much of it each byte takes; links without a capacity are not limited.

        ValueError for a name that is under way.
        """
        if name in self._transfers:
            raise ValueError(f"{name} is under way already")
        known = tuple((link, weight) for link, weight in uses.items() if link in self._capacity and weight > 0)
        self._transfers[name] = Transfer(nbytes, nbytes, known)
        self._shared = False

    def rate(self, name: Hashable) -> float:
        """The rate of one transfer now, in bytes a second; infinite if no link limits it."""
        self._share()
        return self._transfers[name].rate

    def first_end(self) -> float:
        """Seconds until the first transfer ends; infinite without one."""
        self._share()
        return min((one.left / one.rate for one in self._transfers.values()), default=math.inf)

    def advance(self, seconds: float) -> list[Hashable]:
        """Let time pass, no more than `first_end`. Returns the transfers that have ended."""
        self._share()
        ended = []
        for name, one in self._transfers.items():
            one.left = 0.0 if one.rate == math.inf else one.left - one.rate * seconds
            if one.left <= _ENDS * one.nbytes:
                ended.append(name)
        for name in ended:
            del self._transfers[name]
        self._shared = self._shared and not ended
        return ended

    def _share(self) -> None:
        if self._shared:
            return
        self._shared = True
        kinds = tuple(sorted(one.kind for one in self._transfers.values()))
        if (rates := self._known.get(kinds)) is None:
            rates = self._known[kinds] = self._rates(kinds)
        for one in self._transfers.values():
            one.rate = rates[one.kind]

    def _rates(self, kinds: Sequence[Kind]) -> dict[Kind, float]:
        """Fill all transfers at one pace; whenever a link is full, those that use it stay at what they have."""
        rates = dict.fromkeys(kinds, math.inf)
        left = dict(self._capacity)
        users: dict[str, dict[int, float]] = {}
        for number, uses in enumerate(kinds):
            for link, weight in uses:
                users.setdefault(link, {})[number] = weight
        while users:
            level, full = min((left[link] / sum(weights.values()), link) for link, weights in users.items())
            for number in list(users[full]):
                rates[kinds[number]] = level
                for link, weight in kinds[number]:
                    left[link] = max(0.0, left[link] - level * weight)
                    users[link].pop(number, None)
            users = {link: weights for link, weights in users.items() if weights}
        return rates
