"""The job as the coordinator sees it: its members, the view in force, how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.cluster.effects import Abort, Effect, Finish
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.recovery import Recovery
from rallypoint.core.cluster.state import ClusterState, Phase
from rallypoint.core.cluster.strategies import Strategies, strategies_for
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.cluster.view_sequence import ViewSequence
from rallypoint.core.job import JobRecord
from rallypoint.core.view import View, ViewNumber


@dataclass(slots=True)
class Course:
    """The job as the coordinator sees it now.

    Attributes:
        phase: where the job is.
        record: what the workers have proposed; None before the first has.
        begun: the first weights are stored, or a step has been computed: nobody could upload them a second time.
        furthest: the highest step that a report of the current generation named; -1 before the first.
        workers_max: so many workers compute at most.
        revision: rises whenever `state()` has changed in something that the next coordinator must know.
        last_word: how the job ended.
        now: seconds, as the last Tick said.
        strategies: what follows from the record: see `strategies_for`.
    """

    terms: Terms
    views: ViewSequence
    phase: Phase = Phase.GATHERING
    begun: bool = False
    furthest: int = -1
    workers_max: int = 1
    revision: int = 0
    last_word: Finish | Abort | None = None
    now: float = 0.0
    members: Membership = field(default_factory=Membership)
    record: JobRecord | None = None
    strategies: Strategies = field(default_factory=Strategies)

    def describe(self, record: JobRecord | None) -> None:
        """Take up (or forget) the job's record, and choose the strategies that follow from it."""
        self.record, self.strategies = record, Strategies() if record is None else strategies_for(record, self.terms)
        self.views.replication = self.recovery.replication(self.terms.replication)

    def changed(self) -> None:
        """Something has changed that the next coordinator must know."""
        self.revision += 1

    def end(self, word: Finish | Abort) -> list[Effect]:
        """The job is over, and this is its last word."""
        self.phase, self.last_word = Phase.OVER, word
        self.changed()
        return [word]

    def has_state(self, worker: str, version: int) -> None:
        """A worker says that it has come to this version, or further."""
        if worker in self.members.workers:
            self.revision += self.recovery.has(worker, version)

    def may_report(self, worker: str, step: int) -> bool:
        """Has this worker brought the job's model, and has the job such a step? Who has not can have computed none."""
        return worker in self.members.present and self.record is not None and 0 <= step < self.record.rounds

    def state(self) -> ClusterState:
        """What the next coordinator has to know."""
        return ClusterState(
            self.record, self.view, tuple(sorted(self.views.caught_up)), self.members.incarnations, self.views.epoch,
            self.begun, self.furthest, self.workers_max, self.last_word, dict(self.recovery.reached),
        )  # fmt: skip

    @property
    def recovery(self) -> Recovery:
        """Who holds the model's state, and how it is found again."""
        return self.strategies.recovery

    @property
    def view(self) -> View | None:
        """The view in force; None before the first."""
        return self.views.view

    @property
    def replicas(self) -> int:
        """R. The record must be known."""
        assert self.record is not None
        return int(self.record.config["replicas"])

    @property
    def storing_first_weights(self) -> bool:
        """Nothing is computed before version 0 is stored: nobody could upload those weights a second time."""
        return self.terms.snapshots and not self.begun

    @property
    def workers_to_begin(self) -> int:
        """Once the job has begun some may have left for good: as many as it needs to go on are enough."""
        return self.terms.workers_min if self.views.begun else self.terms.workers_start

    def active(self) -> list[str]:
        """The workers that compute, the longest ready first; the others stand by."""
        return self.members.active(self.terms.workers_min, self.workers_max)

    def computing(self) -> list[str]:
        """The active workers that have replicas at the next step or later."""
        view = self.view
        return [worker for worker in self.active() if view is not None and view.takes_part(worker, self.furthest + 1)]

    def is_current(self, generation: ViewNumber) -> bool:
        """Does a claim made in this generation count? One of an older generation is stale (I10)."""
        return self.view is not None and self.view.generation == generation
