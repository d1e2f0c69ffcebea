"""TCP whose large payloads go by NIXL between members that both have it, as a transport."""

from __future__ import annotations

from rallypoint.net.rdma.agent import Agents
from rallypoint.net.rdma.choice import environment_of
from rallypoint.net.rdma.connection import NixlConnection
from rallypoint.net.tcp import TcpListener, TcpTransport
from rallypoint.observe.lines import Sparingly
from rallypoint.observe.usage import Traffic

RING_BYTES = 8 << 20


class NixlListener:
    """A Listener whose connections may go over to NIXL."""

    def __init__(self, listener: TcpListener, agents: Agents, ring: int, lines: Sparingly) -> None:
        self._listener, self._agents, self._ring, self._lines = listener, agents, ring, lines

    @property
    def address(self) -> str:
        return self._listener.address

    def accept(self) -> NixlConnection:
        return NixlConnection(self._listener.accept(), self._agents, self._ring, self._lines)

    def close(self) -> None:
        self._listener.close()


class NixlTransport:
    """TCP between ``host:port`` addresses; large payloads by NIXL's one-sided writes, once the greeting has agreed.

    `ring`: bytes of memory that each side of a connection gives for what the other one writes, a multiple of 4096. A
    connection registers that and 1 MiB more. Connections that were dialed share an agent, and those that were accepted
    another one; an agent ends with its last connection. Without NIXL, or where the other side has none, a connection
    stays with TCP, and one line of the log says so.

    The other member must have proved itself before it gets a place to write to, and its frames have MACs, which are
    checked on a copy. UCX itself asks nobody for a proof: use it on a network for RDMA that only trusted machines can
    reach (`choice.environment_of`).

    Attributes:
        traffic: the bytes of its connections, those that went by NIXL included.
    """

    secure = False

    def __init__(self, ring: int = RING_BYTES) -> None:
        self._tcp, self._ring = TcpTransport(), ring
        self._dialed, self._accepted = (Agents(environment_of()) for _ in range(2))
        self._lines = Sparingly(burst=1)

    @property
    def traffic(self) -> Traffic:
        return self._tcp.traffic

    def listen(self, address: str) -> NixlListener:
        return NixlListener(self._tcp.listen(address), self._accepted, self._ring, self._lines)

    def connect(self, address: str, timeout: float) -> NixlConnection:
        return NixlConnection(self._tcp.connect(address, timeout), self._dialed, self._ring, self._lines)

    def private(self, address: str) -> bool:
        return self._tcp.private(address)
