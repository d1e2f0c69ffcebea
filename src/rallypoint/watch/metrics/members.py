"""The figures of a server, an aggregator and a worker, read from what they have anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Protocol

from rallypoint.core.audits.shard import AuditedShard
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.view import View
from rallypoint.watch.metrics.measures import Histogram, Reading, Several

STALENESS_BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Phases(Protocol):
    """What counts the phases of a worker: a `Tracer`."""

    @property
    def phases(self) -> Mapping[str, tuple[int, float]]:
        """Phase -> how often it came, and its seconds."""


def of_view(view: View | None) -> Iterator[Reading]:
    """The view that a member has."""
    if view is not None:
        yield Reading("rallypoint_view_epoch", view.number.epoch)
        yield Reading("rallypoint_view_number", view.number.count)


def of_server(machine: ServerMachine | None, waiting: int) -> Iterator[Reading]:
    """A server's shards. Any thread may ask: a shard that comes or goes meanwhile is in this reading or in the next.

    `waiting`: how many events wait for the owner of the shards.
    """
    yield Reading("rallypoint_server_waiting_events", waiting)
    if machine is None:
        return
    held = [shard for index in machine.held if (shard := machine.machine(index)) is not None]
    primaries = [shard for shard in held if shard.primary]
    yield Reading("rallypoint_server_shards", len(primaries), {"holds": "primary"})
    yield Reading("rallypoint_server_shards", len(held) - len(primaries), {"holds": "backup"})
    exposed = sum(not shard.copies.backup.caught_up for shard in primaries)
    yield Reading("rallypoint_server_unprotected_shards", exposed)
    if primaries:
        yield Reading("rallypoint_server_version", min(shard.version for shard in primaries))
    fates, staleness = Counter[str](), Counter[int]()
    for tally in [shard.tally for shard in primaries]:
        fates.update(applied=tally.applied, folded=tally.folded, dropped=tally.dropped, repeated=tally.repeats)
        staleness.update(dict(tally.staleness))
    yield from (Reading("rallypoint_contributions", count, {"fate": fate}) for fate, count in fates.items())
    if audited := [shard.opinions for shard in primaries if isinstance(shard, AuditedShard)]:
        lost = sum(opinions.lost for opinions in audited)
        yield Reading("rallypoint_audits", sum(opinions.accepted for opinions in audited) - lost, {"result": "agreed"})
        yield Reading("rallypoint_audits", lost, {"result": "lost"})
    if staleness:
        histogram = Histogram(STALENESS_BOUNDS)
        for updates, times in staleness.items():
            histogram.add(updates, times)
        yield Reading("rallypoint_staleness_updates", histogram.read())


def of_aggregator(counts: tuple[int, int]) -> Iterator[Reading]:
    """An aggregator's counts: contributions taken, and sums sent."""
    yield Reading("rallypoint_aggregator_taken", counts[0])
    yield Reading("rallypoint_aggregator_sent", counts[1])


def of_worker(step: int | None, tracer: Phases) -> Iterator[Reading]:
    """A worker's step (None: its run has not begun), and how long its phases took."""
    if step is not None:
        yield Reading("rallypoint_worker_step", step)
    for phase, (count, seconds) in tracer.phases.items():
        yield Reading("rallypoint_worker_phase_seconds", Several(count, seconds), {"phase": phase})
