"""What stands between a worker's machine and its sockets, without a socket: the TCP exchange and the simulation run it.

It knows which links there should be and which stand, ignores what is stale, and turns what happens into effects. Its
user makes the links, moves the bytes, and calls it from one thread at a time (or under one lock). Events of the data
plane, one or more per shard, go to `shell.machine.handle` directly.

A view is taken in three steps, because links have to end before the machine hears why:

    ended = shell.links_to_end(view)        # None: this view is not newer than the one in force
    ...end those links, so that none of their threads touches a slot any more...
    effects = shell.adopt(view, ended)      # run them
    ...make a link to each of shell.links.to_open(view)...
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.custody import NoCodecStates
from rallypoint.core.worker.handover import Paths
from rallypoint.core.worker.links import LinkTable
from rallypoint.core.worker.slots import (
    Action,
    Compute,
    Effect,
    Initialise,
    Installed,
    LinkLost,
    LinkUp,
    ReplicaAbandoned,
    ReplicaComputed,
    Store,
    Viewed,
)
from rallypoint.core.worker.snapshots import Snapshots
from rallypoint.core.worker.streaming import StreamMachine

Machine = WorkerMachine | StreamMachine


class WorkerShell:
    """One worker in one job: its machine, its codec states, the links that there should be.

    Attributes:
        machine: decides about slots and versions.
        links: which links there are, and which of them stand.
        states: decides where codec states go.
        snapshots: this worker's part of the snapshot that was asked for.
        holds: where workers step the optimizer, the version of the model, also in a generation in which it is stale.
        done_in: the generation in which the last version was installed; None before that and after a roll-back.
    """

    def __init__(self, machine: Machine, states: NoCodecStates, snapshots: Snapshots) -> None:
        self.machine, self.states, self.snapshots = machine, states, snapshots
        self.links = LinkTable()
        self.holds = -1
        self.done_in: ViewNumber | None = None
        self.finished = self.leaving = False
        self._about: int | None = None  # the replica that is being computed, or will be at once

    # ---- views and links ----

    @property
    def view(self) -> View:
        """The view in force; only after the first has come."""
        assert self.machine.view is not None
        return self.machine.view

    @property
    def number(self) -> ViewNumber:
        """The number of the view in force."""
        return self.machine.view.number if self.machine.view is not None else ViewNumber()

    def links_to_end(self, view: View) -> list[str] | None:
        """The servers whose links end before `adopt`; None if the view is not newer than the one in force."""
        before = self.machine.view
        if before is not None and view.number <= before.number:
            return None
        return self.links.to_end(before, view)

    def adopt(self, view: View, ended: Iterable[str]) -> list[Effect]:
        """The view is in force; the links of `ended` have ended."""
        before = self.machine.view
        effects: list[Effect] = []
        for server in ended:
            self.links.end(server)
            effects += self.link_lost(server)
        effects += self.machine.handle(Viewed(view))
        if before is not None and before.generation != view.generation:
            self.done_in = None
            self.states.rolled_back()
            self.snapshots.rolled_back()
        # A worker that was given up, and is back, gives all of its codec states away: others may have newer ones.
        back = before is not None and _incarnation(before, self.machine.me) not in (
            -1, _incarnation(view, self.machine.me)
        )  # fmt: skip
        return [*effects, *self._keep_only(frozenset() if back else self.machine.keeps)]

    def link_up(self, server: str) -> list[Effect]:
        """The link to a server stands (again)."""
        if not self.links.up(server):
            return []  # it has ended meanwhile
        return [*self.machine.handle(LinkUp(server)), *self._keep_only(self.machine.keeps)]

    def link_lost(self, server: str) -> list[Effect]:
        """The link to a server has ended; it may be made again."""
        self.links.lost(server)
        return self.machine.handle(LinkLost(server))

    @property
    def paths(self) -> Paths:
        """Where frames can go now."""
        return Paths(self.view.primary, self.links.connections)

    # ---- what the main thread does ----

    def next_action(self) -> Action | Store | None:
        """What to do now; None when the main thread has to wait. Changes nothing."""
        if (share := self.snapshots.due(self.holds)) is not None:
            return share
        action = self.machine.next_action()
        return None if isinstance(action, Compute) and self._waits_for_states(action.replica) else action

    def _waits_for_states(self, replica: int) -> bool:
        # If the replica was reassigned while its step was in progress, its new worker has what there is by now.
        return replica in self.machine.assigned and not self.states.ready(replica)

    def choose(self) -> Action | Store | None:
        """The same, and the main thread is about to do it."""
        action = self.next_action()
        if isinstance(action, Store):
            self.snapshots.begun()
        self._about = action.replica if isinstance(action, Compute) else None
        return action

    @property
    def may_prepare(self) -> bool:
        """Would `prepare` do anything now? Changes nothing."""
        known = self.states.kept and self.machine.view is not None
        return known and self.states.may_prepare(self._awaited(), self.paths)

    def prepare(self) -> list[Effect]:
        """The main thread computes nothing and is about to wait: ask for the codec states of the replica that is next.

        A replica that it was about to compute may have been assigned to another worker meanwhile, which waits for the
        codec states: they are given now.
        """
        if not self.states.kept or self.machine.view is None:
            return []
        self._about = None
        return [*self._keep_only(self.machine.keeps), *self.states.prepare(self._awaited(), self.paths)]

    def _awaited(self) -> int | None:
        action = self.machine.next_action()
        return action.replica if isinstance(action, Compute) and action.replica in self.machine.assigned else None

    @property
    def over(self) -> bool:
        """Is there nothing to do for this worker any more: the job has finished, or it has left?"""
        return self.finished or self.gone

    @property
    def gone(self) -> bool:
        """Has this worker handed back everything, as it was told?"""
        gone = self.machine.view is not None and not self.machine.takes_part
        return self.leaving and gone and self.states.settled and not self.machine.must_upload

    def begin_upload(self) -> ViewNumber | None:
        """Begin to push what all start from: the generation for which. None if it is not this worker's to do now."""
        return self.view.generation if self.machine.take(Initialise()) else None

    def begin_replica(self, step: int, replica: int) -> ViewNumber | None:
        """Begin to compute a replica: the generation that it belongs to. None if it is not to be computed (now)."""
        if not self.machine.take(Compute(step, replica)):
            return None
        self.states.begin(replica)
        return self.view.generation

    def end_replica(self, *, whole: bool) -> list[Effect]:
        """The replica in progress has been computed, or given up halfway: nobody writes slots any more."""
        self._about = None
        effects = self.machine.handle(ReplicaComputed() if whole else ReplicaAbandoned())
        return [*effects, *self._keep_only(self.machine.keeps - self.states.end())]

    def installed(self) -> list[Effect]:
        """The model holds the version; the slots are free."""
        effects = self.machine.handle(Installed())
        if self.machine.step == self.machine.steps:
            self.done_in = self.view.generation
        return [*effects, *self._keep_only(self.machine.keeps)]

    def _keep_only(self, replicas: frozenset[int]) -> list[Effect]:
        if not self.states.kept or self.machine.view is None:
            return []
        return self.states.keep_only(replicas | ({self._about} if self._about is not None else set()), self.paths)

    def validate(self) -> None:
        """AssertionError, with a sentence, if an invariant of the shell does not hold. (Its machine has its own.)"""
        self.links.validate(self.machine.view)
        assert self.done_in is None or self.done_in == self.view.generation, "it is done in an older generation"


def _incarnation(view: View, worker: str) -> int:
    return next((member.incarnation for member in view.workers if member.id == worker), -1)
