"""Orders of new sizes: whoever knows the token may give them, as often as he likes."""

from __future__ import annotations

from rallypoint.net.messages import Resize
from rallypoint.observe.lines import Allowance

_BURST, _EVERY_S = 16, 2.0  # orders that are followed at once; then one in so many seconds


class Sizes:
    """Lets through so many orders at once, then one every 2 seconds. Of those that come faster the newest counts.

    Each order that is followed is written to the journal and the event log, and starts or ends processes.
    """

    def __init__(self, now: float) -> None:
        self._allowance = Allowance(_BURST, _EVERY_S, now)
        self._waiting: Resize | None = None

    def take(self, order: Resize, now: float) -> Resize | None:
        """The order to follow now; None if this one has to wait."""
        before = self._waiting or Resize(0)
        self._waiting = Resize(order.workers or before.workers, order.servers or before.servers)
        return self.due(now)

    def due(self, now: float) -> Resize | None:
        """The order that has waited and is to be followed now; None if there is none."""
        if self._waiting is None or not self._allowance.take(now):
            return None
        order, self._waiting = self._waiting, None
        return order
