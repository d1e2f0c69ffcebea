"""The coordinator's machine: who joins and leaves, what they bring, which view follows, when snapshots are due.

It ties together who is here (`membership`), which view follows another (`view_sequence`, `view_change`), who computes
what (`assigner`) and when snapshots are taken (`snapshot_duty`). Events come in (`cluster_events`) and effects go out
(`cluster_effects`); time comes in with Tick only. What must survive the coordinator is in `state()`; the shell writes
it down whenever `revision` has risen, before it does anything else that an event has brought (I7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.cluster import events
from rallypoint.core.cluster.assigner import Assigner
from rallypoint.core.cluster.effects import (
    Abort,
    Admit,
    Assist,
    Capture,
    Commit,
    Effect,
    FindSnapshot,
    Finish,
    Prepare,
    Publish,
    Refuse,
    Say,
)
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.snapshot_duty import SnapshotDuty
from rallypoint.core.cluster.state import ClusterState, Phase, awaited
from rallypoint.core.cluster.state_holders import StateHolders
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.cluster.view_change import says_nothing_new
from rallypoint.core.cluster.view_sequence import ViewSequence
from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.view import Assignment, Member, View, ViewNumber


@dataclass(slots=True)
class ClusterMachine:
    """One job. `recovered` is the state that an earlier coordinator left; `resume` a record and a snapshot to go on
    from."""

    terms: Terms
    recovered: ClusterState | None = None
    resume: tuple[JobRecord, str, int] | None = None
    phase: Phase = Phase.GATHERING
    record: JobRecord | None = None
    revision: int = 0
    last_word: Finish | Abort | None = None
    furthest: int = -1  # the furthest step that a report has come of
    _workers_max: int = 1
    _begun: bool = False  # the first weights are safe, or a step has been computed: they cannot be brought again
    _members: Membership = field(default_factory=Membership)
    _assigner: Assigner = field(default_factory=Assigner)
    _state_holders: StateHolders = field(default_factory=StateHolders)
    _now: float = 0.0
    _origin: str = ""
    _views: ViewSequence = field(init=False)
    _snapshots: SnapshotDuty = field(init=False)

    def __post_init__(self) -> None:
        self._workers_max = self.terms.workers_max
        epoch = 1 if self.recovered is None else self.recovered.epoch + 1
        self._views = ViewSequence(epoch, self.terms.replication)
        self._snapshots = SnapshotDuty(self.terms, epoch)
        if self.resume is not None:
            self.record, self._origin, self.furthest = self.resume[0], self.resume[1], self.resume[2] - 1
            self._begun = True
            self._snapshots.last = (self.resume[2], 0.0)
        if self.recovered is not None:
            self._recover(self.recovered)

    # ---- what must survive ----

    def state(self) -> ClusterState:
        """To be written down when `revision` has risen."""
        return ClusterState(
            self.record, self.view, tuple(sorted(self._views.caught_up)), self._members.incarnations, self._views.epoch,
            self._begun, self.furthest, self._workers_max, self.last_word, dict(self._state_holders.reached),
        )  # fmt: skip

    def _recover(self, state: ClusterState) -> None:
        self._members.incarnations = state.incarnations
        self.revision += 1
        if self.resume is not None:
            return  # whoever was there is gone; only the numbers go on
        # Without a record everybody had gone before anything was computed: the view is of nobody.
        self._views.view = state.view if state.record is not None else None
        self._views.caught_up = set(state.caught_up)
        self.record, self._begun, self.furthest = state.record, state.begun, state.furthest
        self._state_holders.reached = dict(state.state_holders)
        self._workers_max, self.last_word = state.workers_max, state.last_word
        if self.view is None or state.last_word is not None:
            self.phase = Phase.GATHERING if state.last_word is None else Phase.OVER
            return
        self.phase = Phase.RUNNING
        self._members.expect(self.view)
        if self._stateful_workers:
            self._views.replication = 1
            self._state_holders.moved = bool(self.view.assignments) or self._begun

    # ---- questions the shell asks ----

    @property
    def view(self) -> View | None:
        """The view in force; None before the first."""
        return self._views.view

    @property
    def exposed(self) -> int:
        """How many shards would be lost with one server."""
        return 0 if self._stateful_workers else self._views.exposed

    @property
    def _stateful_workers(self) -> bool:
        return self.record is not None and self.record.stateful_workers

    @property
    def handed_over(self) -> bool:
        """Has the past in force begun with what a worker had come to? Then none of the steps before are void."""
        return self._begun and self._stateful_workers and self.view is not None and not self.view.origin

    def waiting_for(self) -> str | None:
        """What the job waits for as a whole, as a phrase (I8); None when it is a step."""
        if self.phase is Phase.RECOVERING and self._state_holders.reached and self._members.servers:
            return f"workers to go on with the state that is here (at least {self.terms.workers_min} are wanted)"
        return awaited(self.phase, self._members, self.terms, self._workers_to_begin)

    def lateness(self) -> Mapping[str, tuple[float, float]]:
        """Every worker's seconds per replica: median and 99th percentile of the last ones."""
        return self._assigner.lateness()

    # ---- events ----

    def handle(self, event: events.Event) -> list[Effect]:
        """Take one event; the effects are to be run in order."""
        if self.phase is Phase.OVER:
            return [Refuse(event.member.id, "the job is over")] if isinstance(event, events.Joined) else []
        match event:
            case events.Heard(member=member):
                self._members.heard(member, self._now)
                return []
            case events.Progress():
                return self._progress(event)
            case events.Tick(now=now):
                return self._tick(now)
            case events.Joined():
                return self._joined(event)
            case events.Proposed(worker=worker, record=record):
                return self._proposal(worker, record)
            case events.CaughtUp():
                return self._now_caught_up(event.server, event.backups)
            case events.Leaving(worker=worker):
                self._members.leaving |= {worker} & self._members.workers.keys()
                return self._next_view()
            case events.Done(worker=worker, generation=generation):
                return self._worker_done(worker) if self._is_current(generation) else []
            case events.Resized(workers=workers):
                self._workers_max = max(1, workers)
                self.revision += 1
                return self._next_view()
            case events.Failed(member=member, reason=reason):
                return self._abort(f"{member}: {reason}") if member in self._members else []
            case events.Left(member=member, reason=reason):
                return self._left(member, reason)
            case _:
                return self._snapshot_event(event)

    # ---- members ----

    def _joined(self, event: events.Joined) -> list[Effect]:
        member, role = event.member, event.role
        self._members.heard(member.id, self._now)
        if self._members.is_back(member, role):
            return self._returned(member)
        effects: list[Effect] = []
        if self._members.is_taken(member.id, role):  # by an old process: it is gone, whether or not we have noticed
            effects += self._left(member.id, "another process came under its name")
        self._state_holders.reached.pop(member.id, None)  # whoever had that name
        effects.append(Admit(member.id, self._members.join(member, role)))
        if role == "server" and self.record is not None and self.phase is not Phase.GATHERING:
            effects.append(Prepare(member.id, self.record))
        if self.phase is Phase.GATHERING:
            return [*effects, *self._begin_when_gathered()]
        if self.phase is Phase.RECOVERING and not self._stateful_workers:
            return [*effects, *([FindSnapshot()] if role == "server" else [])]
        return [*effects, *(self._next_view() if role == "server" else [])]

    def _returned(self, member: Member) -> list[Effect]:
        """A member that outlived the coordinator before us."""
        self._members.awaited.discard(member.id)
        effects: list[Effect] = [Admit(member.id, member.incarnation)]
        if self.view is not None:
            effects.append(Publish(self.view, (member.id,)))
        return effects

    def _proposal(self, worker: str, record: JobRecord) -> list[Effect]:
        if worker not in self._members.workers:
            return []
        if self.record is None:
            self.record = record
            self.revision += 1
        elif (why := disagreement(self.record, record)) is not None:
            return self._disagrees(worker, why)
        if self.phase is Phase.GATHERING and (refused := record.refusal_of(self.terms.features)):
            return self._abort(refused)
        if worker in self._members.proposed:
            return []
        self._members.propose(worker)
        return self._begin_when_gathered() if self.phase is Phase.GATHERING else self._next_view()

    def _disagrees(self, worker: str, why: str) -> list[Effect]:
        host = self._members.workers[worker].host
        other = min(self._members.proposed, default="the job")
        sentence = f"{worker} on {host} brought {why} ({worker} is here, {other} is there)"
        if self.phase is Phase.GATHERING:
            return self._abort(sentence)
        self._members.remove(worker)  # a late one cannot end a job that runs well without it
        return [Refuse(worker, sentence), Say(f"refused: {sentence}")]

    def _begin_when_gathered(self) -> list[Effect]:
        members = self._members
        if len(members.servers) < self.terms.servers or len(members.proposed) < self._workers_to_begin:
            return []
        assert self.record is not None
        self.phase = Phase.RUNNING
        prepare = [Prepare(server, self.record) for server in members.servers]
        return [*prepare, *self._new_generation(self._origin)]

    @property
    def _workers_to_begin(self) -> int:
        """Once the job has begun some may have left for good: as many as it needs to go on are enough."""
        return self.terms.workers_min if self._views.begun else self.terms.workers_start

    def _left(self, member: str, reason: str) -> list[Effect]:
        if member not in self._members:
            return []
        was_worker, polite = member in self._members.workers, member in self._members.leaving
        self._members.remove(member)
        self._assigner.forget(member)
        had_state = self._state_holders.reached.pop(member, -1) >= 0
        if self.phase is Phase.GATHERING:
            if not self._members.proposed and self.resume is None:
                self.record = None
            return []
        said = Say(f"{member} {'has left' if polite else 'is gone'}: {reason}")
        if self.phase is Phase.RECOVERING:
            return [said]
        if was_worker and not self._begun and self.view is not None and member == self.view.uploader:
            return [said, *self._new_generation("")]  # it may have brought half of the first weights
        if was_worker and self._stateful_workers and self.view is not None:
            self.revision += had_state
            self._snapshots.abandon()  # it may have had a share in one
            if member == self.view.uploader and not self._state_holders.safe:
                return [said, *self._hand_over(ending=self.view.ending)]
        return [said, *self._next_view(), *self._finish_when_done()]

    def _is_current(self, generation: ViewNumber) -> bool:
        """Or was it said of a past that is void?"""
        return self.view is not None and self.view.generation == generation

    def _worker_done(self, worker: str) -> list[Effect]:
        if worker not in self._members.workers or self.phase is not Phase.RUNNING or self.record is None:
            return []
        self._members.done.add(worker)
        self._has_state(worker, self.record.rounds)
        self.furthest = max(self.furthest, self.record.rounds - 1)
        effects: list[Effect] = []
        if self.view is not None and not self.view.ending:
            effects += self._next_view(ending=True)
            effects += self._take_snapshot() if self._snapshots.taking is None else []
        return [*effects, *self._finish_when_done()]

    def _finish_when_done(self) -> list[Effect]:
        if self.phase is not Phase.RUNNING or not self._members.is_complete(self._now) or not self._snapshots.final:
            return []
        self.phase = Phase.OVER
        self.revision += 1
        assert self.record is not None
        assert self.view is not None
        lead, present = self.view.lead(self.record.rounds), self._members.present
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
            self._members.all_heard(now)
            self._snapshots.last = (self._snapshots.last[0], now)
        effects: list[Effect] = []
        for member, seconds in self._members.silent(now, self.terms.heartbeat):
            why = f"no sign of life for {seconds:.1f} s"
            effects.append(Refuse(member, f"given up: {why}"))
            self._members.give_up(member, now + self.terms.heartbeat)
            effects += self._left(member, why)
        if self.phase is Phase.RUNNING:
            if self._storing_first_weights and self._snapshots.taking is None and not self._members.awaited:
                effects += self._new_generation("")  # a coordinator before us had just begun
            effects += self._reassign_if_uneven()
            effects += self._assist_stragglers()
            effects += self._give_up_snapshot()
            effects += self._snapshot_if_due()
            effects += self._finish_when_done()
        return effects

    # ---- replicas ----

    def _progress(self, event: events.Progress) -> list[Effect]:
        self._members.heard(event.worker, self._now)
        if not self._is_current(event.generation):
            return []
        if not self._begun:
            self._begun = True
            self.revision += 1
        self._has_state(event.worker, event.step)
        self._assigner.computed(event, self._replicas, max(self._now, event.now))
        self.furthest = max(self.furthest, event.step)
        self._snapshots.computed(event.step, event.replica)
        return []

    def _has_state(self, worker: str, version: int) -> None:
        """A worker says that it has come to this version, or further."""
        if self._stateful_workers and worker in self._members.workers:
            self.revision += self._state_holders.has(worker, version)

    def _active(self) -> list[str]:
        """The workers that compute, the longest ready first; the others stand by."""
        return self._members.active(self.terms.workers_min, self._workers_max)

    def _assignments(self, before: View | None) -> tuple[Assignment, ...]:
        active = self._active()
        if not active or self.record is None or self._storing_first_weights:
            return ()
        assigned = before.assigned(self.furthest + 1) if before is not None else {}
        if before is not None and assigned.keys() == set(active):
            return before.assignments_from(self.furthest + 1)  # no worker has come or gone
        return self._assigner.assignments(assigned, active, self._replicas, self.furthest, sticky=self.record.sticky)

    @property
    def _replicas(self) -> int:
        assert self.record is not None
        return int(self.record.config["replicas"])

    @property
    def _storing_first_weights(self) -> bool:
        """Nothing is computed before version 0 is safe: nobody could bring those weights a second time."""
        return self.terms.snapshots and not self._begun

    def _reassign_if_uneven(self) -> list[Effect]:
        """By the workers' speeds, or back: see `Assigner.better`."""
        if self.view is None or self.record is None or self.record.sticky:
            return []  # (a replica that moves leaves behind what is worth more)
        if len(self.view.assignments) > 1 and self.view.assignments[-1].start > self.furthest:
            return []  # the last change has not come to count yet
        assigned = self.view.assigned(self.furthest + 1)
        better = self._assigner.better(assigned, self._active(), self._replicas, self.furthest, self._now)
        if better is None:
            return []
        why, assignments = better
        return [Say(why), *self._next_view(assignments=assignments)]

    def _assist_stragglers(self) -> list[Effect]:
        if not self.terms.backup_tasks or self.view is None or self.record is None or self.record.sticky:
            return []  # (what a replica leaves on its worker the helper does not have)
        if self.record.stateful_workers:
            return []  # who is overtaken could not follow any more
        found = self._assigner.straggler(self.view.assigned(self.furthest), self.furthest, self._active(), self._now)
        return [] if found is None else [Assist(*found)]

    # ---- views ----

    def _next_view(self, *, assignments: tuple[Assignment, ...] | None = None, ending: bool = False) -> list[Effect]:
        """The view that follows from who is here now, if it differs from the one in force; with `assignments`,
        these."""
        if self.phase is Phase.RECOVERING and self._stateful_workers:
            return self._hand_over()
        if self.phase is not Phase.RUNNING or self.view is None or self.record is None:
            return []
        before, ending = self.view, self.view.ending or ending
        assignments = self._assignments(before) if assignments is None else assignments
        if self.record.stateful_workers and self._state_holders.needs_new_generation(
            before, assignments, self._members.workers, self._members.servers, self._members.present, ending=ending
        ):
            return self._hand_over(ending=ending)
        view = self._views.following(self.record.layout.shards, self._members, assignments, ending=ending)
        if view is None:
            return self._roll_back()
        if says_nothing_new(view, before, self.furthest):
            return []
        if self._storing_first_weights and view.primary != before.primary:
            return self._new_generation("")
        if view.assigned(self.furthest + 1).keys() != before.assigned(self.furthest + 1).keys():
            self._assigner.others_compute()
        return self._publish(view, abandon=view.primary != before.primary)

    def _roll_back(self) -> list[Effect]:
        """Shards are lost: back to the last snapshot, or, if nothing has begun, to the beginning."""
        self._members.done.clear()
        self._snapshots.abandon()
        if self._begun:
            self.phase = Phase.RECOVERING
            return [Say("parameters are lost with their servers: going back to the last snapshot"), FindSnapshot()]
        return self._new_generation("")

    def _hand_over(self, *, ending: bool = False) -> list[Effect]:
        """Where workers are stateful: all begin again from what one of them brings, or from the last snapshot."""
        if not self._begun:
            return self._new_generation("")
        before, self.phase = self.phase, Phase.RECOVERING
        self._members.done.clear()
        self._snapshots.abandon()
        computing = [w for w in self._active() if self.view is not None and self.view.takes_part(w, self.furthest + 1)]
        uploader = self._state_holders.uploader(computing, self._active(), self._members.present)
        if not self._members.servers or (uploader and not self._active()):
            return []
        if not uploader:
            lost = Say("the model's state is lost with the workers that had it: going back to the last snapshot")
            return [*([lost] if before is Phase.RUNNING else []), FindSnapshot()]
        self.phase = Phase.RUNNING
        self.furthest = self._state_holders.reached[uploader] - 1
        return self._new_generation("", uploader=uploader, ending=ending)

    def _found(self, event: events.Found) -> list[Effect]:
        if self.phase is not Phase.RECOVERING or not self._members.servers:
            return []
        if event.snapshot == "" and self._stateful_workers:
            return self._abort(
                "no worker is left that has the model's state, and there is no snapshot to go back to: use more "
                "workers, or set snapshots to every so many seconds"
            )
        if event.snapshot == "":
            return self._abort(
                "parameters were lost with their servers and there is no snapshot to go back to: set replication to 2, "
                "or snapshots to every so many seconds"
            )
        self.phase = Phase.RUNNING
        self.furthest = event.version - 1
        self._snapshots.last = (event.version, self._now)
        said = Say(f"going on from snapshot {event.snapshot}: version {event.version}")
        return [said, *self._new_generation(event.snapshot)]

    def _new_generation(self, origin: str, *, uploader: str = "", ending: bool = False) -> list[Effect]:
        """A view from which everything before is void; `uploader` (else somebody) brings what all begin with."""
        assert self.record is not None
        self._state_holders.begin(safe=origin != "")
        if self.record.stateful_workers:
            self._views.replication = 1  # there is nothing on a server that could be lost
        self._assigner.restart()
        self._snapshots.restart()
        if not self._members.servers or (origin == "" and not self._active()):
            self.phase = Phase.GATHERING  # nobody to begin with
            return []
        first = uploader or min(self._active(), default="")
        writers = [first] if self.record.stateful_workers else list(self._members.servers)
        capture = self._capture(0, writers) if origin == "" and uploader == "" and self.terms.snapshots else []
        # The hands of a void past say nothing about who has computed what.
        view = self._views.first(
            self.record.layout.shards, self._members, self._assignments(None), uploader=first, origin=origin
        )
        return [*self._publish(msgspec.structs.replace(view, ending=ending), abandon=False), *capture]

    def _publish(self, view: View, *, abandon: bool) -> list[Effect]:
        self._views.adopt(view)
        self._state_holders.moved = self._state_holders.moved or bool(view.assignments)
        self.revision += 1
        if abandon:
            self._snapshots.abandon()
        return [Publish(view, (*(m.id for m in view.servers), *(m.id for m in view.workers)))]

    def _now_caught_up(self, server: str, backups: Mapping[int, ViewNumber]) -> list[Effect]:
        if self.view is None or self.phase is not Phase.RUNNING or not self._views.backups_caught_up(server, backups):
            return []
        self.revision += 1
        return self._next_view()

    # ---- snapshots ----

    def _snapshot_event(self, event: events.Event) -> list[Effect]:
        match event:
            case events.SnapshotWanted():
                self._snapshots.wanted = True
                return self._snapshot_if_due()
            case events.Captured(snapshot=snapshot, shards=shards) if taking := self._snapshots.under_way(snapshot):
                return [Commit(snapshot, taking.version)] if self._snapshots.stored(shards, self._now) else []
            case events.SnapshotLost(snapshot=snapshot) if self._snapshots.under_way(snapshot):
                return self._snapshot_lost(event)
            case events.Committed(snapshot=snapshot) if self._snapshots.under_way(snapshot):
                return self._committed(self._snapshots.complete(self._now))
            case events.Found():
                return self._found(event)
            case _:
                return []

    def _committed(self, version: int) -> list[Effect]:
        if not self._begun:
            return self._begin()
        if self._at_the_end(version):
            self._snapshots.final = True
            return self._finish_when_done()
        return self._take_snapshot() if self.view is not None and self.view.ending else []

    def _snapshot_lost(self, event: events.SnapshotLost) -> list[Effect]:
        version = self._snapshots.lost(event.passed)
        if event.passed >= 0:
            self.furthest = max(self.furthest, event.passed)
            return []
        if self._at_the_end(version):
            self._snapshots.final = True
        said = Say(f"snapshot {event.snapshot} could not be taken: {event.reason}")
        return [said, *(self._begin() if not self._begun else self._finish_when_done())]

    def _begin(self) -> list[Effect]:
        """The first weights are safe (or cannot be made so): let the workers compute."""
        self._begun = True
        self.revision += 1
        if self.view is not None and self._stateful_workers and self.view.uploader in self._members.workers:
            self._state_holders.uploaded(self.view.uploader)
        return self._next_view()

    def _at_the_end(self, version: int) -> bool:
        return self.record is not None and version >= self.record.rounds

    def _give_up_snapshot(self) -> list[Effect]:
        lost = self._snapshots.given_up(self._now)
        return [] if lost is None else self._snapshot_lost(lost)

    def _snapshot_if_due(self) -> list[Effect]:
        if not self._begun or self.phase is not Phase.RUNNING:
            return []
        assert self.record is not None
        ending = self.view is not None and self.view.ending
        due = self._snapshots.is_due(self.record, self.furthest, self._now, ending=ending)
        return self._take_snapshot() if due else []

    def _take_snapshot(self) -> list[Effect]:
        if self.record is None or self.view is None or self._snapshots.final:
            return []
        writers = [member.id for member in self.view.servers]
        if self.record.stateful_workers:
            writers = [worker for worker in self._active() if self.view.takes_part(worker, self.furthest + 1)]
        # Those who are still to come back from an earlier coordinator could not hear of it.
        self._snapshots.wanted = not writers or not self._members.awaited.isdisjoint(writers)
        if self._snapshots.wanted:
            return []
        version = self._snapshots.next_version(self.record, self.furthest, ending=self.view.ending)
        return self._capture(version, writers)

    def _capture(self, version: int, writers: Sequence[str]) -> list[Effect]:
        assert self.record is not None
        id = self._snapshots.begin(version, (shard.index for shard in self.record.layout.shards), self._now)
        return [Capture(id, version, tuple(writers))]
