"""The coordinator's shell, without a socket, a thread or a clock: events in, acts out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from rallypoint.config import record_of, resolve
from rallypoint.coordinator import acts, inbox
from rallypoint.coordinator.shell import CoordinatorShell
from rallypoint.core.cluster.effects import Abort
from rallypoint.core.cluster.state import ClusterState, Phase
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.view import View, ViewNumber
from rallypoint.net.messages import (
    Aborted,
    Admitted,
    Beat,
    Capture,
    Done,
    Finished,
    Hello,
    Message,
    Metrics,
    NewView,
    NotStored,
    Planned,
    Propose,
    Report,
    Resize,
    Say,
    Stored,
    Waiting,
)

STEPS = 40
SHARDS = (0, 1)


def record(**settings: Any) -> JobRecord:
    config = resolve({"replicas": 2, "batch": 4, "steps": STEPS, "shard_bytes": 64, **settings})
    proposed = record_of(config, build_layout([TensorSpec("w", (32, 1), "float32", 0)], 64))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(proposed), type=JobRecord)  # as it comes from a worker


class Play:
    """A shell, and what it has done."""

    def __init__(
        self, recovered: ClusterState | None = None, settings: dict[str, Any] | None = None, **terms: Any
    ) -> None:
        self.record = record(**(settings or {}))
        self.now = 100.0
        self.done: list[acts.Act] = []
        self.incarnations: dict[str, int] = {}
        self.shell = CoordinatorShell(
            Terms(**{"workers_start": 1, "workers_max": 2, "heartbeat": 1000.0, **terms}), self.now,
            recovered=recovered,
        )  # fmt: skip
        self._do(self.shell.start())

    def _do(self, todo: Iterable[acts.Act]) -> list[acts.Act]:
        todo = list(todo)
        for act in todo:
            if isinstance(act, acts.Send) and isinstance(act.message, Admitted):
                self.incarnations[str(act.connection)] = act.message.incarnation
        self.done += todo
        return todo

    def take(self, event: inbox.Event, seconds: float = 0.0) -> list[acts.Act]:
        self.now += seconds
        return self._do(self.shell.handle(event, self.now))

    def hello(self, name: str) -> Hello:
        role = {"s": "server", "w": "worker", "o": "observer"}[name[0]]
        return Hello(role, name, "here", b"", f"{name}:1", self.incarnations.get(name, 0))

    def join(self, *names: str) -> None:
        for name in names:
            self.take(inbox.Opened(name, self.hello(name)))

    def say(self, name: str, message: Message) -> list[acts.Act]:
        return self.take(inbox.Received(name, self.hello(name), message))

    def begin(self, *workers: str) -> None:
        self.join("s0", *(workers or ("w0",)))
        for worker in workers or ("w0",):
            self.say(worker, Propose(self.record))

    def store(self, writer: str = "s0") -> list[acts.Act]:
        """The snapshot that was asked for last is stored by `writer` and committed."""
        asked = [act.message for act in self.done if isinstance(act, acts.Send) and isinstance(act.message, Capture)]
        parts = self.say(writer, Stored(asked[-1].snapshot, {}, dict.fromkeys(SHARDS, ("", 0, 0, ""))))
        (commit,) = (act for act in parts if isinstance(act, acts.CommitSnapshot))
        return [commit, *self.take(inbox.SnapshotCommitted(commit.snapshot, commit.version, 1, 0.1))]

    def report(self, step: int, replica: int, worker: str = "w0") -> list[acts.Act]:
        return self.say(worker, Report(step, replica, 1.0, 1.0, 4, generation=self.view.generation))

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            for replica in range(2):
                self.report(step, replica)

    def lose_the_server(self) -> None:
        """Its shards are lost: the job goes back to the last snapshot on another one."""
        self.take(inbox.Closed("s0", self.hello("s0"), "it died"))
        self.join("s1")

    @property
    def view(self) -> View:
        assert self.shell.machine.view is not None
        return self.shell.machine.view

    def sent(self, kind: type[Message]) -> list[Any]:
        return [act.message for act in self.done if isinstance(act, acts.Send) and isinstance(act.message, kind)]

    def logged(self, kind: type[Any]) -> list[Any]:
        return [act.message for act in self.done if isinstance(act, acts.Log) and isinstance(act.message, kind)]


# ---- claims carry the generation in which they became true (I10) -----------------------------------------------


def _rolled_back() -> tuple[Play, ViewNumber]:
    play = Play(snapshots=True, snapshot_steps=10)
    play.begin()
    play.store()
    play.steps(0, 10)
    play.store()
    play.steps(10, 15)
    before = play.view.generation
    play.lose_the_server()
    play.take(inbox.SnapshotFound("step-00000010-10002", 10))
    assert play.view.generation > before
    return play, before


def test_a_worker_that_was_done_before_a_roll_back_does_not_end_the_job() -> None:
    """It evaluated the last version for a minute; meanwhile the servers with that version died."""
    play, before = _rolled_back()
    play.say("w0", Done(before))
    assert play.shell.last_word is None
    assert play.shell.machine.course.furthest == 9
    assert not play.view.ending
    play.steps(10, STEPS)
    play.say("w0", Done(play.view.generation))
    assert play.view.ending


def test_figures_of_a_version_that_was_rolled_back_judge_nothing() -> None:
    play, before = _rolled_back()
    assert play.say("w0", Metrics(30, {"loss": 0.1}, before)) == []
    assert play.shell.evaluations.of(30) == {}


def test_figures_found_before_a_roll_back_are_forgotten_of_the_steps_that_are_computed_again() -> None:
    play = Play(snapshots=True, snapshot_steps=10)
    play.begin()
    play.store()
    play.steps(0, 15)
    for step in (5, 10, 15):
        play.say("w0", Metrics(step, {"loss": 1.0}, play.view.generation))
    play.lose_the_server()
    play.take(inbox.SnapshotFound("step-00000010-10002", 10))
    assert [play.shell.evaluations.of(step) for step in (5, 10, 15)] == [{"loss": 1.0}, {"loss": 1.0}, {}]


# ---- figures belong to their version ---------------------------------------------------------------------------


def test_a_snapshot_gets_the_figures_of_its_own_version_from_all_evaluations_of_it() -> None:
    play = Play(snapshots=True, snapshot_steps=10)
    play.begin()
    play.store()
    play.steps(0, 10)
    play.take(inbox.Ticked())
    taken = play.sent(Capture)[-1].version
    play.say("w0", Metrics(taken, {"loss": 1.0}, play.view.generation))
    play.say("w0", Metrics(taken, {"accuracy": 0.5}, play.view.generation))
    play.say("w0", Metrics(taken + 1, {"loss": 9.0}, play.view.generation))
    commit = play.store()[0]
    assert isinstance(commit, acts.CommitSnapshot)
    assert commit.metrics == {"loss": 1.0, "accuracy": 0.5}


def test_figures_that_come_after_their_snapshot_are_sent_after_it() -> None:
    play = Play()
    play.begin()
    play.say("w0", Metrics(3, {"loss": 1.0}, play.view.generation))
    said = play.say("w0", Metrics(3, {"accuracy": 0.5}, play.view.generation))
    assert acts.Judge(3, {"loss": 1.0, "accuracy": 0.5}) in said


def test_figures_are_remembered_of_so_many_versions_only() -> None:
    play = Play()
    play.begin()
    for step in range(1000):
        play.say("w0", Metrics(step, {"loss": 1.0}, play.view.generation))
    assert play.shell.evaluations.of(999) == {"loss": 1.0}
    assert sum(bool(play.shell.evaluations.of(step)) for step in range(1000)) <= 100


def test_a_snapshot_every_so_many_steps_is_of_a_multiple_of_them() -> None:
    """So that `run.every(10)` evaluates the versions that are stored."""
    play = Play(snapshots=True, snapshot_steps=10)
    play.begin()
    play.store()
    versions = []
    for step in range(35):
        asked = len(play.sent(Capture))
        play.steps(step, step + 1)
        if len(play.sent(Capture)) > asked:
            versions.append(play.sent(Capture)[-1].version)
            play.store()
    assert versions == [10, 20, 30]


# ---- what is waited for (I8) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [{"type": "bounded-staleness", "staleness": 2}, {"type": "async"}])
def test_a_stall_names_the_slowest_worker_and_nobody_who_waits_for_it(sync: dict[str, Any]) -> None:
    play = Play(settings={"sync": sync}, workers_start=2)
    play.join("o0")
    play.begin("w0", "w1")
    slow, quick = play.view.replicas_of("w0", 0)[0], play.view.replicas_of("w1", 0)[0]
    play.report(0, slow, "w0")
    for step in range(4):
        play.report(step, quick, "w1")
    play.take(inbox.Ticked(), seconds=10.0)
    (waiting,) = play.sent(Waiting)
    assert f"step 1: replica {slow} on w0 on here has not reported" in waiting.text
    assert "w1" not in waiting.text


# ---- counts after a recovery -----------------------------------------------------------------------------------


def test_the_plan_says_how_many_items_a_step_uses_and_how_many_steps_are_behind_the_job() -> None:
    play = Play()
    play.begin()
    (plan,) = play.logged(Planned)
    assert (plan.items, plan.done) == (2 * 4, 0)


# ---- a full disk -----------------------------------------------------------------------------------------------


def test_with_no_room_for_version_0_it_says_so_computes_and_tries_again() -> None:
    play = Play(snapshots=True)
    play.begin()
    assert not play.view.assignments, "nothing is computed before it is known whether version 0 is stored"
    snapshot = play.sent(Capture)[-1].snapshot
    play.say("s0", NotStored(snapshot, "no space left"))
    said = " ".join(say.text for say in play.logged(Say))
    assert "version 0 is not stored, so the job computes without a snapshot" in said
    assert play.view.assignments
    play.steps(0, 1)
    play.take(inbox.Ticked())
    assert play.sent(Capture)[-1].snapshot != snapshot, "another is taken as soon as it can be"


def test_once_a_worker_holds_the_last_version_the_journal_is_not_needed_any_more() -> None:
    play = Play()
    play.begin()
    play.steps(0, STEPS)
    assert all(act.needed for act in play.done if isinstance(act, acts.Save))
    play.done.clear()
    play.say("w0", Done(play.view.generation))
    assert [act.needed for act in play.done if isinstance(act, acts.Save)] == [False]
    assert play.sent(Finished)


def test_a_job_that_is_ended_from_outside_says_so_once() -> None:
    play = Play()
    play.begin()
    play.take(inbox.Ended("somebody pulled the plug"))
    play.take(inbox.Ended("again"))
    assert play.sent(Aborted) == [Aborted("somebody pulled the plug")] * 2, "the server and the worker"
    assert [act for act in play.done if isinstance(act, acts.Over)] == [acts.Over("somebody pulled the plug")]


# ---- a coordinator after another -------------------------------------------------------------------------------


def test_what_is_saved_comes_before_what_is_said_about_it() -> None:
    play = Play()
    play.begin()
    published = next(i for i, act in enumerate(play.done) if isinstance(act, acts.Send) and isinstance(act.message,
        NewView))  # fmt: skip
    saved = [act.state for act in play.done[:published] if isinstance(act, acts.Save)]
    assert saved[-1].view == play.view


def test_each_of_many_coordinators_that_die_at_once_goes_on_where_the_one_before_did() -> None:
    play = Play()
    play.begin()
    view, state = play.view, play.shell.machine.state()
    for _ in range(5):
        after = Play(state)
        (save,) = (act for act in after.done if isinstance(act, acts.Save))
        assert save.state.epoch == state.epoch + 1
        assert save.state.view == view
        state = save.state
    last = Play(state)
    last.incarnations = dict(play.incarnations)
    last.join("s0", "w0")
    assert last.sent(NewView) == [NewView(view)] * 2


# ---- what is announced is known to the next coordinator (I7) ---------------------------------------------------


def test_a_new_size_is_written_down_before_the_launcher_hears_of_it() -> None:
    play = Play()
    play.begin()
    play.join("o0")
    done = play.say("o0", Resize(5))
    written = [n for n, act in enumerate(done) if isinstance(act, acts.Save) and act.state.workers_max == 5]
    told = [n for n, act in enumerate(done) if isinstance(act, acts.Send) and act.message == Resize(5)]
    assert written < told
    assert len(written) == len(told) == 1


_MODES: dict[str, dict[str, Any]] = {"servers-hold-the-state": {}, "workers-hold-it": {"sync": {"type": "all-reduce"}}}


@pytest.mark.parametrize("settings", _MODES.values(), ids=_MODES.keys())
@pytest.mark.parametrize("phase", Phase)
def test_a_coordinator_killed_in_any_phase_is_followed_by_one_that_ends_the_job(
    phase: Phase, settings: dict[str, Any]
) -> None:
    """Whoever holds the state. The job has one server and one worker; the server may be replaced by s1."""
    terms: dict[str, Any] = {"snapshots": True, "snapshot_steps": 10}
    old, server, step = Play(settings=settings, **terms), "s0", 0
    writer = (lambda: "w0") if settings else (lambda: server)
    if phase is Phase.GATHERING:
        old.join("w0")
        old.say("w0", Propose(old.record))
    else:
        old.begin()
        old.store(writer())
        old.steps(0, 10)
        old.store(writer())
        old.say("w0", Beat())
        step = 10
    if phase is Phase.RECOVERING:
        old.take(inbox.Closed("s0", old.hello("s0"), "it died"))
    if phase is Phase.OVER:
        old.take(inbox.Ended("somebody pulled the plug"))
        old.shell.machine.course.end(Abort("somebody pulled the plug"))
    assert old.shell.machine.phase is phase
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(old.shell.machine.state()), type=ClusterState)
    new = Play(state, settings=settings, **terms)
    new.incarnations = dict(old.incarnations)
    if phase is Phase.OVER:
        new.join("s0", "w0")
        assert new.sent(Aborted) == [Aborted("somebody pulled the plug")] * 2
        return
    if phase is Phase.GATHERING:
        new.incarnations.clear()
        new.begin()
        new.store(writer())
    else:
        new.join("w0", *(["s0"] if phase is Phase.RUNNING else []))
    if phase is Phase.RECOVERING:
        server = "s1"
        for _ in range(6):  # s0 is given up: nothing has been heard of it
            new.take(inbox.Ticked(), seconds=250.0)
            new.say("w0", Beat())
        new.join("s1")
        if not settings:
            assert acts.FindSnapshot() in new.done
            new.take(inbox.SnapshotFound("step-00000010-10002", 10))
    new.shell.machine.validate()
    new.steps(step, STEPS)
    new.say("w0", Done(new.view.generation))
    while not new.sent(Finished):
        new.store(writer())  # those by steps, then the last version
    new.shell.machine.validate()
