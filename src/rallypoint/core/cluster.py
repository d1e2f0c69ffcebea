"""The coordinator's machine: who joins, what they bring, when the job starts, when it is over."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.placement import place
from rallypoint.core.view import Member, View, ViewNumber, deal_replicas


class Phase(enum.Enum):
    """Where the job is."""

    GATHERING = "gathering"  # waiting for members and for what they bring
    PREPARING = "preparing"  # servers lay out their shards
    RUNNING = "running"
    OVER = "over"


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A server or a worker said hello."""

    member: Member
    role: str  # "server" or "worker"


@dataclass(frozen=True, slots=True)
class Proposed:
    """A worker brought its model's layout and its settings."""

    worker: str
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server has made room for its shards."""

    server: str


@dataclass(frozen=True, slots=True)
class Done:
    """A worker holds the last version."""

    worker: str


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


Event = Joined | Proposed | Prepared | Done | Left | Failed


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell this member why it cannot take part, and let it go."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Give every server the record and the view, so that it makes room for its shards."""

    record: JobRecord
    view: View


@dataclass(frozen=True, slots=True)
class Start:
    """Give every worker the view: the job runs."""

    view: View


@dataclass(frozen=True, slots=True)
class Finish:
    """Every worker is done: everybody may go home."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The job cannot go on."""

    reason: str


Effect = Refuse | Prepare | Start | Finish | Abort


@dataclass(slots=True)
class ClusterMachine:
    """A job of exactly `workers_wanted` workers and `servers_wanted` servers, started once all are here."""

    workers_wanted: int
    servers_wanted: int
    phase: Phase = Phase.GATHERING
    record: JobRecord | None = None
    view: View | None = None
    _workers: dict[str, Member] = field(default_factory=dict)
    _servers: dict[str, Member] = field(default_factory=dict)
    _proposed: set[str] = field(default_factory=set)
    _prepared: set[str] = field(default_factory=set)
    _done: set[str] = field(default_factory=set)

    def waiting_for(self) -> str | None:
        """What the job waits for before it can start, as a phrase (I8)."""
        match self.phase:
            case Phase.GATHERING:
                missing = [
                    *_missing(self.servers_wanted - len(self._servers), "server"),
                    *_missing(self.workers_wanted - len(self._workers), "worker"),
                ]
                silent = sorted(self._workers.keys() - self._proposed)
                return " and ".join(missing) if missing else f"the model of {', '.join(silent)}"
            case Phase.PREPARING:
                return f"room for the shards on {', '.join(sorted(self._servers.keys() - self._prepared))}"
            case _:
                return None

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; the effects are to be run in order."""
        if self.phase is Phase.OVER:
            return [Refuse(event.member.id, "the job is over")] if isinstance(event, Joined) else []
        match event:
            case Joined():
                return self._joined(event)
            case Proposed(worker=worker, record=record):
                return self._proposal(worker, record)
            case Prepared(server=server):
                self._prepared |= {server} & self._servers.keys()
                return self._start_when_prepared()
            case Done(worker=worker):
                self._done |= {worker} & self._workers.keys()
                return self._finish_when_done()
            case Failed(member=member, reason=reason):
                return self._abort(f"{member}: {reason}") if self._is_member(member) else []
            case Left(member=member, reason=reason):
                return self._left(member, reason)

    def _joined(self, event: Joined) -> list[Effect]:
        members = self._servers if event.role == "server" else self._workers
        wanted = self.servers_wanted if event.role == "server" else self.workers_wanted
        if self.phase is not Phase.GATHERING or len(members) >= wanted:
            return [Refuse(event.member.id, f"the job has all of its {wanted} {event.role}s already")]
        members[event.member.id] = event.member
        return self._prepare_when_gathered()

    def _proposal(self, worker: str, record: JobRecord) -> list[Effect]:
        if worker not in self._workers or self.phase is not Phase.GATHERING:
            return []
        if self.record is None:
            self.record = record
        elif (why := disagreement(self.record, record)) is not None:
            first = min(self._proposed)
            host = self._workers[worker].host
            return self._abort(f"{worker} on {host} brought {why} ({worker} is here, {first} is there)")
        self._proposed.add(worker)
        return self._prepare_when_gathered()

    def _prepare_when_gathered(self) -> list[Effect]:
        if len(self._servers) < self.servers_wanted or len(self._proposed) < self.workers_wanted:
            return []
        assert self.record is not None
        self.phase = Phase.PREPARING
        workers, servers = sorted(self._workers), sorted(self._servers)
        self.view = View(
            number=ViewNumber(1, 1),
            workers=tuple(self._workers[w] for w in workers),
            servers=tuple(self._servers[s] for s in servers),
            deal=deal_replicas(int(self.record.config["replicas"]), workers),
            primary=place(self.record.layout.shards, servers),
        )
        return [Prepare(self.record, self.view)]

    def _start_when_prepared(self) -> list[Effect]:
        if self.phase is not Phase.PREPARING or self._prepared < self._servers.keys():
            return []
        assert self.view is not None
        self.phase = Phase.RUNNING
        return [Start(self.view)]

    def _finish_when_done(self) -> list[Effect]:
        if self.phase is not Phase.RUNNING or self._done < self._workers.keys():
            return []
        self.phase = Phase.OVER
        return [Finish()]

    def _left(self, member: str, reason: str) -> list[Effect]:
        if self.phase is Phase.GATHERING:
            self._servers.pop(member, None)
            self._workers.pop(member, None)
            self._proposed.discard(member)
            if not self._proposed:
                self.record = None
            return []
        return self._abort(f"{member} is gone: {reason}") if self._is_member(member) else []

    def _is_member(self, id: str) -> bool:
        return id in self._servers or id in self._workers

    def _abort(self, reason: str) -> list[Effect]:
        self.phase = Phase.OVER
        return [Abort(reason)]


def _missing(count: int, noun: str) -> list[str]:
    return [f"{count} more {noun}{'s' if count > 1 else ''}"] if count > 0 else []
