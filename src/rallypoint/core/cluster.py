"""The coordinator's machine: who joins and leaves, what they bring, which view follows, when snapshots are due.

Time comes in with Tick only. What must survive the coordinator is in `state()`; the shell writes it down whenever
`revision` has risen, before it does anything else that an event has brought (I7).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.placement import place, place_backups
from rallypoint.core.speeds import Speeds
from rallypoint.core.view import Deal, Member, View, ViewNumber, deal_replicas, patch_hands

AHEAD = 2  # steps after the furthest one seen from which a new deal counts, so that nobody computes in vain
SNAPSHOT_PATIENCE = 10  # heartbeats without a part of a snapshot after which it is given up
_ATTEMPTS = 10_000  # snapshots of one coordinator: their numbers go on where those of the one before ended
CAPTURE_AHEAD = 3  # likewise for the version of a snapshot: no shard may have passed it when the word arrives


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How a job's cluster is to behave.

    Attributes:
        workers_start: workers to wait for before the job begins.
        workers_min: below so many the job waits.
        workers_max: so many compute; more stand by.
        servers: servers to wait for before the job begins.
        replication: 2 keeps every shard on a second server too (I4).
        heartbeat: seconds without a sign of life after which a member is given up.
        backup_tasks: give a straggler's replica to an idle worker too.
        snapshot_steps, snapshot_seconds: take a snapshot after so many steps of training, or so often; 0: never for
            that reason.
        snapshots: take one at the start, at the end and on demand, too.
    """

    workers_start: int = 1
    workers_min: int = 1
    workers_max: int = 1
    servers: int = 1
    replication: int = 1
    heartbeat: float = 3.0
    backup_tasks: bool = False
    snapshot_steps: int = 0
    snapshot_seconds: float = 0.0
    snapshots: bool = False


class Phase(enum.Enum):
    """Where the job is."""

    GATHERING = "gathering"  # waiting for members and for what they bring
    RUNNING = "running"
    RECOVERING = "recovering"  # shards were lost: looking for a snapshot, or for servers to load it
    OVER = "over"


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Effect: every worker is done, and everybody may go home. `lead` saves the model."""

    lead: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Effect: the job cannot go on."""

    reason: str


class ClusterState(msgspec.Struct, frozen=True):
    """What the next coordinator has to know."""

    record: JobRecord | None
    view: View | None
    in_step: tuple[int, ...]
    births: int
    epoch: int
    begun: bool
    furthest: int
    workers_max: int
    last_word: Finish | Abort | None = None


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A server or a worker said hello; `member.birth` is what it was given before, 0 if nothing."""

    member: Member
    role: str  # "server" or "worker"


@dataclass(frozen=True, slots=True)
class Proposed:
    """A worker brought its model's layout and its settings."""

    worker: str
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker has computed a replica of `step` in `seconds`, in the past that `since` names."""

    worker: str
    step: int
    replica: int
    seconds: float
    since: ViewNumber


@dataclass(frozen=True, slots=True)
class InStep:
    """A primary's backup of these shards, as they met in that view, holds all that it has published, and will from
    now on."""

    server: str
    backups: Mapping[int, ViewNumber]


@dataclass(frozen=True, slots=True)
class Leaving:
    """A worker was told to go: it hands its replicas back."""

    worker: str


@dataclass(frozen=True, slots=True)
class Done:
    """A worker holds the last version, in the past that `since` names."""

    worker: str
    since: ViewNumber


@dataclass(frozen=True, slots=True)
class Left:
    """A member's connection ended; `reason` is what is known of it."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A member gave up and says why."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life."""

    member: str


@dataclass(frozen=True, slots=True)
class Tick:
    """It is `now`, in seconds."""

    now: float


@dataclass(frozen=True, slots=True)
class Resized:
    """So many workers are to compute at most from now on."""

    workers: int


