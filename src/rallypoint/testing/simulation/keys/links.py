"""A store's links in the simulation: frames of the real exchange become messages with names in place of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.frames import NEWEST, Header, Kind
from rallypoint.testing.simulation.network import Node, SimulatedLink
from rallypoint.testing.simulation.replicas.contents import Content
from rallypoint.worker.exchange.links import Receiver
from rallypoint.worker.keys_exchange import KeysHeard


class Named(bytearray):
    """A name in place of bytes."""

    content: Content = None

    @classmethod
    def of(cls, content: Content) -> Named:
        """No bytes, with this name."""
        named = cls()
        named.content = content
        return named


class _Link:
    """What the exchange sends to one server. Pushes leave one after the other; wants keep their place among them."""

    def __init__(self, node: Node, link: SimulatedLink, number: Callable[[], ViewNumber]) -> None:
        self.link, self._node, self._number, self._leaves = link, node, number, 0.0

    def push(self, header: Header, payload: Any, sent: Callable[[], None]) -> None:
        content = getattr(payload, "content", None)
        if header.kind is Kind.INITIAL:
            self._queue(("initial", header.view, header.shard, content, 0))
            return
        wanted = header.wanted if header.wants else None
        name = (header.shard, header.step, header.replica, 1)
        for _ in range(2 if self._node.world.random.random() < 0.02 else 1):
            self._queue(("push", header.view, *name, content, header.base, wanted))

    def want(self, shard: int, replica: int, number: ViewNumber) -> None:
        self._queue(("want", number, shard, replica))

    def pull(self, header: Header, payload: memoryview | None = None) -> None:
        newest = bool(header.flags & NEWEST)
        self.link.send(("pull", header.view, header.shard, header.step, newest, header.base, 0, -1))

    def _queue(self, message: Any) -> None:
        world, wire = self._node.world, self.link.wire
        if wire is not None:
            self._leaves = max(self._leaves, world.now + world.latency() / 4)
            self._node.later(self._leaves - world.now, lambda: wire.send(0, message))


class SimulatedKeyLinks:
    """The links of one worker; `heard` takes what arrives."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.heard: KeysHeard
        self.number: Callable[[], ViewNumber]
        self._links: dict[str, _Link] = {}

    # ---- see `worker.keys_exchange.KeyLinks` ----

    def get(self, server: str) -> _Link | None:
        return self._links.get(server)

    def open(self, servers: Iterable[Member], receiver: Receiver, view: View) -> None:
        for member in servers:
            self._links[member.id] = _Link(self._node, SimulatedLink(self._node, member, self), self.number)

    def end(self, servers: Iterable[str]) -> None:
        for server in servers:
            self._links.pop(server).link.close()

    def close(self) -> None:
        self.end(list(self._links))

    def unreachable(self) -> dict[str, float]:
        missed = {server: link.link.unreachable() for server, link in self._links.items()}
        return {server: seconds for server, seconds in missed.items() if seconds > 0}

    # ---- see `testing.simulation.link.Receiver` ----

    def hello(self) -> Any:
        return ("worker", self._node.name, self.number())

    def link_up(self, link: SimulatedLink) -> None:
        self.heard.link_up(link.peer.id)

    def link_lost(self, link: SimulatedLink) -> None:
        self.heard.link_lost(link.peer.id)

    def receive(self, link: SimulatedLink, message: Any) -> None:
        match message:
            case ("version", _, shard, version, content, contributor, clock):
                self.heard.valued(shard, contributor, clock, version, Named.of(content))
            case ("rows", shard, number, content, outdated, version):
                self.heard.answered(shard, number, version, None if outdated else Named.of(content))
            case ("wait", _, contributor, _):
                self.heard.to_wait(contributor)
