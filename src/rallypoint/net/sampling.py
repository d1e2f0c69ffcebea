"""The port of a process, shared by its connections: each is paced at its part of what the port is measured to carry.

Of flows that share the port of a switch TCP gives some more than others. A sum waits for the last of them, so versions
go out late, and one direction of each link is idle meanwhile. Connections that send evenly, together a little less than
the port carries, complete sums in order.

With `reduce.py --workers 4 --servers 4 --rate 200 --megabytes 25 --shard-kib 256 --pace P`, where a port carries 191, a
synchronisation takes 1.12 x K/B with 190, 1.23 with 206, 1.35 with 225.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from rallypoint.core.plan.port import PortPacer, Sent
from rallypoint.core.protocol import MOST_LINKS, LinkSample, Sampled
from rallypoint.core.view import View
from rallypoint.net.transport import LEAST_PACE, Transport
from rallypoint.observe.usage import Flow, LinkPace, LinkUsage, Traffic, Usage, can_read, nvidia_library, usage

if TYPE_CHECKING:
    from rallypoint.net.tcp import TcpConnection

# ---- Makes a member's samples: rates from counters that it reads now and then ----

EVERY_S = 5.0


@dataclass(slots=True)
class Sampler:
    """Makes a sample every EVERY_S seconds: ``sample(now)``, of one thread, is None in between and the first time.

    usage: reads what this machine has used until now.
    links: the links that this process has dialed, by address.
    waited: the seconds that the script has waited for data until now.
    """

    usage: Callable[[], Usage]
    links: Callable[[], Mapping[str, LinkUsage]]
    waited: Callable[[], float]
    _last: tuple[float, Usage, Mapping[str, LinkUsage], float] | None = None
    _due: float = -math.inf  # infinity: never

    def sample(self, now: float) -> Sampled | None:
        """Return what happened since the last sample; None if none is due. `now` in seconds, of any clock."""
        if now < self._due:
            return None
        last, is_now = self._last, (now, self.usage(), self.links(), self.waited())
        self._last, self._due = is_now, now + EVERY_S
        if last is None or now <= last[0]:
            return None
        seconds, before, after = now - last[0], last[1], is_now[1]
        return Sampled(
            seconds=round(seconds, 2), cpu=_share(after.busy - before.busy, after.capacity - before.capacity),
            memory=after.used, memory_total=after.total,
            disk_read=_rate(before.read, after.read, seconds),
            disk_written=_rate(before.written, after.written, seconds),
            network_sent=_rate(before.sent, after.sent, seconds),
            network_received=_rate(before.received, after.received, seconds),
            own_cpu=round(max(0.0, after.own_busy - before.own_busy) / seconds, 3), own_memory=after.own_memory,
            waited_for_data=_share(is_now[3] - last[3], seconds),
            gpus=after.gpus, links=_links(last[2], is_now[2], seconds),
        )  # fmt: skip


def sampler_for(transport: Transport, waited: Callable[[], float]) -> Sampler:
    """The sampler of this process, whose links are those of `transport`. Without psutil it makes no samples."""
    nvidia = cache(nvidia_library)  # looked for on the sampling thread, once
    links = traffic_of(transport).links
    return Sampler(lambda: usage(nvidia()), links, waited, _due=-math.inf if can_read() else math.inf)


def traffic_of(transport: Transport) -> Traffic:
    """What the transport counts; one within a process counts nothing."""
    return getattr(transport, "traffic", None) or Traffic()


def _links(before: Mapping[str, LinkUsage], after: Mapping[str, LinkUsage], seconds: float) -> dict[str, LinkSample]:
    """The links with the most bytes. One that was made anew meanwhile counts from its beginning."""
    found = {}
    for address, link in after.items():
        was = before.get(address, LinkUsage())
        sent, received = link.sent - was.sent, link.received - was.received
        if sent < 0 or received < 0:
            sent, received = link.sent, link.received
        rates = _rate(0, sent, seconds), _rate(0, received, seconds)
        found[address] = LinkSample(round(link.round_trip, 6), *rates)
    busiest = sorted(found, key=lambda address: -(found[address].sent + found[address].received))[:MOST_LINKS]
    return {address: found[address] for address in busiest}


def _rate(before: float, after: float, seconds: float) -> float:
    return round(max(0.0, after - before) / seconds)


def _share(part: float, whole: float) -> float:
    return round(min(1.0, max(0.0, part / whole)), 3) if whole > 0 else 0.0


# How fast the links of servers take what this member sends: bytes, and the time in which some were on their way.

_LEAST_BYTES = 256 << 10  # of one connection since the last beat: fewer say more of round trips than of links


@dataclass(slots=True)
class Pacing:
    """Makes what a member's beats say of links: ``since_last(...)``, of one thread."""

    traffic: Traffic
    _last: Mapping[Flow, LinkPace] = field(default_factory=dict)
    _then: float = 0.0

    def since_last(self, view: View | None, me: str, now: float) -> dict[str, tuple[float, float]]:
        """What was sent since the last call, by server of the `view`: see `core.protocol.Beat`.

        A server (`me`) says of itself what it has sent on the connections that it has accepted. `now` in seconds.
        """
        before, self._last = self._last, self.traffic.paces()
        seconds, self._then = now - self._then, now
        if view is None or seconds <= 0:
            return {}
        ids = {server.address: server.id for server in view.servers}
        accepted = me if me in ids.values() else ""
        found: dict[str, LinkPace] = {}
        for flow, pace in self._last.items():
            server = ids.get(flow.address, "") if flow.address else accepted
            then = before.get(flow, pace)
            sent = LinkPace(pace.acknowledged - then.acknowledged, pace.busy - then.busy)
            if server and sent.acknowledged >= _LEAST_BYTES:
                found[server] = _both(found.get(server, LinkPace()), sent)
        return {
            server: (round(pace.acknowledged / seconds), round(min(1.0, pace.busy / seconds), 6))
            for server, pace in found.items()
        }


