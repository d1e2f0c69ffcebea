"""Makes a member's samples: rates from counters that it reads now and then."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from rallypoint.net.sampling.messages import MOST_LINKS, GpuSample, LinkSample, Sampled
from rallypoint.net.transport import Transport
from rallypoint.observe.usage import Link, Traffic, Usage, can_read, nvidia_library, usage

EVERY_S = 5.0


@dataclass(slots=True)
class Sampler:
    """Makes a sample every EVERY_S seconds: ``sample(now)``, of one thread, is None in between and the first time.

    usage: reads what this machine has used until now.
    links: the links that this process has dialed, by address.
    waited: the seconds that the script has waited for data until now.
    """

    usage: Callable[[], Usage]
    links: Callable[[], Mapping[str, Link]]
    waited: Callable[[], float]
    _last: tuple[float, Usage, Mapping[str, Link], float] | None = None
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
            gpus=tuple(GpuSample(_share(gpu.busy, 1.0), gpu.used, gpu.total) for gpu in after.gpus),
            links=_links(last[2], is_now[2], seconds),
        )  # fmt: skip


def sampler_for(transport: Transport, waited: Callable[[], float]) -> Sampler:
    """The sampler of this process, whose links are those of `transport`. Without psutil it makes no samples."""
    nvidia = cache(nvidia_library)  # looked for on the sampling thread, once
    links = traffic_of(transport).links
    return Sampler(lambda: usage(nvidia()), links, waited, _due=-math.inf if can_read() else math.inf)


def traffic_of(transport: Transport) -> Traffic:
    """What the transport counts; one within a process counts nothing."""
    return getattr(transport, "traffic", None) or Traffic()


def _links(before: Mapping[str, Link], after: Mapping[str, Link], seconds: float) -> dict[str, LinkSample]:
    """The links with the most bytes. One that was made anew meanwhile counts from its beginning."""
    found = {}
    for address, link in after.items():
        was = before.get(address, Link())
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