@dataclass(frozen=True, slots=True)
class SnapshotWanted:
    """Somebody asks for a snapshot."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A server has stored these shards of a snapshot."""

    server: str
    snapshot: str
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotLost:
    """A server could not take its part of a snapshot, or the manifest could not be written."""

    snapshot: str
    reason: str
    passed: int = -1  # a shard was at this version already


@dataclass(frozen=True, slots=True)
class Committed:
    """A snapshot is complete and durable."""

    snapshot: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest usable snapshot; "" if there is none."""

    snapshot: str
    version: int = -1


Event = (
    Joined | Proposed | Progress | InStep | Leaving | Done | Left | Failed | Heard | Tick | Resized | SnapshotWanted
    | Captured | SnapshotLost | Committed | Found
)  # fmt: skip


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell this member why it cannot take part, or no longer, and let it go."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell this member its birth number."""

    member: str
    birth: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Give this server the record, that the views are about."""

    server: str
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Publish:
    """Give the view to these members."""

    view: View
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assist:
    """Ask an idle worker for a straggler's replica."""

    worker: str
    step: int
    replica: int


@dataclass(frozen=True, slots=True)
class Capture:
    """Ask these servers for a snapshot."""

    snapshot: str
    version: int
    servers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """All parts are stored: write the manifest."""

    snapshot: str
    version: int


@dataclass(frozen=True, slots=True)
class FindSnapshot:
    """Look for the newest usable snapshot; the answer is Found."""


@dataclass(frozen=True, slots=True)
class Say:
    """A sentence for the people who watch."""

    text: str


Effect = (
    Refuse | Admit | Prepare | Publish | Assist | Capture | Commit | FindSnapshot | Say | Finish | Abort
)  # fmt: skip


@dataclass(slots=True)
class _Snapshot:
    """A snapshot being taken."""

    id: str
    version: int
    missing: set[int]
    news: float  # when the last of its parts came


