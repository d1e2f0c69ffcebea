"""Codec states in the simulation: a name for each residual, in a worker's encoder, between two workers, in a snapshot.

The machines that decide are the real ones: `core/worker/handover.py`, and `core/shard/relay.py`. Here is what stands
around them: `worker/exchange/pushes.py` and `server/snapshots.py` are its counterparts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rallypoint.core.shard.relay import Relay, StateAnswer
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.handover import Encoding, Key, encoding_of
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.core.worker.slots import CodecEffect, Give, Recall, ReleaseState, ResetCodecs, Send
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Content

States = dict[int, "Residual"]  # of one shard, by replica


class Coded(NamedTuple):
    """A contribution as it leaves its encoder: made from the codec state after the step `after` (-1: from none)."""

    content: Content
    step: int
    replica: int
    after: int
    generation: ViewNumber | None  # the one that the state belongs to; None without a state


@dataclass(frozen=True, slots=True)
class Residual:
    """The codec state of a (shard, replica) after `coded` was encoded; `name` stands for what was not sent."""

    coded: Coded
    name: int
    generation: ViewNumber

    @property
    def step(self) -> int:
        """The step of the last contribution, in the shard's own count."""
        return self.coded.step


class SimulatedEncoder:
    """One worker's codec states. Nothing is encoded twice: a contribution that is sent again is the one that is kept.

    `send(server, message)` sends to a server, or nowhere if its link is lost.
    """

    def __init__(self, job: SimulatedJob, shell: WorkerShell, send: Callable[[str, Any], None]) -> None:
        self._job, self._shell, self._send = job, shell, send
        self._kept: dict[Key, Residual] = {}
        self._given: dict[Key, Residual | None] = {}  # what no server has yet

    def encode(self, send: Send, gradient: Content) -> Coded:
        """The contribution to be sent for the gradient in the slot."""
        key = (send.shard, send.replica)
        kept = self._kept.get(key)
        match encoding_of(None if kept is None else kept.step, send.step, drops=self._job.config.quorum is not None):
            case Encoding.AGAIN if kept is not None:
                return kept.coded
            case Encoding.OVER:
                return Coded(GARBAGE, send.step, send.replica, -1, None)
            case Encoding.ANEW:
                kept = None
        before = 0 if kept is None else kept.name
        after, generation = (-1, None) if kept is None else (kept.step, kept.generation)
        content, name = self._job.encoded(gradient, before)
        coded = Coded(content, send.step, send.replica, after, generation)
        self._kept[key] = Residual(coded, name, self._shell.view.generation)
        return coded

    def copy(self, send: Send) -> None:
        """Before this contribution is encoded: send the state after the step before, for a snapshot."""
        kept = self._kept.get((send.shard, send.replica))
        if kept is not None and kept.step == send.step - 1:
            self._send(send.server, ("copy", self._shell.number, send.shard, send.replica, kept))

    def run(self, effect: CodecEffect) -> None:
        """Do what the shell has decided."""
        match effect:
            case ResetCodecs():
                self._kept.clear()
                self._given.clear()
            case Recall(shard=shard, replica=replica, server=server):
                self._send(server, ("recall", self._shell.number, shard, replica))
            case ReleaseState(shard=shard, replica=replica):
                self._given[shard, replica] = self._kept.pop((shard, replica), None)
            case Give(shard=shard, replica=replica, server=server):
                given = self._given.get((shard, replica))
                self._send(server, ("give", self._shell.number, shard, replica, given))

    def arrived(self, shard: int, replica: int, state: Residual | None) -> None:
        """A shard's primary has answered a recall."""
        if self._shell.states.answered(shard, replica):
            self._kept.pop((shard, replica), None)
            if state is not None:
                self._kept[shard, replica] = state

    def taken(self, shard: int, replica: int) -> None:
        """A shard's primary has what it was given."""
        self._shell.states.taken(shard, replica)
        self._given.pop((shard, replica), None)


