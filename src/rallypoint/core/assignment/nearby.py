"""Which aggregator each worker uses: one that was started near the same place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rallypoint.core.view import Member


def nearest_aggregators(
    workers: Iterable[Member], aggregators: Iterable[Member], assigned: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Worker -> the aggregator that it may use, for all workers that have one near them.

    A worker uses the aggregators whose `near` is its own. (Who was started without one is near all others without.) If
    there are several, each gets as many workers, with neighbouring replicas (I3): of 4 workers with 2 replicas each and
    2 aggregators, the first gets the replicas 0..3. `assigned`: worker -> its replicas.
    """
    places: dict[str, list[str]] = {}
    for aggregator in aggregators:
        places.setdefault(aggregator.near, []).append(aggregator.id)
    at: dict[str, list[str]] = {}
    for member in workers:
        at.setdefault(member.near, []).append(member.id)
    found: dict[str, str] = {}
    for place, here in places.items():
        near = at.get(place, [])
        near.sort(key=lambda worker: (not assigned.get(worker), assigned.get(worker, ()), worker))
        for index, worker in enumerate(near):
            found[worker] = sorted(here)[index * len(here) // len(near)]
    return found
