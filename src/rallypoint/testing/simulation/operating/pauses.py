"""`rallypoint pause`, `snapshot-every` and `continue`, given to a simulated coordinator until it has answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from rallypoint.core.cluster.terms import SnapshotPeriod
from rallypoint.net.messages import Hello
from rallypoint.net.ordering.messages import Order, Ordered, Pause, SnapshotEvery
from rallypoint.testing.simulation.member import COORDINATOR, RETRY_S
from rallypoint.testing.simulation.network import Node, Wire


class Operators:
    """Pause the job, change the period of its snapshots, and let it go on, one after the other. They add each answer to
    `told`.

    AssertionError if the coordinator has forgotten a pause (not where an order's answer was lost: it is given again) or
    a period; `period` says which one counts. `forgets`: it may, because its journal's disk is full for a time.
    """

    def __init__(
        self, new_node: Callable[[], Node], told: list[str], period: Callable[[], SnapshotPeriod], *, forgets: bool
    ) -> None:
        self._forgets, self._period = forgets, period
        self._new_node, self._told = new_node, told
        self._waiting: deque[float] = deque()  # the first has begun

    def pause(self, seconds: float) -> None:
        """Pause the job, and let it go on so long after the coordinator has answered; after those before."""
        self._waiting.append(seconds)
        if len(self._waiting) == 1:
            self._begin()

    def _begin(self) -> None:
        node = self._new_node()

        every = SnapshotEvery(1 + len(self._told) % 3, 0.25 * (len(self._told) % 4))

        def paused(answer: Ordered, _: bool) -> None:
            self._tell(node, answer)
            order(every, lambda *said: changed(answer, *said))

        def changed(before: Ordered, answer: Ordered, _: bool) -> None:
            self._tell(node, answer)
            kept = not answer.refused
            node.later(self._waiting[0], lambda: order(Pause(on=False), lambda *said: goes_on(before, kept, *said)))

        def goes_on(before: Ordered, changed: bool, answer: Ordered, again: bool) -> None:
            self._tell(node, answer)
            as_ordered = not changed or self._period() == SnapshotPeriod(every.steps, every.seconds)
            assert as_ordered or self._forgets, "a coordinator has forgotten how often snapshots are to be taken"
            kept = before.refused or again or not answer.refused
            assert kept or self._forgets, "a coordinator has forgotten that the job is paused"
            node.kill()
            self._waiting.popleft()
            if self._waiting:
                self._begin()

        def order(order: Order, heard: Callable[[Ordered, bool], None]) -> None:
            _Order(node, order, heard)

        order(Pause(), paused)

    def _tell(self, node: Node, answer: Ordered) -> None:
        self._told.append(f"{node.world.now:.3f} {answer.text}")


class _Order:
    """One order, given until it is answered: `heard(answer, again)`; `again`: an answer was lost before this one."""

    def __init__(self, node: Node, order: Order, heard: Callable[[Ordered, bool], None]) -> None:
        self._node, self._order, self._heard, self._again = node, order, heard, False
        self._connect()

    def _connect(self) -> None:
        hello = Hello("observer", self._node.name, "host", "", 0)
        self._node.world.connect(self._node, COORDINATOR, hello, self._up, lambda _: self._retry())

    def _retry(self) -> None:
        self._node.later(RETRY_S, self._connect)

    def _up(self, wire: Wire) -> None:
        wire.on_message[0] = lambda message: self._receive(wire, message)
        wire.on_close[0] = self._lost
        wire.send(0, self._order)

    def _lost(self) -> None:
        self._again = True
        self._retry()

    def _receive(self, wire: Wire, message: Any) -> None:
        if not isinstance(message, Ordered):
            return
        wire.on_message[0], wire.on_close[0] = lambda _: None, lambda: None
        wire.close(0)
        if "too many orders" in message.text:
            self._retry()
        else:
            self._heard(message, self._again)
