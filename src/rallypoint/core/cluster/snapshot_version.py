"""Which version the next snapshot is of: two rules, one for jobs with rounds and one for streaming jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rallypoint.core.job import JobRecord

CAPTURE_AHEAD = 3  # steps after the furthest one seen: no shard may have passed the version when the word arrives


class VersionRule(Protocol):
    """``rule(record, furthest, last, clocks, ending=...)``: the version, from the furthest step that was reported, the
    last snapshot's version, each replica's clock, and whether a worker holds the last version."""

    def __call__(
        self, record: JobRecord, furthest: int, last: int, clocks: Mapping[int, int], *, ending: bool
    ) -> int: ...


def a_little_ahead(record: JobRecord, furthest: int, last: int, clocks: Mapping[int, int], *, ending: bool) -> int:
    """All shards at one version that none of them can have passed yet."""
    return min(furthest + CAPTURE_AHEAD, record.rounds)


def slowest_clock(record: JobRecord, furthest: int, last: int, clocks: Mapping[int, int], *, ending: bool) -> int:
    """Only a name: the step that every replica has come to, as far as is known here.

    The shards of a streaming job are stored as they are when the word arrives, each with its clocks.
    """
    if ending:
        return record.rounds
    slowest = min(clocks.get(replica, 0) for replica in range(int(record.config["replicas"])))
    return min(max(last, slowest), record.rounds - 1)