class ServerCodecStates:
    """Codec states between two workers, and copies of them for a snapshot.

    `tell(worker, message)` sends to a worker that is connected. `put(shard, record, states)` stores a shard's record,
    which was kept here until all copies had come.
    """

    def __init__(
        self, me: str, job: SimulatedJob, tell: Callable[[str, Any], None], put: Callable[[int, Any, States], None]
    ) -> None:
        self._relay: Relay[Residual] = Relay(me)
        self._job, self._tell, self._put = job, tell, put
        self._generation: ViewNumber | None = None
        self._copies: dict[Key, Residual] = {}
        self._records: dict[int, tuple[int, Any]] = {}  # version and record of each shard that waits for copies

    def adopt(self, view: View, before: View | None) -> None:
        """A new view."""
        goes_on = self._generation == view.generation
        if not goes_on:
            self._copies.clear()
        if before is not None and (self._generation != view.generation or before.primary != view.primary):
            self.abandon()
        self._generation = view.generation
        held = self._relay.between
        answers = self._relay.adopt(view)
        answered = {answer[1:3] for answer in answers}
        self._job.lost.extend(sorted(held - self._relay.between - answered if goes_on else ()))
        self._answer(answers)

    def crashed(self) -> None:
        """The server is about to die, with what it has."""
        self._job.lost.extend(sorted(self._relay.between))

    def contributed(self, shard: int, coded: Coded, worker: str, upcoming: int) -> None:
        """A contribution has come (whatever becomes of it); `upcoming`: the next step that the shard takes."""
        self._relay.contributed(shard, coded.replica, coded.step, worker, upcoming)

    def given(self, shard: int, replica: int, state: Residual | None, worker: str, upcoming: int) -> None:
        """A worker hands a state over, or says that it has nothing new."""
        self._tell(worker, ("taken", shard, replica))
        self._answer(
            self._relay.given(shard, replica, worker, upcoming, None if state is None else (state.step, state))
        )

    def recalled(self, shard: int, replica: int, worker: str, upcoming: int) -> None:
        """A worker asks for one."""
        self._answer(self._relay.recalled(shard, replica, worker, upcoming))

    # ---- snapshots ----

    def copied(self, shard: int, replica: int, state: Residual) -> None:
        """A copy has come for a snapshot of the version after its step."""
        self._copies[shard, replica] = state
        self.complete(shard, at_last=False)

    def awaited(self, shard: int, version: int, record: Any) -> bool:
        """The shard's state is copied for a snapshot; is it kept here until all copies have come?"""
        goes_on = 0 < version < self._job.last_version(shard) and not self._job.policy.streaming
        if goes_on and shard in self._job.codec_state_shards:
            self._records[shard] = (version, record)
            self.complete(shard, at_last=False)
            return True
        return False

    def complete(self, shard: int, *, at_last: bool) -> None:
        """Store the record that is kept of this shard once all copies are here; `at_last`: with those that are."""
        if shard not in self._records:
            return
        version, record = self._records[shard]
        copies = {r: self._copies.get((shard, r)) for r in range(self._job.replicas)}
        there = {r: copy for r, copy in copies.items() if copy is not None and copy.step == version - 1}
        if len(there) < self._job.replicas and not at_last:
            return
        del self._records[shard]
        for replica in there:
            del self._copies[shard, replica]
        self._put(shard, record, there)

    def abandon(self) -> None:
        """The snapshot is not wanted any more."""
        self._records.clear()

    def restored(self, shard: int, states: States, generation: ViewNumber) -> None:
        """A shard came from a snapshot, and its codec states with it: whoever is assigned the replicas will ask."""
        for replica, state in states.items():
            self._relay.restored(shard, replica, state.step, replace(state, generation=generation))

    def _answer(self, answers: list[StateAnswer[Residual]]) -> None:
        for worker, shard, replica, _, state in answers:
            self._tell(worker, ("codec state", shard, replica, state))
