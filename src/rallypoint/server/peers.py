"""The links from this server to the other servers of its view."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.core.protocol import Refused, expect
from rallypoint.core.shard.events import Acked
from rallypoint.core.shard.links import Key, PeerLinks
from rallypoint.core.view import Member, View
from rallypoint.errors import AccessDenied, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.dialer import Calls, Dialer
from rallypoint.net.frames import Kind
from rallypoint.net.handshake import Credentials
from rallypoint.net.transport import Transport
from rallypoint.observe.trace import Tracer
from rallypoint.server.member import Views
from rallypoint.server.reducer import inbox


class Peers:
    """Each link has a dialer thread, which receives acknowledgements. The coordinator's link calls `adopt`.

    `failed` is called with a fault of our own that has ended a link.
    """

    def __init__(
        self, links: PeerLinks, views: Views, put: Callable[[inbox.Event | None], None],
        *, transport: Transport, credentials: Credentials, tracer: Tracer, failed: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._links, self._views, self._put, self._failed = links, views, put, failed
        self._transport, self._credentials, self._tracer = transport, credentials, tracer
        self._dialers: dict[Key, Dialer] = {}

    def adopt(self, view: View) -> None:
        """Close the links that the view no longer needs, and open the new ones."""
        gone, new = self._links.adopt(view)
        for key in gone:
            self._dialers.pop(key).close()
        for member in new:
            dialer = self._dialers[member.id, member.incarnation] = self._dial(member)
            dialer.start()

    def unreachable(self) -> dict[str, float]:
        """The other servers that cannot be reached -> seconds. Any thread may call it."""
        missed = {key[0]: dialer.unreachable() for key, dialer in list(self._dialers.items())}
        return {server: seconds for server, seconds in missed.items() if seconds > 0}

    def close(self) -> None:
        """Close all links."""
        for dialer in self._dialers.values():
            dialer.close()

    def _dial(self, member: Member) -> Dialer:
        standing: list[Channel] = []

        def up(channel: Channel) -> None:
            standing[:] = [channel]
            self._put(inbox.PeerLinked(member, channel))

        def down(_: RallypointError) -> None:
            self._put(inbox.PeerLost(member.id, standing[0]))
            if standing[0].fault is not None:
                self._failed(standing[0].fault)

        calls = Calls(
            lambda: self._views.number, up, lambda channel: self._receive_acks(member.id, channel), down, self._failed
        )
        return Dialer(
            transport=self._transport, peer=member, credentials=self._credentials, calls=calls, tracer=self._tracer
        )

    def _receive_acks(self, peer: str, channel: Channel) -> None:
        while True:
            header = channel.receive_header()
            if header.kind is Kind.REFUSE:
                raise AccessDenied(expect(channel.receive_bytes(header), Refused).reason)
            if header.kind is not Kind.ACK:
                raise ProtocolError(f"a {header.kind.name} frame from server {peer}")
            digest = bytes(channel.receive_bytes(header))
            acked = Acked(header.step, chosen=header.base == 1)
            self._put(inbox.Acked(peer, channel, header.shard, acked, header.view, digest))
