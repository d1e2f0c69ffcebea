"""The duty to take snapshots: when one is due, of which version, what of it is missing, when it is given up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint.core.cluster.events import SnapshotLost
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord

CAPTURE_AHEAD = 3  # steps after the furthest one seen: no shard may have passed the version when the word arrives
SNAPSHOT_PATIENCE = 10  # heartbeats without a part of a snapshot after which it is given up
_ATTEMPTS = 10_000  # snapshots of one coordinator: their numbers go on where those of the one before ended


# ---- which version the next one is of: a rule for jobs with rounds, one for streaming jobs ----


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


# ---- the duty ----


@dataclass(slots=True)
class SnapshotInProgress:
    """A snapshot being taken: the shards of which no part has been stored yet, and when the last part came."""

    id: str
    version: int
    missing: set[int]
    news: float


@dataclass(slots=True)
class SnapshotDuty:
    """At most one snapshot is taken at a time; `epoch` is the coordinator's.

    Attributes:
        taking: the snapshot under way.
        wanted: somebody asked for one, or the last one came to nothing.
        last: the version of the last one, and when it was complete.
        final: the last version has been stored, cannot be, or need not be.
    """

    terms: Terms
    epoch: int = 1
    taking: SnapshotInProgress | None = None
    wanted: bool = False
    last: tuple[int, float] = (0, 0.0)
    final: bool = False
    _attempts: int = 0
    _clocks: dict[int, int] = field(default_factory=dict)  # of each replica: the step that it has come to

    def __post_init__(self) -> None:
        self.final = not self.terms.snapshots

    def computed(self, step: int, replica: int) -> None:
        """A replica of `step` has been computed."""
        self._clocks[replica] = max(self._clocks.get(replica, 0), step + 1)

    def is_due(self, record: JobRecord, furthest: int, now: float, *, ending: bool, lead: int = 0) -> bool:
        """Is it time for another one, where `furthest` is the furthest step seen and `ending` that somebody is done?

        Those that are due by steps are of multiples of `snapshot_steps`, where they can be asked for in time: `lead`
        steps before.
        """
        if self.taking is not None or not self.terms.snapshots:
            return False
        version, when = self.last
        new_steps = furthest + 1 - version
        rounds = -(-self.terms.snapshot_steps // record.steps_per_round)
        by_steps = rounds > 0 and furthest + max(1, lead) >= (version // rounds + 1) * rounds
        by_time = 0 < self.terms.snapshot_seconds <= now - when and new_steps > 0
        return by_steps or by_time or self.wanted or (ending and not self.final)

    def next_version(self, record: JobRecord, furthest: int, rule: VersionRule, *, ending: bool) -> int:
        """Which version the next one is of, by the job's rule."""
        return rule(record, furthest, self.last[0], self._clocks, ending=ending)

    def begin(self, version: int, shards: Iterable[int], now: float) -> str:
        """One of `version` is being taken from now on, in place of any that was; its id."""
        self._attempts += 1
        id = f"step-{version:08d}-{self.epoch * _ATTEMPTS + self._attempts}"
        self.taking = SnapshotInProgress(id, version, set(shards), now)
        return id

    def under_way(self, id: str) -> SnapshotInProgress | None:
        """The snapshot being taken, if that is its id."""
        return self.taking if self.taking is not None and self.taking.id == id else None

    def stored(self, shards: Iterable[int], now: float) -> bool:
        """A part of the one under way is in the store; are all?"""
        assert self.taking is not None
        self.taking.missing -= set(shards)
        self.taking.news = now
        return not self.taking.missing

    def complete(self, now: float) -> int:
        """The one under way is durable; its version."""
        assert self.taking is not None
        self.last, self.taking = (self.taking.version, now), None
        return self.last[0]

    def lost(self, passed: int) -> int:
        """The one under way cannot be completed; its version. If a shard had `passed` it (not -1), another is due."""
        assert self.taking is not None
        version, self.taking = self.taking.version, None
        self.wanted = self.wanted or passed >= 0
        return version

    def abandon(self) -> None:
        """Shards have other homes: the one under way, if any, cannot be completed, and the next is due at once."""
        self.wanted = self.wanted or self.taking is not None
        self.taking = None

    def restart(self) -> None:
        """A new generation begins: whatever was being taken is stale."""
        self.taking = None
        self.final = not self.terms.snapshots
        self._clocks.clear()

    def given_up(self, now: float) -> SnapshotLost | None:
        """What is to be said when no part of the one under way has come for long; then another is due.

        A server may not have heard, or cannot write.
        """
        patience = SNAPSHOT_PATIENCE * self.terms.heartbeat
        if self.taking is None or now - self.taking.news < patience:
            return None
        self.wanted = True
        missing = len(self.taking.missing)
        return SnapshotLost(self.taking.id, f"{missing} of its shards have not been stored for {patience:.0f} s")
