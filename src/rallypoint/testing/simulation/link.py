"""A simulated link: it is made again whenever it breaks, until it is closed (what `net/dialer.py` is to real ones)."""

from __future__ import annotations

from typing import Any, Protocol

from rallypoint.core.view import Member
from rallypoint.testing.simulation.network import Node, Wire

RETRY_S = 0.1


class Receiver(Protocol):
    """Gets what comes on a link, and news of the link itself."""

    def hello(self) -> Any:
        """What to introduce oneself with."""

    def link_up(self, link: SimulatedLink) -> None:
        """The link stands (again)."""

    def link_lost(self, link: SimulatedLink) -> None:
        """The link has broken; it will be made again."""

    def receive(self, link: SimulatedLink, message: Any) -> None:
        """A message has come."""


class SimulatedLink:
    """A link from `node` to `peer`; `wire` is the connection, None while there is none."""

    def __init__(self, node: Node, peer: Member, receiver: Receiver) -> None:
        self.peer = peer
        self.wire: Wire | None = None
        self._node, self._receiver = node, receiver
        self._closed = False
        self._connect()

    def send(self, message: Any) -> None:
        """Lost, if the link is."""
        if self.wire is not None:
            self.wire.send(0, message)

    def close(self) -> None:
        """End the link: nothing of it is heard any more."""
        self._closed = True
        if self.wire is not None:
            self.wire.close(0)
            self.wire = None

    def _connect(self) -> None:
        if not self._closed:
            self._node.world.connect(self._node, self.peer.address, self._receiver.hello(), self._up, self._failed)

    def _failed(self, _: str) -> None:
        self._node.later(RETRY_S, self._connect)

    def _up(self, wire: Wire) -> None:
        if self._closed:
            wire.close(0)
            return
        self.wire = wire
        wire.on_message[0] = lambda message: self._receiver.receive(self, message)
        wire.on_close[0] = self._lost
        self._receiver.link_up(self)

    def _lost(self) -> None:
        self.wire = None
        self._receiver.link_lost(self)
        self._connect()
