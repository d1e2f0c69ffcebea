"""A simulated link: it is made again whenever it breaks, until it is closed (what `net/dialer.py` is to real ones)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from rallypoint.core.shard.links import Key, PeerLinks
from rallypoint.core.shard.server import Effect
from rallypoint.core.shard.shell import ServerShell
from rallypoint.core.view import Member, View
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
        self._lost_at = node.world.now
        self._connect()

    def unreachable(self) -> float:
        """Seconds for which the peer could not be reached; 0.0 while it can."""
        return 0.0 if self.wire is not None else self._node.world.now - self._lost_at

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
        self.wire, self._lost_at = None, self._node.world.now
        self._receiver.link_lost(self)
        self._connect()


class PeerWires:
    """A simulated server's connections to other servers, each made again until the view wants it no more."""

    def __init__(
        self, node: Node, links: PeerLinks, shell: ServerShell[Wire], run: Callable[[Sequence[Effect]], None]
    ) -> None:
        self._node, self._links, self._shell, self._run = node, links, shell, run
        self._wires: dict[Key, Wire | None] = {}
        self._lost_at: dict[Key, float] = {}

    def adopt(self, view: View) -> None:
        """Close the connections that the view no longer needs, and make the new ones."""
        gone, new = self._links.adopt(view)
        for key in gone:
            if (wire := self._wires.pop(key)) is not None:
                wire.close(0)
        for member in new:
            self._wires[member.id, member.incarnation] = None
            self._lost_at[member.id, member.incarnation] = self._node.world.now
            self._dial(member)

    def choose(self, shard: int, step: int, replicas: tuple[int, ...]) -> None:
        """Tell who has a copy which contributions make an update."""
        for server in self._copies(shard):
            self._shell.peers[server].send(0, ("choice", self._shell.fence.number, shard, step, replicas))

    def fill(self, shard: int, version: int, digest: Any, kind: str, *state: Any, incoming: bool = False) -> None:
        """Send the backup (or third server) a whole state, or ask whether it holds it."""
        link = self._shell.fill(shard, self._shell.machine.pairs.server(shard, incoming=incoming), version, digest)
        link.send(0, (kind, self._shell.fence.number, shard, version, *state))

    def replicate(self, shard: int, copies: Iterable[bool], version: int, digest: Any, *update: Any) -> None:
        """Send who has a copy (see `effects.Apply`) the update that makes `version`."""
        for incoming in copies:
            server = self._shell.machine.pairs.server(shard, incoming=incoming)
            link = self._shell.replicate(shard, server, version, digest)
            link.send(0, ("replicate", self._shell.fence.number, shard, version - 1, *update))

    def _copies(self, shard: int) -> list[str]:
        machine = self._shell.machine.machine(shard)
        return [] if machine is None else self._shell.machine.pairs.replicating(shard, machine)

    def unreachable(self) -> dict[str, float]:
        """The servers that cannot be reached -> seconds."""
        now = self._node.world.now
        return {key[0]: now - self._lost_at[key] for key, wire in self._wires.items() if wire is None}

    def _dial(self, member: Member) -> None:
        """As a dialer does it: until the view wants this link no more."""
        key = (member.id, member.incarnation)

        def up(wire: Wire) -> None:
            if key not in self._wires:
                wire.close(0)
                return
            self._wires[key] = wire
            wire.on_message[0] = lambda ack: self._run(self._shell.acked(member.id, wire, *ack[1:]))
            wire.on_close[0] = lambda: down(wire)
            self._run(self._shell.peer_linked(member, wire))

        def down(wire: Wire) -> None:
            self._lost_at[key] = self._node.world.now
            self._run(self._shell.peer_lost(member.id, wire))
            again()

        def again() -> None:
            if key in self._wires:
                hello = ("server", self._node.name, self._shell.fence.number)
                self._wires[key] = None
                self._node.world.connect(self._node, member.address, hello, up, failed)

        def failed(_: str) -> None:
            self._node.later(RETRY_S, again)

        again()
