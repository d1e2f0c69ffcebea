"""TLS 1.3 over TCP, as a transport."""

from __future__ import annotations

from rallypoint.net.tcp import TcpListener, TcpTransport
from rallypoint.net.tls.connection import TlsConnection
from rallypoint.net.tls.files import TlsFiles
from rallypoint.net.transport import LEAST_IN_FLIGHT
from rallypoint.observe.usage import Traffic


class TlsListener:
    """A Listener whose connections have TLS. It shakes no hands itself, so nobody can keep it from accepting others."""

    def __init__(self, listener: TcpListener, files: TlsFiles) -> None:
        self._listener, self._files = listener, files

    @property
    def address(self) -> str:
        return self._listener.address

    def accept(self) -> TlsConnection:
        return TlsConnection(self._listener.accept(), self._files, listener=True)

    def close(self) -> None:
        self._listener.close()


class TlsTransport:
    """TLS between ``host:port`` addresses. Each connection uses the files as they are when it is made.

    Host names are not checked: members' addresses come from the coordinator. What counts is that a certificate is of
    the job's CA and names the role of the member that is meant, and this member's ticket.
    """

    secure = True

    def __init__(self, files: TlsFiles) -> None:
        # Loopback's segments have up to 64 KiB: one that does not fit into the window waits for 0.2 s. After TLS's
        # handshake the system makes them larger than the least window (`limit_in_flight`).
        self._files, self._tcp = files, TcpTransport(segment_bytes=LEAST_IN_FLIGHT)

    @property
    def traffic(self) -> Traffic:
        """The bytes of its connections, as they are on the wire."""
        return self._tcp.traffic

    def listen(self, address: str) -> TlsListener:
        return TlsListener(self._tcp.listen(address), self._files)

    def connect(self, address: str, timeout: float) -> TlsConnection:
        return TlsConnection(self._tcp.connect(address, timeout), self._files, listener=False)

    def private(self, address: str) -> bool:
        return self._tcp.private(address)