def _both(one: LinkPace, other: LinkPace) -> LinkPace:
    """Two connections over one link, which are busy at the same time."""
    return LinkPace(one.acknowledged + other.acknowledged, max(one.busy, other.busy))


log = logging.getLogger("rallypoint")


class Port:
    """Thread-safe. Where a connection that shares it stays on the host, nothing is paced: another process sends through
    the same port then, and the faster way must not wait.

    A thread of its own looks while connections to other hosts share the port. It ends with the last of them.
    """

    def __init__(self, pacer: PortPacer | None = None) -> None:
        self._pacer = pacer or PortPacer()
        self._changed = threading.Condition()
        self._parts: dict[TcpConnection, float] = {}
        self._locals = 0  # of those
        self._paced = 0.0  # bytes a second: what is set on the connections, together
        self._blind = False  # this system does not say what connections have sent
        self._thread: threading.Thread | None = None

    def share(self, connection: TcpConnection, part: float) -> None:
        """From now on `connection` gets that part (0 to 1) of the port; with 0 it does not share the port any more, and
        is not paced."""
        with self._changed:
            known = self._parts.pop(connection, None) is not None
            self._locals -= known and connection.local
            if part:
                self._parts[connection] = part
                self._locals += connection.local
                connection.pace(self._of(part))
            elif known:
                connection.pace(0)
            self._pace()
            if self._thread is None and self._looks():
                self._start()
            self._changed.notify_all()

    def _looks(self) -> bool:
        return bool(self._parts) and not self._locals and not self._blind

    def _of(self, part: float) -> int:
        return max(LEAST_PACE, round(self._paced * part)) if self._paced else 0

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="port", daemon=True)
        with contextlib.suppress(RuntimeError):  # there is no thread to be had: nothing is paced
            thread.start()
            self._thread = thread

    def _pace(self) -> None:
        """Set on all connections what the pacer says, if that has changed."""
        rate = self._pacer.rate if self._looks() else 0.0
        if rate != self._paced:
            self._paced = rate
            for connection, part in self._parts.items():
                connection.pace(self._of(part))
            if rate:
                log.info("this port carries about %.3g Mbit/s: %d links are paced", rate * 8e-6, len(self._parts))

    def _run(self) -> None:
        with self._changed:
            try:
                while self._looks():
                    seconds = self._pacer.look(time.monotonic(), self._sent())
                    self._pace()
                    self._changed.wait_for(lambda: not self._looks(), seconds)
            finally:
                self._pacer.rest()
                self._pace()
                self._thread = None

    def _sent(self) -> dict[TcpConnection, Sent]:
        told = {one: sent._replace(part=part) for one, part in self._parts.items() if (sent := one.sent()) is not None}
        self._blind = not told
        return told