@dataclass(slots=True)
class ClusterMachine:
    """One job. `recovered` is the state that an earlier coordinator left; `resume` a record and a snapshot to go on
    from."""

    terms: Terms
    recovered: ClusterState | None = None
    resume: tuple[JobRecord, str, int] | None = None
    phase: Phase = Phase.GATHERING
    record: JobRecord | None = None
    view: View | None = None
    revision: int = 0
    last_word: Finish | Abort | None = None
    furthest: int = -1  # the furthest step that a report has come of
    _workers_max: int = 1
    _epoch: int = 1
    _births: int = 0
    _begun: bool = False  # the first weights are safe, or a step has been computed: they cannot be brought again
    _workers: dict[str, Member] = field(default_factory=dict)
    _servers: dict[str, Member] = field(default_factory=dict)
    _proposed: set[str] = field(default_factory=set)
    _leaving: set[str] = field(default_factory=set)
    _done: set[str] = field(default_factory=set)
    _awaited: set[str] = field(default_factory=set)  # known to an earlier coordinator, not back yet
    _in_step: set[int] = field(default_factory=set)
    _heard: dict[str, float] = field(default_factory=dict)
    _speeds: Speeds = field(default_factory=Speeds)
    _clocks: dict[int, int] = field(default_factory=dict)  # of each replica, in a streaming job
    _now: float = 0.0
    _taking: _Snapshot | None = None
    _attempts: int = 0
    _wanted: bool = False
    _last_taken: tuple[int, float] = (0, 0.0)
    _final: bool = False  # the last version has been stored, or cannot be
    _origin: str = ""
    _last_number: ViewNumber = field(default_factory=ViewNumber)

    def __post_init__(self) -> None:
        self._workers_max = self.terms.workers_max
        if self.resume is not None:
            self.record, self._origin, self.furthest = self.resume[0], self.resume[1], self.resume[2] - 1
            self._begun = True
            self._last_taken = (self.resume[2], 0.0)
        if self.recovered is not None:
            self._recover(self.recovered)

    # ---- what must survive ----

    def state(self) -> ClusterState:
        """To be written down when `revision` has risen."""
        return ClusterState(
            self.record, self.view, tuple(sorted(self._in_step)), self._births, self._epoch, self._begun, self.furthest,
            self._workers_max, self.last_word,
        )  # fmt: skip

    def _recover(self, state: ClusterState) -> None:
        self._births, self._epoch = state.births, state.epoch + 1
        self.revision += 1
        if self.resume is not None:
            return  # whoever was there is gone; only the numbers go on
        self.record, self.view, self._begun = state.record, state.view, state.begun
        self._in_step, self.furthest, self._workers_max = set(state.in_step), state.furthest, state.workers_max
        self.last_word = state.last_word
        if state.view is None or state.last_word is not None:
            self.phase = Phase.GATHERING if state.last_word is None else Phase.OVER
            return
        self.phase = Phase.RUNNING
        self._workers = {member.id: member for member in state.view.workers}
        self._servers = {member.id: member for member in state.view.servers}
        self._proposed = set(self._workers)
        self._awaited = {*self._workers, *self._servers}
        self._final = not self.terms.snapshots

    # ---- questions the shell asks ----

    def waiting_for(self) -> str | None:
        """What the job waits for as a whole, as a phrase (I8); None when it is a step."""
        workers, servers = len(self._proposed - self._leaving), len(self._servers)
        match self.phase:
            case Phase.GATHERING:
                missing = [
                    *_missing(self.terms.servers - servers, "server"),
                    *_missing(self._workers_to_begin - len(self._workers), "worker"),
                ]
                silent = sorted(self._workers.keys() - self._proposed)
                return " and ".join(missing) if missing else f"the model of {', '.join(silent)}"
            case Phase.RECOVERING:
                return " and ".join(_missing(1 - servers, "server")) or "a snapshot to go back to"
            case Phase.RUNNING if workers < self.terms.workers_min:
                missing = _missing(self.terms.workers_min - workers, "worker")
                return f"{missing[0]} (at least {self.terms.workers_min} are wanted)"
            case _:
                return None

    @property
    def exposed(self) -> int:
        """How many shards would be lost with one server."""
        return 0 if self.view is None else len(self.view.primary.keys() - self._in_step)

    def lateness(self) -> Mapping[str, tuple[float, float]]:
        """Every worker's seconds per replica: median and 99th percentile of the last ones."""
        return self._speeds.percentiles()

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; the effects are to be run in order."""
        if self.phase is Phase.OVER:
            return [Refuse(event.member.id, "the job is over")] if isinstance(event, Joined) else []
        match event:
            case Heard(member=member):
                self._heard[member] = self._now
                return []
            case Progress():
                return self._progress(event)
            case Tick(now=now):
                return self._tick(now)
            case Joined():
                return self._joined(event)
            case Proposed(worker=worker, record=record):
                return self._proposal(worker, record)
            case InStep():
                return self._now_in_step(event.server, event.backups)
            case Leaving(worker=worker):
                self._leaving |= {worker} & self._workers.keys()
                return self._turn()
            case Done(worker=worker, since=since):
                return self._worker_done(worker) if self._is_current(since) else []
            case Resized(workers=workers):
                self._workers_max = max(1, workers)
                self.revision += 1
                return self._turn()
            case Failed(member=member, reason=reason):
                return self._abort(f"{member}: {reason}") if self._is_member(member) else []
            case Left(member=member, reason=reason):
                return self._left(member, reason)
            case _:
                return self._snapshot_event(event)

    # ---- members ----

    def _joined(self, event: Joined) -> list[Effect]:
        member, members = event.member, self._servers if event.role == "server" else self._workers
        known = members.get(member.id)
        self._heard[member.id] = self._now
        if known is not None and known.birth == member.birth and member.id in self._awaited:
            return self._returned(member)
        effects: list[Effect] = []
        if known is not None:  # a new process of that name: the old one is gone, whether or not we have noticed
            effects += self._left(member.id, "another process came under its name")
        self._births += 1
        members[member.id] = msgspec.structs.replace(member, birth=self._births)
        effects.append(Admit(member.id, self._births))
        if event.role == "server" and self.record is not None and self.phase is not Phase.GATHERING:
            effects.append(Prepare(member.id, self.record))
        if self.phase is Phase.GATHERING:
            return [*effects, *self._begin_when_gathered()]
        if self.phase is Phase.RECOVERING:
            return [*effects, *([FindSnapshot()] if event.role == "server" else [])]
        return [*effects, *(self._turn() if event.role == "server" else [])]

    def _returned(self, member: Member) -> list[Effect]:
        """A member that outlived the coordinator before us."""
        self._awaited.discard(member.id)
        effects: list[Effect] = [Admit(member.id, member.birth)]
        if self.view is not None:
            effects.append(Publish(self.view, (member.id,)))
        return effects

    def _proposal(self, worker: str, record: JobRecord) -> list[Effect]:
        if worker not in self._workers:
            return []
        if self.record is None:
            self.record = record
            self.revision += 1
        elif (why := disagreement(self.record, record)) is not None:
            return self._disagrees(worker, why)
        if worker in self._proposed:
            return []
        self._proposed.add(worker)
        return self._begin_when_gathered() if self.phase is Phase.GATHERING else self._turn()

    def _disagrees(self, worker: str, why: str) -> list[Effect]:
        host = self._workers[worker].host
        other = min(self._proposed) if self._proposed else "the job"
        sentence = f"{worker} on {host} brought {why} ({worker} is here, {other} is there)"
        if self.phase is Phase.GATHERING:
            return self._abort(sentence)
        del self._workers[worker]  # a late one cannot end a job that runs well without it
        return [Refuse(worker, sentence), Say(f"refused: {sentence}")]

    def _begin_when_gathered(self) -> list[Effect]:
        if len(self._servers) < self.terms.servers or len(self._proposed) < self._workers_to_begin:
            return []
        assert self.record is not None
        self.phase = Phase.RUNNING
        prepare = [Prepare(server, self.record) for server in self._servers]
        return [*prepare, *self._start_over(self._origin)]

    @property
    def _workers_to_begin(self) -> int:
        """Once the job has begun some may have left for good: as many as it needs to go on are enough."""
        begun_before = self._last_number.count > 0 or self.view is not None
        return self.terms.workers_min if begun_before else self.terms.workers_start

    def _left(self, member: str, reason: str) -> list[Effect]:
        if not self._is_member(member):
            return []
        was_worker = self._workers.pop(member, None) is not None
        self._servers.pop(member, None)
        for members in (self._proposed, self._done, self._awaited):
            members.discard(member)
        self._heard.pop(member, None)
        self._speeds.forget(member)
        polite = member in self._leaving
        self._leaving.discard(member)
        if self.phase is Phase.GATHERING:
            if not self._proposed and self.resume is None:
                self.record = None
            return []
        said = Say(f"{member} {'has left' if polite else 'is gone'}: {reason}")
        if self.phase is Phase.RECOVERING:
            return [said]
        if was_worker and not self._begun and self.view is not None and member == self.view.first:
            return [said, *self._start_over("")]  # it may have brought half of the first weights
        return [said, *self._turn(), *self._finish_when_done()]

    def _is_current(self, since: ViewNumber) -> bool:
        """Or was it said of a past that is void?"""
        return self.view is not None and self.view.since == since

    def _is_member(self, id: str) -> bool:
        return id in self._servers or id in self._workers

    def _worker_done(self, worker: str) -> list[Effect]:
        if worker not in self._workers or self.phase is not Phase.RUNNING or self.record is None:
            return []
        self._done.add(worker)
        self.furthest = max(self.furthest, self.record.rounds - 1)
        effects: list[Effect] = []
        if self.view is not None and not self.view.ending:
            effects += self._turn(ending=True)
            effects += self._take_snapshot() if self._taking is None else []
        return [*effects, *self._finish_when_done()]

    def _finish_when_done(self) -> list[Effect]:
        present = self._proposed & self._workers.keys()
        if self.phase is not Phase.RUNNING or not present or self._done < present or not self._final:
            return []
        self.phase = Phase.OVER
        self.revision += 1
        assert self.record is not None
        assert self.view is not None
        lead = self.view.lead(self.record.rounds)
        self.last_word = Finish(lead if lead in present else min(present))
        return [self.last_word]

    def _abort(self, reason: str) -> list[Effect]:
        self.phase = Phase.OVER
        self.revision += 1
        self.last_word = Abort(reason)
        return [self.last_word]

    # ---- time ----

    def _tick(self, now: float) -> list[Effect]:
        first, self._now = self._now == 0.0, now
        if first:
            self._heard = dict.fromkeys((*self._workers, *self._servers), now)
            self._last_taken = (self._last_taken[0], now)
        effects: list[Effect] = []
        silent = [m for m in (*self._workers, *self._servers) if now - self._heard.get(m, now) > self.terms.heartbeat]
        for member in silent:
            why = f"no sign of life for {now - self._heard[member]:.1f} s"
            effects.append(Refuse(member, f"given up: {why}"))
            effects += self._left(member, why)
        if self.phase is Phase.RUNNING:
            if self._storing_first_weights and self._taking is None and not self._awaited:
                effects += self._start_over("")  # a coordinator before us had just begun
            effects += self._deal_again_if_uneven()
            effects += self._assist_stragglers()
            effects += self._give_up_snapshot()
            effects += self._snapshot_if_due()
        return effects

    # ---- replicas ----

    def _progress(self, event: Progress) -> list[Effect]:
        self._heard[event.worker] = self._now
        if not self._is_current(event.since):
            return []
        if not self._begun:
            self._begun = True
            self.revision += 1
        self._speeds.computed(event.worker, event.step, event.replica, event.seconds, self._now)
        self.furthest = max(self.furthest, event.step)
        self._clocks[event.replica] = max(self._clocks.get(event.replica, 0), event.step + 1)
        return []

    def _active(self) -> list[str]:
        """The workers that compute, the longest here first; the others stand by."""
        able = [worker for worker in self._workers if worker in self._proposed and worker not in self._leaving]
        return able[: self._workers_max] if len(able) >= self.terms.workers_min else []

    def _deals(self) -> tuple[Deal, ...]:
        active = self._active()
        if not active or self.record is None or self._storing_first_weights:
            return ()
        rates = self._speeds.rates(active)
        fair = deal_replicas(int(self.record.config["replicas"]), sorted(active), rates)
        before = self.view.hands(self.furthest + 1) if self.view is not None else {}
        if not before:
            return (Deal(0, fair),)
        now = patch_hands(before, active, rates)
        if self._speeds.makespan(now, rates) <= self._speeds.makespan(fair, rates) * 1.1:
            return (Deal(0, now),)
        return (Deal(0, now), Deal(self.furthest + AHEAD, fair))

    @property
    def _storing_first_weights(self) -> bool:
        """Nothing is computed before version 0 is safe: nobody could bring those weights a second time."""
        return self.terms.snapshots and not self._begun

    def _deal_again_if_uneven(self) -> list[Effect]:
        """When somebody has become slower or faster than what it was dealt for."""
        if self.view is None or self.record is None or not self._speeds.settled(self._active(), self._now):
            return []
        if self.record.sticky:
            return []  # a replica that moves leaves behind what is worth more
        if len(self.view.deals) > 1 and self.view.deals[-1].start > self.furthest:
            return []  # the last change has not come to count yet
        effects = self._turn()
        if effects:
            self._speeds.unsettle(self._now)
        return effects

    def _assist_stragglers(self) -> list[Effect]:
        if not self.terms.backup_tasks or self.view is None or self.record is None:
            return []
        found = self._speeds.straggler(self.view.hands(self.furthest), self.furthest, self._active(), self._now)
        return [] if found is None else [Assist(*found)]

    # ---- views ----

    def _turn(self, *, ending: bool | None = None) -> list[Effect]:
        """The view that follows from who is here now, if it differs from the one in force."""
        if self.phase is not Phase.RUNNING or self.view is None or self.record is None:
            return []
        primary = self._surviving(self.view)
        if primary is None:
            return self._roll_back()
        primary, backup = self._balanced(primary)
        view = self._view(
            primary, backup, since=self.view.since, origin=self.view.origin,
            ending=self.view.ending if ending is None else ending,
        )  # fmt: skip
        if self._says_nothing_new(view, self.view):
            return []
        before = self.view
        if self._storing_first_weights and view.primary != before.primary:
            return self._start_over("")
        self._in_step = {s for s in self._in_step if _pair(view, s) == _pair(before, s)}
        return self._publish(view, abandon=view.primary != before.primary)

    def _says_nothing_new(self, view: View, before: View) -> bool:
        """Does `view` differ from the one before in nothing but its number, and deals that no longer count?"""
        pending = any(deal.start > self.furthest + 1 for deal in before.deals)
        same_hands = len(view.deals) < 2 and not pending and view.hands(0) == before.hands(self.furthest + 1)
        deals = before.deals if same_hands else view.deals
        return msgspec.structs.replace(view, number=before.number, deals=deals) == before

    def _surviving(self, view: View) -> dict[int, str] | None:
        """A primary for every shard among those who hold what is needed; None when a shard is lost."""
        births = {member.id: member.birth for member in view.servers}
        alive = {id for id, member in self._servers.items() if births.get(id) == member.birth}
        primary: dict[int, str] = {}
        for shard, home in view.primary.items():
            if home not in alive:
                home = view.backup.get(shard, "") if shard in self._in_step else ""
            if home not in alive:
                return None
            primary[shard] = home
        return primary

    def _balanced(self, primary: dict[int, str]) -> tuple[dict[int, str], dict[int, str]]:
        """Move shards towards an even load: a new home is filled as a backup first, and then promoted."""
        assert self.record is not None
        assert self.view is not None
        shards, servers = self.record.layout.shards, list(self._servers)
        births = {member.id: member.birth for member in self.view.servers}
        kept = {
            s: b for s, b in self.view.backup.items()
            if b in self._servers and births.get(b) == self._servers[b].birth and b != primary[s]
        }  # fmt: skip
        wanted = place(shards, servers, primary)
        moving = {s for s, home in wanted.items() if home != primary[s]}
        if moving and all(kept.get(s) == wanted[s] and s in self._in_step for s in moving):
            primary = {s: wanted[s] if s in moving else home for s, home in primary.items()}
            kept = {s: b for s, b in kept.items() if s not in moving}
            moving = set()
        kept |= {s: wanted[s] for s in moving}
        if self.terms.replication < 2:
            return primary, {s: b for s, b in kept.items() if s in moving}
        hosts = {id: member.host for id, member in self._servers.items()}
        return primary, place_backups(shards, servers, primary, kept, hosts)

    def _roll_back(self) -> list[Effect]:
        """Shards are lost: back to the last snapshot, or, if nothing has begun, to the beginning."""
        self._done.clear()
        effects = self._abandon_snapshot()
        if self._begun:
            self.phase = Phase.RECOVERING
            return [*effects, Say("parameters are lost with their servers: going back to the last snapshot"),
                    FindSnapshot()]  # fmt: skip
        return [*effects, *self._start_over("")]

    def _found(self, event: Found) -> list[Effect]:
        if self.phase is not Phase.RECOVERING or not self._servers:
            return []
        if event.snapshot == "":
            return self._abort(
                "parameters were lost with their servers and there is no snapshot to go back to: set replication to 2, "
                "or snapshots to every so many seconds"
            )
        self.phase = Phase.RUNNING
        self.furthest = event.version - 1
        self._last_taken = (event.version, self._now)
        said = Say(f"going on from snapshot {event.snapshot}: version {event.version}")
        return [said, *self._start_over(event.snapshot)]

    def _start_over(self, origin: str) -> list[Effect]:
        """A view from which everything before is void."""
        assert self.record is not None
        if not self._servers or (origin == "" and not self._active()):
            self.phase = Phase.GATHERING  # nobody to begin with
            return []
        self._in_step.clear()
        self._speeds.restart()
        self._clocks.clear()
        self._final = not self.terms.snapshots
        shards, servers = self.record.layout.shards, list(self._servers)
        primary = place(shards, sorted(servers))
        hosts = {id: member.host for id, member in self._servers.items()}
        backup = place_backups(shards, servers, primary, None, hosts) if self.terms.replication > 1 else {}
        self._taking = None
        capture = self._capture(0, servers) if origin == "" and self.terms.snapshots else []
        view = self._view(primary, backup, since=None, origin=origin, ending=False)
        return [*self._publish(view, abandon=False), *capture]

    def _view(
        self, primary: dict[int, str], backup: dict[int, str], *, since: ViewNumber | None, origin: str, ending: bool
    ) -> View:
        if since is None:
            self.view = None  # the hands of a void past say nothing about who has computed what
        view = View(
            number=(number := self._next_number()), since=since or number,
            workers=tuple(self._workers[w] for w in self._workers if w in self._proposed),
            servers=tuple(self._servers.values()), deals=self._deals(), primary=primary, backup=backup, origin=origin,
            first=self.view.first if self.view is not None else min(self._active(), default=""), ending=ending,
        )  # fmt: skip
        before = self.view
        met = {
            shard: before.met[shard] if before is not None and _pair(before, shard) == _pair(view, shard) else number
            for shard in backup
        }
        return msgspec.structs.replace(view, met=met)

    def _next_number(self) -> ViewNumber:
        last = self._last_number
        return ViewNumber(self._epoch, last.count + 1 if last.epoch == self._epoch else 1)

    def _publish(self, view: View, *, abandon: bool) -> list[Effect]:
        self.view, self._last_number = view, view.number
        self.revision += 1
        members = (*(m.id for m in view.servers), *(m.id for m in view.workers))
        dropped = self._abandon_snapshot() if abandon else []
        return [*dropped, Publish(view, members)]

    def _now_in_step(self, server: str, backups: Mapping[int, ViewNumber]) -> list[Effect]:
        if self.view is None or self.phase is not Phase.RUNNING:
            return []
        new = {
            shard for shard, met in backups.items()
            if self.view.primary.get(shard) == server and self.view.met.get(shard) == met
        } - self._in_step  # fmt: skip
        if not new:
            return []
        self._in_step |= new
        self.revision += 1
        return self._turn()

    # ---- snapshots ----

    def _snapshot_event(self, event: Event) -> list[Effect]:
        match event:
            case SnapshotWanted():
                self._wanted = True
                return self._snapshot_if_due()
            case Captured(snapshot=snapshot, shards=shards) if self._taking and self._taking.id == snapshot:
                self._taking.missing -= set(shards)
                self._taking.news = self._now
                return [] if self._taking.missing else [Commit(snapshot, self._taking.version)]
            case SnapshotLost(snapshot=snapshot) if self._taking and self._taking.id == snapshot:
                return self._snapshot_lost(event)
            case Committed(snapshot=snapshot) if self._taking and self._taking.id == snapshot:
                version, self._taking = self._taking.version, None
                self._last_taken = (version, self._now)
                if not self._begun:
                    return self._begin()
                if self._at_the_end(version):
                    self._final = True
                    return self._finish_when_done()
                return self._take_snapshot() if self.view is not None and self.view.ending else []
            case Found():
                return self._found(event)
            case _:
                return []

    def _snapshot_lost(self, event: SnapshotLost) -> list[Effect]:
        assert self._taking is not None
        version, self._taking = self._taking.version, None
        if event.passed >= 0:
            self.furthest = max(self.furthest, event.passed)
            self._wanted = True
            return []
        if self._at_the_end(version):
            self._final = True
        said = Say(f"snapshot {event.snapshot} could not be taken: {event.reason}")
        return [said, *(self._begin() if not self._begun else self._finish_when_done())]

    def _begin(self) -> list[Effect]:
        """The first weights are safe (or cannot be made so): let the workers compute."""
        self._begun = True
        self.revision += 1
        return self._turn()

    def _at_the_end(self, version: int) -> bool:
        return self.record is not None and version >= self.record.rounds

    def _give_up_snapshot(self) -> list[Effect]:
        """No part of the one under way has come for long: a server may not have heard, or cannot write."""
        patience = SNAPSHOT_PATIENCE * self.terms.heartbeat
        if self._taking is None or self._now - self._taking.news < patience:
            return []
        missing = len(self._taking.missing)
        why = f"{missing} of its shards have not been stored for {patience:.0f} s"
        self._wanted = True
        return self._snapshot_lost(SnapshotLost(self._taking.id, why))

    def _snapshot_if_due(self) -> list[Effect]:
        if self._taking is not None or not self._begun or not self.terms.snapshots or self.phase is not Phase.RUNNING:
            return []
        assert self.record is not None
        version, when = self._last_taken
        since = self.furthest + 1 - version
        by_steps = 0 < self.terms.snapshot_steps <= since * self.record.steps_per_round
        by_time = 0 < self.terms.snapshot_seconds <= self._now - when and since > 0
        ended = self.view is not None and self.view.ending and not self._final
        return self._take_snapshot() if by_steps or by_time or self._wanted or ended else []

    def _take_snapshot(self) -> list[Effect]:
        if not self.terms.snapshots or self.record is None or self.view is None or self._final:
            return []
        if self._awaited & self._servers.keys():
            self._wanted = True  # they could not hear of it
            return []
        self._wanted = False
        version = self._step_of_all() if self.record.streaming else self.furthest + CAPTURE_AHEAD
        version = min(version, self.record.rounds)
        return self._capture(version, [member.id for member in self.view.servers])

    def _step_of_all(self) -> int:
        """What a snapshot of a streaming job is called: the step that every replica has come to, as far as known here.

        Its shards are as they are when the word arrives, each with the clocks of what is in it.
        """
        assert self.record is not None
        if self.view is not None and self.view.ending:
            return self.record.rounds
        slowest = min(self._clocks.get(replica, 0) for replica in range(int(self.record.config["replicas"])))
        return min(max(self._last_taken[0], slowest), self.record.rounds - 1)

    def _capture(self, version: int, servers: Sequence[str]) -> list[Effect]:
        assert self.record is not None
        self._attempts += 1
        id = f"step-{version:08d}-{self._epoch * _ATTEMPTS + self._attempts}"
        self._taking = _Snapshot(id, version, {shard.index for shard in self.record.layout.shards}, self._now)
        return [Capture(id, version, tuple(servers))]

    def _abandon_snapshot(self) -> list[Effect]:
        """Shards have changed hands: the snapshot under way cannot be completed; the next one is due at once."""
        if self._taking is None:
            return []
        self._taking = None
        self._wanted = True
        return []


def _pair(view: View, shard: int) -> list[Member]:
    """The shard's primary and backup: the processes, not their names."""
    members = {member.id: member for member in view.servers}
    return [members[name] for name in (view.primary[shard], view.backup.get(shard)) if name in members]


def _missing(count: int, noun: str) -> list[str]:
    return [f"{count} more {noun}{'s' if count > 1 else ''}"] if count > 0 else []
