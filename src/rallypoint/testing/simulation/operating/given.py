"""An order that is given to a simulated coordinator until it has answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rallypoint.net.messages import Hello
from rallypoint.net.ordering.messages import AnyOrder, Ordered
from rallypoint.testing.simulation.member import COORDINATOR, RETRY_S
from rallypoint.testing.simulation.network import Node, Wire


class Given:
    """One order, given until it is answered: `heard(answer, again)`; `again`: an answer was lost before this one."""

    def __init__(self, node: Node, order: AnyOrder, heard: Callable[[Ordered, bool], None]) -> None:
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
        if not isinstance(message, Ordered) or message.kind != type(self._order).__name__:
            return
        wire.on_message[0], wire.on_close[0] = lambda _: None, lambda: None
        wire.close(0)
        if "too many orders" in message.text:
            self._retry()
        else:
            self._heard(message, self._again)
