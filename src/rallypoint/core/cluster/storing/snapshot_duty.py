"""When to take a snapshot, of which version, which parts of it are missing, and when to give it up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.core.cluster.terms import SnapshotPeriod, Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.protocol import NotStored

CAPTURE_AHEAD = 3  # steps after the furthest one seen: no shard may be past the version when the request arrives
SNAPSHOT_PATIENCE = 10  # heartbeats in which no file of a snapshot is stored, after which it is given up
LONGEST_PAUSE_S = 60.0  # between snapshots that fail; it begins with a heartbeat, and doubles
ATTEMPTS = 10_000  # the most snapshots of one coordinator: no two coordinators use the same number


@dataclass(slots=True)
class SnapshotInProgress:
    """A snapshot being taken by `writers`.

    Attributes:
        missing: the shards that are not stored yet.
        news: the time (s) of the last file that was stored, or when storing could begin, if that was later.
        committing: its manifest is being written.
    """

    id: str
    version: int
    missing: set[int]
    news: float
    writers: tuple[str, ...] = ()
    committing: bool = False


@dataclass(slots=True)
class SnapshotDuty:
    """Decides when to take snapshots and tracks the one in progress. At most one is taken at a time.

    Attributes:
        terms: whether to take any, and how patient to be.
        epoch: the coordinator's epoch.
        taking: the snapshot in progress; None if there is none.
        wanted: a snapshot is due: a user asked for one, or the last one could not be completed.
        last: the version of the last complete snapshot, and the time (s) when it was complete.
        final: no snapshot of the last version is needed any more: it is stored, or not wanted.
        held: the last version could not be stored; members hold it until there is room.
    """

    terms: Terms
    epoch: int = 1
    taking: SnapshotInProgress | None = None
    wanted: bool = False
    last: tuple[int, float] = (0, 0.0)
    final: bool = False
    held: bool = False
    _attempts: int = 0
    _clocks: dict[int, int] = field(default_factory=dict)  # replica -> its next step
    _failed: int = 0  # snapshots in a row
    _not_before: float = 0.0  # the time (s) before which none is taken, unless the job ends

    def __post_init__(self) -> None:
        self.final = not self.terms.snapshots

    def ask(self) -> None:
        """A user asks for a snapshot: it is due at once, also in the pause after one that failed."""
        self.wanted, self._not_before = True, 0.0

    def computed(self, step: int, replica: int) -> None:
        """Note that a worker has computed `replica` of `step`."""
        self._clocks[replica] = max(self._clocks.get(replica, 0), step + 1)

    def is_due(
        self, record: JobRecord, furthest: int, now: float, *, period: SnapshotPeriod, ending: bool, lead: int = 0
    ) -> bool:
        """True if it is time to ask for the next snapshot.

        `furthest` is the highest step reported; `ending`: a worker holds the last version. Snapshots by steps are of
        multiples of `period.steps`; they have to be asked for `lead` steps before that. After one that failed there
        is a pause, which doubles with each further one: its cause (a full disk, no file descriptors) may last.
        """
        if self.taking is not None or not self.terms.snapshots:
            return False
        version, when = self.last
        new_steps = furthest + 1 - version
        rounds = -(-period.steps // record.steps_per_round)
        by_steps = rounds > 0 and furthest + max(1, lead) >= (version // rounds + 1) * rounds
        by_time = 0 < period.seconds <= now - when and new_steps > 0
        due = self.wanted or by_steps or by_time or self.held
        return (due and now >= self._not_before) or (ending and not self.final and not self.held)

    def next_version(self, record: JobRecord, furthest: int, *, in_rounds: bool, ending: bool) -> int:
        """The version of the next snapshot. `furthest` is the highest step reported.

        Of a job `in_rounds`: one that no shard can be past yet, the same for all shards. Of a streaming job: the step
        that every replica is known to have reached. It only names the snapshot: servers store each shard as it is when
        the request arrives, with the replicas' clocks.
        """
        if in_rounds:
            return min(furthest + CAPTURE_AHEAD, record.rounds)
        if ending:
            return record.rounds
        slowest = min(self._clocks.get(replica, 0) for replica in range(int(record.config["replicas"])))
        return min(max(self.last[0], slowest), record.rounds - 1)

    def begin(self, version: int, shards: Iterable[int], now: float, writers: Iterable[str] = ()) -> str:
        """Begin a snapshot of `version` by `writers`, which replaces the one in progress. Returns its id."""
        self._attempts += 1
        id = f"step-{version:08d}-{self.epoch * ATTEMPTS + self._attempts}"
        self.taking = SnapshotInProgress(id, version, set(shards), now, tuple(writers))
        return id

    def under_way(self, id: str) -> SnapshotInProgress | None:
        """The snapshot in progress if it has this id, else None."""
        return self.taking if self.taking is not None and self.taking.id == id else None

    def stored(self, shards: Iterable[int], now: float) -> bool:
        """Note that these shards of the snapshot in progress are stored. Returns True if all shards are."""
        assert self.taking is not None
        self.taking.missing -= set(shards)
        self.taking.news = now
        return not self.taking.missing

    def complete(self, now: float) -> int:
        """Note that the snapshot in progress is complete and durable. Returns its version."""
        assert self.taking is not None
        self.last, self.taking = (self.taking.version, now), None
        self._failed, self._not_before = 0, 0.0
        return self.last[0]

    def lost(self, passed: int, now: float) -> int:
        """Drop the snapshot in progress: it cannot be completed. Returns its version.

        If a shard was past that version already (`passed` is not -1), the next snapshot is due at once; else after a
        pause.
        """
        assert self.taking is not None
        version, self.taking = self.taking.version, None
        self.wanted = self.wanted or passed >= 0
        if passed < 0:
            self._not_before = now + min(LONGEST_PAUSE_S, self.terms.heartbeat * 2.0**self._failed)
            self._failed = min(self._failed + 1, 30)
        return version

    def hold(self) -> bool:
        """The last version could not be stored: keep trying, more and more seldom. Returns True the first time."""
        first, self.held, self.wanted = not self.held, True, False
        return first

    def abandon(self) -> None:
        """Drop the snapshot in progress, if any: shards have moved. The next one is due at once."""
        self.wanted = self.wanted or self.taking is not None
        self.taking = None

    def restart(self) -> None:
        """Drop the snapshot in progress and the replicas' clocks: a new generation begins."""
        self.taking = None
        self.final = not self.terms.snapshots
        self.held = False
        self._clocks.clear()

    def given_up(self, now: float, missed: Sequence[str] = ()) -> NotStored | None:
        """The event to handle when nothing of the snapshot in progress was stored for too long; else None.

        A member may have missed the request, or its store hangs. `missed` are those that have not stored all of their
        shards. The next snapshot is due after the pause that follows one that failed.
        """
        patience = SNAPSHOT_PATIENCE * self.terms.heartbeat
        if self.taking is None or now - self.taking.news < patience:
            return None
        self.wanted = True
        whose = f" ({', '.join(missed)})" if missed else ""
        shards = f"{len(self.taking.missing)} of its shards{whose}"
        return NotStored(self.taking.id, f"{shards} are not stored, and none was for {patience:.0f} s")
