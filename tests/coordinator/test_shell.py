"""The coordinator's shell, without a socket, a thread or a clock: events in, acts out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Self

import msgspec
import pytest

from rallypoint.config import record_of, resolve
from rallypoint.coordinator import acts, inbox
from rallypoint.coordinator.joining import Tickets
from rallypoint.coordinator.shell import CoordinatorShell
from rallypoint.core import protocol
from rallypoint.core.cluster.effects import FindSnapshot
from rallypoint.core.cluster.state import ClusterState, Origin, Phase, Resumed
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.decisions import ReduceOnPlateau
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.modes import Feature
from rallypoint.core.policy import AllReduce
from rallypoint.core.protocol import Aborted, Admitted, Capture, Done, Evaluated, Held, NewView, Propose, Resize, Say
from rallypoint.core.typed import MOST_PUSHES
from rallypoint.core.view import View, ViewNumber
from rallypoint.net.member import ViewReceiver

STEPS = 40
SHARDS = (0, 1)


def record(**settings: Any) -> JobRecord:
    config = resolve({"replicas": 2, "batch": 4, "steps": STEPS, "network.shard_bytes": 64, **settings})
    proposed = record_of(config, build_layout([TensorSpec("w", (32, 1), "float32", 0)], 64))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(proposed), type=JobRecord)  # as it comes from a worker


class Play:
    """A shell, and what it has done."""

    def __init__(
        self, recovered: ClusterState | None = None, settings: dict[str, Any] | None = None,
        resume: Resumed | None = None, **terms: Any,
    ) -> None:  # fmt: skip
        self.record = record(**(settings or {}))
        self.now = 100.0
        self.done: list[acts.Act] = []
        self.incarnations: dict[str, int] = {}
        self.known: dict[str, View] = {}  # the newest view that each member was sent
        self.views: list[View] = []  # all that were sent
        self.receivers, self.changes = defaultdict[str, ViewReceiver](ViewReceiver), 0  # by member; sent as differences
        self.shell = CoordinatorShell(
            Terms(**{"workers_start": 1, "workers_max": 2, "heartbeat": 1000.0, **terms}), self.now,
            recovered=recovered, resume=resume,
        )  # fmt: skip
        self._do(self.shell.start())

    def _do(self, todo: Iterable[acts.Act]) -> list[acts.Act]:
        todo = [self._whole(act) for act in todo]
        for act in todo:
            if isinstance(act, acts.SendMessage) and isinstance(act.message, Admitted):
                self.incarnations[str(act.connection)] = act.message.incarnation
            if isinstance(act, acts.SendMessage) and isinstance(act.message, NewView):
                self.known[str(act.connection)] = act.message.view
                self.views.append(act.message.view)
        self.done += todo
        return todo

    def _whole(self, act: acts.Act) -> acts.Act:
        """A view as a member takes it: whole, also where it travels as a difference."""
        if not isinstance(act, acts.SendMessage) or not isinstance(act.message, NewView | protocol.ViewChange):
            return act
        self.changes += isinstance(act.message, protocol.ViewChange)
        return acts.SendMessage(act.connection, self.receivers[str(act.connection)].take(act.message))

    def take(self, event: inbox.Event, seconds: float = 0.0) -> list[acts.Act]:
        self.now += seconds
        done = self._do(self.shell.handle(event, self.now))
        self.shell.machine.validate()
        return done

    def hello(self, name: str) -> protocol.Hello:
        role = {"s": "server", "w": "worker", "o": "observer"}[name[0]]
        return protocol.Hello(role, name, "here", f"{name}:1", self.incarnations.get(name, 0))

    def join(self, *names: str) -> None:
        for name in names:
            hello, known = self.hello(name), self.known.get(name)
            self.receivers.pop(name, None)  # a new connection
            self.take(inbox.Opened(name, hello))
            if hello.incarnation:
                self.say(name, protocol.Knows(known, b"" if known is None else Tickets(b"").proof(known)))

    def say(self, name: str, message: protocol.Message) -> list[acts.Act]:
        return self.take(inbox.Received(name, self.hello(name), message))

    def begin(self, *workers: str) -> Self:
        self.join("s0", *(workers or ("w0",)))
        for worker in workers or ("w0",):
            self.say(worker, Propose(self.record))
        return self

    def store(self, writer: str = "s0") -> list[acts.Act]:
        """The snapshot that was asked for last is stored by `writer` and committed."""
        asked = [
            act.message for act in self.done if isinstance(act, acts.SendMessage) and isinstance(act.message, Capture)
        ]
        parts = self.say(writer, protocol.Stored(asked[-1].snapshot, {}, dict.fromkeys(SHARDS, ("", 0, 0, ""))))
        (commit,) = (act for act in parts if isinstance(act, acts.CommitSnapshot))
        return [commit, *self.take(protocol.Snapshotted(commit.snapshot, commit.version, 1, 0.1))]

    def report(self, step: int, replica: int, worker: str = "w0") -> list[acts.Act]:
        return self.say(worker, protocol.Report(step, replica, 1.0, 1.0, 4, generation=self.view.generation))

    def steps(self, first: int, last: int) -> Self:
        for step in range(first, last):
            for replica in range(2):
                self.report(step, replica)
        return self

    def lose_the_server(self) -> None:
        """Its shards are lost: the job goes back to the last snapshot on another one."""
        self.take(inbox.Closed("s0", self.hello("s0"), "it died"))
        self.join("s1")

    @property
    def view(self) -> View:
        assert self.shell.machine.view is not None
        return self.shell.machine.view

    def sent(self, kind: type[protocol.Message]) -> list[Any]:
        return [act.message for act in self.done if isinstance(act, acts.SendMessage) and isinstance(act.message, kind)]

    def logged(self, kind: type[Any]) -> list[Any]:
        return [act.message for act in self.done if isinstance(act, acts.AppendLog) and isinstance(act.message, kind)]


# ---- claims carry the generation in which they became true (I10) -----------------------------------------------


def _rolled_back() -> tuple[Play, ViewNumber]:
    play = Play(snapshots=True, snapshot_steps=10).begin()
    play.store()
    play.steps(0, 10)
    play.store()
    play.steps(10, 15)
    before = play.view.generation
    play.lose_the_server()
    play.take(Origin("step-00000010-10002", 10))
    assert play.view.generation > before
    return play, before


def test_figures_of_a_version_that_was_rolled_back_judge_nothing() -> None:
    play, before = _rolled_back()
    assert play.say("w0", Evaluated(30, before, {"loss": 0.1})) == []
    assert play.shell.evaluations.of(30) == {}


def test_figures_found_before_a_roll_back_are_forgotten_of_the_steps_that_are_computed_again() -> None:
    play = Play(snapshots=True, snapshot_steps=10).begin()
    play.store()
    play.steps(0, 15)
    for step in (5, 10, 15):
        play.say("w0", Evaluated(step, play.view.generation, {"loss": 1.0}))
    play.lose_the_server()
    play.take(Origin("step-00000010-10002", 10))
    assert [play.shell.evaluations.of(step) for step in (5, 10, 15)] == [{"loss": 1.0}, {"loss": 1.0}, {}]


# ---- figures belong to their version ---------------------------------------------------------------------------


def test_a_snapshot_gets_the_figures_of_its_own_version_from_all_evaluations_of_it() -> None:
    play = Play(snapshots=True, snapshot_steps=10).begin()
    play.store()
    play.steps(0, 10)
    play.take(inbox.Ticked())
    taken = play.sent(Capture)[-1].version
    play.say("w0", Evaluated(taken, play.view.generation, {"loss": 1.0}))
    play.say("w0", Evaluated(taken, play.view.generation, {"accuracy": 0.5}))
    play.say("w0", Evaluated(taken + 1, play.view.generation, {"loss": 9.0}))
    commit = play.store()[0]
    assert isinstance(commit, acts.CommitSnapshot)
    assert commit.metrics == {"loss": 1.0, "accuracy": 0.5}


@pytest.mark.parametrize("evaluated_first", [True, False])
def test_a_run_that_gets_more_steps_decides_as_one_that_had_them_from_the_start(evaluated_first: bool) -> None:
    """Whether the last version was evaluated before it was stored, or after: the job ends there, so what follows counts
    from no version of it."""
    rule = {"evaluation.plateau": ReduceOnPlateau("loss", patience=0)}
    play = Play(settings={**rule, "steps": 4}, snapshots=True).begin()
    play.say("w0", protocol.Evaluates((2,)))
    play.store()
    play.steps(0, 2)
    play.say("w0", Evaluated(2, play.view.generation, {"loss": 1.0}))
    play.steps(2, 4)
    if evaluated_first:
        play.say("w0", Evaluated(4, play.view.generation, {"loss": 1.0}))
    play.say("w0", Done(play.view.generation))
    commit = play.store()[0]
    assert isinstance(commit, acts.CommitSnapshot)
    assert commit.version == 4

    settings = {**rule, "steps": 8}
    resumed = Resumed(record(**settings), commit.snapshot, 4, None, commit.decided.going_on(4))
    again = Play(settings=settings, resume=resumed).begin()
    again.say("w0", protocol.Evaluates((2,)))
    again.say("w0", Evaluated(4, again.view.generation, {"loss": 1.0}))
    assert again.view.orders.reductions == (6,)


def test_figures_that_come_after_their_snapshot_are_sent_after_it() -> None:
    play = Play().begin().steps(0, 3)
    play.say("w0", Evaluated(3, play.view.generation, {"loss": 1.0}))
    said = play.say("w0", Evaluated(3, play.view.generation, {"accuracy": 0.5}))
    assert acts.AddFigures(3, {"loss": 1.0, "accuracy": 0.5}) in said


@pytest.mark.parametrize("loss", [1.0, float("nan")])
def test_figures_that_are_said_again_count_once(loss: float) -> None:
    """A worker repeats them when its link has been broken."""
    play = Play().begin().steps(0, 3)
    figures = Evaluated(3, play.view.generation, {"loss": loss, "accuracy": 0.5})
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(figures), type=Evaluated)
    assert any(isinstance(act, acts.AddFigures) for act in play.say("w0", figures))
    assert play.say("w0", again) == []
    assert play.say("w0", Evaluated(3, play.view.generation, {"loss": 2.0}))


def test_figures_are_remembered_of_so_many_versions_only() -> None:
    play = Play(settings={"steps": 1000}).begin()
    for step in range(1000):
        play.report(step, 0)
        play.say("w0", Evaluated(step, play.view.generation, {"loss": 1.0}))
    assert play.shell.evaluations.of(999) == {"loss": 1.0}
    assert sum(bool(play.shell.evaluations.of(step)) for step in range(1000)) <= 100


# ---- what is waited for (I8) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [{"type": "bounded-staleness", "staleness": 2}, {"type": "async"}])
def test_a_stall_names_the_slowest_worker_and_nobody_who_waits_for_it(sync: dict[str, Any]) -> None:
    play = Play(settings={"sync": sync}, workers_start=2)
    play.join("o0")
    play.take(inbox.Ticked(), seconds=10.0)
    assert play.sent(protocol.Waiting)[0].text.startswith("waiting for 1 more server and 2 more workers, ")
    play.begin("w0", "w1")
    slow, quick = play.view.replicas_of("w0", 0)[0], play.view.replicas_of("w1", 0)[0]
    play.report(0, slow, "w0")
    for step in range(4):
        play.report(step, quick, "w1")
    play.take(inbox.Ticked(), seconds=10.0)
    _, waiting = play.sent(protocol.Waiting)
    assert f"step 1: replica {slow} on w0 on here has not reported" in waiting.text
    assert "w1" not in waiting.text


def after_the_first_step(of: int) -> Play:
    """Two workers have reported step 0, and an observer listens."""
    play = Play(settings={"steps": of}, workers_start=2)
    play.join("o0")
    play.begin("w0", "w1")
    for worker in ("w0", "w1"):
        for replica in play.view.replicas_of(worker, 0):
            play.report(0, replica, worker)
    return play


def test_a_worker_that_evaluates_is_not_said_to_be_late() -> None:
    play = after_the_first_step(of=2)
    play.say("w0", protocol.Beat(evaluating=True))
    play.take(inbox.Ticked(), seconds=10.0)
    assert play.sent(protocol.Waiting)[-1].text.startswith("waiting for w0 on here, which evaluates, 1")
    play.say("w0", protocol.Beat())
    play.say("s0", protocol.Applied(0, 2, 1.0, {"w0": 0.5}))
    play.take(inbox.Ticked(), seconds=10.0)
    late = "usually 0.50 s behind the first, at worst 0.50 s (p50 and p99 of 1 step)"
    assert f"on w0 on here ({late}), w1 on here have not reported, " in play.sent(protocol.Waiting)[-1].text


def test_a_store_whose_worker_computes_a_push_is_not_said_to_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    play = after_the_first_step(of=2)
    monkeypatch.setattr(type(play.shell.announcer.config), "features", property(lambda self: {Feature.KEYED}))
    play.say("w0", protocol.Beat(evaluating=True))
    play.take(inbox.Ticked(), seconds=10.0)
    assert play.sent(protocol.Waiting)[-1].text.startswith("waiting for pushes of step 1: w0 on here")


def test_after_the_last_step_nobody_waits_for_one_more() -> None:
    play = after_the_first_step(of=1)
    play.say("w1", Done(play.view.generation))
    play.say("w0", protocol.Beat(evaluating=True))
    play.take(inbox.Ticked(), seconds=10.0)
    assert play.sent(protocol.Waiting)[-1].text.startswith("waiting for w0 on here, which evaluates, 1")
    play.say("w0", protocol.Beat())
    play.take(inbox.Ticked(), seconds=10.0)
    assert play.sent(protocol.Waiting)[-1].text.startswith("waiting for the last version to reach w0 on here, ")


# ---- observers that come late ----------------------------------------------------------------------------------


def launcher(play: Play) -> list[protocol.Message]:
    """What a launcher is sent that connects now."""
    opened = play.take(inbox.Opened("o9", protocol.Hello("observer", "launcher", "here", "")))
    return [act.message for act in opened if isinstance(act, acts.SendMessage)]


def test_a_launcher_that_connects_again_hears_what_was_said_meanwhile_and_others_do_not() -> None:
    play = after_the_first_step(of=9)
    play.take(inbox.Closed("o0", play.hello("o0"), "it is away"))
    play.take(Say("server1 is gone"))
    play.join("o1")
    assert Say("server1 is gone") not in play.sent(Say)
    assert Say("server1 is gone") in launcher(play)


def test_a_launcher_that_connects_when_the_job_is_over_hears_how_that_came() -> None:
    play = after_the_first_step(of=9)
    play.take(inbox.Closed("o0", play.hello("o0"), "it is away"))
    play.take(Say("worker1 has had enough"))
    play.take(Aborted("the disk is full"))
    heard = launcher(play)
    assert Say("worker1 has had enough") in heard
    assert heard[-1] == Aborted("the disk is full")


# ---- counts after a recovery -----------------------------------------------------------------------------------


def test_the_plan_says_how_many_items_a_step_uses_and_how_many_steps_are_behind_the_job() -> None:
    play = Play().begin()
    (plan,) = play.logged(protocol.Planned)
    assert (plan.items, plan.done) == (2 * 4, 0)
    play.steps(0, 3)
    (plan,) = Play(play.shell.machine.state()).logged(protocol.Planned)
    assert (plan.items, plan.done) == (2 * 4, 3), "the coordinator died, and the next one goes on"


def test_workers_without_a_replica_are_told_about_once_with_what_to_do() -> None:
    def idle(play: Play) -> list[str]:
        said = [
            act.message.text for act in play.done if isinstance(act, acts.AppendLog) and isinstance(act.message, Say)
        ]
        return [text for text in said if "nothing" in text]

    play = Play(workers_start=4, workers_max=4).begin("w0", "w1", "w2", "w3")
    assert idle(play) == [
        "w2, w3 compute nothing: the job has 2 replicas, and each is computed by one worker. Use --workers 2, or a new "
        "run with more replicas (their number is fixed for a run)"
    ]
    play.begin("w4")
    assert len(idle(play)) == 1
    standing_by = Play(workers_start=2, workers_max=2)  # as many as replicas: the third is a standby by wish
    standing_by.begin("w0", "w1", "w2")
    assert idle(standing_by) == []


def test_a_resumed_job_has_the_steps_of_its_snapshot_behind_it() -> None:
    play = Play(resume=Resumed(record(), "step-00000010-1", 10)).begin()
    (plan,) = play.logged(protocol.Planned)
    assert (plan.items, plan.done) == (2 * 4, 10)


def test_workers_that_fail_because_the_job_has_ended_begin_no_other_end() -> None:
    play = Play(snapshots=True, settings={"sync": AllReduce()}, workers_start=2).begin("w0", "w1")
    play.store("w0")
    for replica, worker in enumerate(("w0", "w1")):
        play.say(worker, protocol.Report(0, replica, 1.0, 1.0, 4, 0.1, play.view.generation, f"settings of {worker}"))
    assert "do not have the same settings" in play.sent(Aborted)[0].reason
    play.done.clear()
    play.say("w0", protocol.GiveUp("ValueError: something else", 1, play.view.generation))
    assert (play.sent(Capture), play.logged(Held)) == ([], []), "it is not said that the newest version is being stored"


# ---- a full disk -----------------------------------------------------------------------------------------------


def test_with_no_room_for_version_0_it_says_so_computes_and_tries_again() -> None:
    play = Play(snapshots=True).begin()
    assert not play.view.assignments, "nothing is computed before it is known whether version 0 is stored"
    snapshot = play.sent(Capture)[-1].snapshot
    play.say("s0", protocol.NotStored(snapshot, "no space left"))
    said = " ".join(say.text for say in play.logged(Say))
    assert "version 0 is not stored, so the job computes without a snapshot" in said
    assert play.view.assignments
    play.steps(0, 1)
    play.take(inbox.Ticked())
    assert play.sent(Capture)[-1].snapshot != snapshot, "another is taken as soon as it can be"


def test_once_the_journal_knows_that_the_job_has_begun_it_may_fall_behind() -> None:
    play = Play().begin().steps(0, STEPS)
    begun = [act.needed for act in play.done if isinstance(act, acts.Save)]
    assert begun
    assert all(begun), "up to the first step"
    play.done.clear()
    play.join("w1")
    play.say("w1", Propose(play.record))
    assert {act.needed for act in play.done if isinstance(act, acts.Save)} == {False}
    play.say("w1", Done(play.view.generation))
    play.done.clear()
    play.say("w0", Done(play.view.generation))
    assert [act.needed for act in play.done if isinstance(act, acts.Save)] == [False]
    assert play.sent(protocol.Finished)


def test_a_job_that_is_ended_from_outside_says_so_once() -> None:
    play = Play().begin()
    play.take(Aborted("somebody pulled the plug"))
    play.take(Aborted("again"))
    assert play.sent(Aborted) == [Aborted("somebody pulled the plug")] * 2, "the server and the worker"
    assert [act for act in play.done if isinstance(act, acts.Over)] == [acts.Over("somebody pulled the plug")]


def test_the_end_is_told_to_a_member_whose_link_is_broken_just_then_and_it_is_not_the_lead() -> None:
    play = Play(workers_start=2).begin("w0", "w1")
    for step in range(STEPS):
        for replica, worker in enumerate(("w0", "w1")):
            play.report(step, replica, worker)
    assert play.view.lead(STEPS) == "w0"
    play.say("w0", Done(play.view.generation))
    play.take(inbox.Closed("w0", play.hello("w0"), "its connection broke", inbox.End.LOST))
    play.say("w1", Done(play.view.generation))
    assert play.sent(protocol.Finished) == [protocol.Finished("w1")] * 2, "the server and the worker that are here"
    assert not [act for act in play.done if isinstance(act, acts.Over)]
    told = play.take(inbox.Opened("w0", play.hello("w0")))
    assert told == [acts.SendMessage("w0", protocol.Finished("w1"))]
    assert play.take(inbox.Ticked(), 2.9) == []
    assert play.take(inbox.Ticked(), 0.2) == [acts.Over(None)]


def test_the_lead_is_named_even_if_all_workers_are_away_at_the_end() -> None:
    play = Play().begin().steps(0, STEPS)
    play.take(inbox.Closed("s0", play.hello("s0"), "its connection broke", inbox.End.LOST))
    play.say("w0", Done(play.view.generation))
    assert play.sent(protocol.Finished) == [protocol.Finished("w0")]
    assert not [act for act in play.done if isinstance(act, acts.Over)], "the server is told when it comes back"


@pytest.mark.parametrize("order", [Resize(5), protocol.StopWanted("enough")])
def test_an_order_that_comes_after_the_job_s_end_is_refused_and_nobody_hears_that_it_is_followed(
    order: Resize | protocol.StopWanted
) -> None:
    play = Play().begin()
    play.join("o")
    play.steps(0, STEPS)
    play.say("w0", Done(play.view.generation))
    assert play.sent(protocol.Finished)
    before = len(play.done)
    play.say("o", order)
    sent = [act.message for act in play.done[before:] if isinstance(act, acts.SendMessage)]
    assert sent == [protocol.Ordered(type(order).__name__, "the job is over", refused=True)]


@pytest.mark.parametrize(("steps", "said"), [(MOST_PUSHES, 0), (500, 500)])
def test_a_store_without_steps_is_announced_as_one_whose_scripts_decide_when_they_end(steps: int, said: int) -> None:
    play = Play(settings={"keyed": True, "steps": steps, "batch": 1}).begin()
    assert [planned.steps for planned in play.logged(protocol.Planned)] == [said]


# ---- who knows the token, and asks too much ---------------------------------------------------------------------


def test_a_flood_of_resizes_is_followed_now_and_then_and_the_newest_counts() -> None:
    play = Play()
    play.join("s0", "o")
    for workers in range(1, 501):
        play.say("o", Resize(workers))
    play.say("o", Resize(0, servers=3))
    followed = play.sent(Resize)
    assert 1 <= len(followed) < 50
    assert len([act for act in play.done if isinstance(act, acts.Save)]) < 100
    play.take(inbox.Ticked(), seconds=10.0)
    assert play.sent(Resize)[len(followed) :] == [Resize(500, 3)]
    assert play.shell.machine.state().workers_max == 500
    play.take(inbox.Ticked(), seconds=10.0)
    assert len(play.sent(Resize)) == len(followed) + 1


def test_processes_that_join_under_ever_new_names_are_let_in_one_after_another() -> None:
    play = Play().begin()
    play.join("o")
    for number in range(5000):
        play.join(f"w{number + 1}")
        play.take(inbox.Closed(f"w{number + 1}", play.hello(f"w{number + 1}"), "it closed its connection"))
    joined = play.shell.machine.state().incarnations
    assert joined < 2000
    assert len(play.sent(Say)) < 2000
    assert [said.text for said in play.sent(Say) if "more processes join" in said.text] == [
        "more processes join than a job needs: they are let in one after another"
    ]
    play.join("w5001")
    assert "w5001" not in play.incarnations
    play.take(inbox.Ticked(), seconds=1.0)
    assert play.incarnations["w5001"] == joined + 1, "it waited for its turn"
    play.take(inbox.Closed("s0", play.hello("s0"), "broken", inbox.End.LOST))
    for number in range(5002, 5010):
        play.join(f"w{number}")
    play.join("s0")
    assert play.incarnations["s0"] == 1, "who comes back waits for nobody"


# ---- views -----------------------------------------------------------------------------------------------------


def test_a_view_travels_as_a_difference_and_whole_over_a_new_connection() -> None:
    play = Play(workers_max=3, workers_start=3).begin("w0", "w1", "w2")
    assert play.changes == 0, "nobody had a view before"
    play.take(inbox.Closed("w1", play.hello("w1"), "it died"))
    assert (play.changes, len(play.views)) == (3, 7), "to s0, w0 and w2"
    assert play.known["s0"] == play.known["w0"] == play.known["w2"] == play.view
    play.take(inbox.Closed("w2", play.hello("w2"), "the network", inbox.End.LOST))
    play.join("w2")
    assert (play.changes, play.views[-1]) == (3, play.view), "whole: what was under way to it may be lost"


def test_a_server_that_has_handed_its_shards_over_hears_that_it_may_go() -> None:
    play = Play(servers=2)
    play.join("s0", "s1", "w0")
    play.say("w0", Propose(play.record))
    play.steps(0, 1)
    play.say("s1", protocol.Leaving())
    play.say("s1", protocol.CaughtUp({shard: play.view.paired[shard] for shard in play.view.shards_of("s1")}))
    assert play.view.orders.handover is not None
    done = play.say("w0", protocol.Reached(play.view.orders.handover, play.view.generation))
    assert acts.SendMessage("s1", protocol.Finished()) in done


# ---- a coordinator after another -------------------------------------------------------------------------------


def test_what_is_saved_comes_before_what_is_said_about_it() -> None:
    play = Play().begin()
    sent = [act.message if isinstance(act, acts.SendMessage) else None for act in play.done]
    published = next(i for i, message in enumerate(sent) if isinstance(message, NewView))
    saved = [act.state for act in play.done[:published] if isinstance(act, acts.Save)]
    assert saved[-1].view == play.view


# ---- a process that has not heard that it was admitted ----------------------------------------------------------


@pytest.mark.parametrize("closed", [False, True])
def test_a_process_that_comes_again_before_it_heard_of_its_admission_is_who_it_was(closed: bool) -> None:
    play = Play(workers_start=2)
    hello = msgspec.structs.replace(play.hello("s0"), process=b"of s0")
    play.take(inbox.Opened("s0", hello))
    play.join("w0", "w1")
    for worker in ("w0", "w1"):
        play.say(worker, Propose(play.record))
    view, incarnation = play.view, play.incarnations["s0"]
    if closed:
        play.take(inbox.Closed("s0", hello, "its connection ended", inbox.End.LOST))
    play.done.clear()
    play.take(inbox.Opened("s0, again", hello))
    assert [admitted.incarnation for admitted in play.sent(Admitted)] == [incarnation]
    assert [news.view for news in play.sent(NewView)] == [view], "what was sent to it may be lost with its connection"
    assert [act.connection for act in play.done if isinstance(act, acts.Close)] == ([] if closed else ["s0"])
    assert play.view == view
    refused = play.take(inbox.Opened("another", msgspec.structs.replace(hello, process=b"of another")))
    assert refused == [acts.RefuseConnection("another", "the id s0 is taken: give every member one of its own")]


# ---- a journal that fell behind (its disk was full) -------------------------------------------------------------


def after_a_full_disk(*lost: str, **terms: Any) -> tuple[Play, Play, View]:
    """A job whose journal ends before worker w1 joined and `lost` died, and the coordinator that takes over.

    Nobody has come back to it yet.
    """
    play = Play(servers=2, replication=2, **terms)
    play.join("s0", "s1", "w0")
    play.say("w0", Propose(play.record))
    play.steps(0, 3)
    for server, backups in (("s0", (0,)), ("s1", (1,))):
        play.say(server, protocol.CaughtUp(dict.fromkeys(backups, play.view.number)))
    journaled = play.shell.machine.state()
    play.join("w1")
    play.say("w1", Propose(play.record))
    for name in lost:
        play.take(inbox.Closed(name, play.hello(name), "killed"))
    after = Play(journaled, servers=2, replication=2, **terms)
    after.incarnations, after.known = dict(play.incarnations), dict(play.known)
    return play, after, play.view


def test_the_next_coordinator_goes_on_from_the_newest_view_that_a_member_knows() -> None:
    play, after, newest = after_a_full_disk("s1")
    after.known["s0"] = after.known["w0"] = newest
    after.join("s0", "w0")
    assert not after.sent(NewView), "w1 may know of a newer one"
    after.join("w1")
    assert after.view.number == newest.number
    assert after.views == [newest] * 3
    assert {member.id for member in after.view.servers} == {"s0"}, "s1 was given up, and stays so"
    assert after.shell.machine.state().incarnations == play.shell.machine.state().incarnations
    after.join("w2")
    after.say("w2", Propose(after.record))
    assert after.view.number > newest.number


def test_a_view_that_reached_one_member_of_the_one_before_counts_too() -> None:
    _, after, newest = after_a_full_disk()
    old = next(view for view in (after.shell.machine.view,) if view is not None)
    after.known |= {"s0": old, "s1": old, "w0": newest, "w1": newest}
    after.join("s0", "s1", "w0", "w1")
    assert after.view.number == newest.number
    assert after.views == [newest] * 4, "those who had missed it hear it now"


def test_a_view_that_only_a_newcomer_was_sent_had_no_effect_and_costs_nothing() -> None:
    _, after, newest = after_a_full_disk()
    old = next(view for view in (after.shell.machine.view,) if view is not None)
    after.known |= {"s0": old, "s1": old, "w0": old, "w1": newest}
    after.join("s0", "s1", "w0")
    assert after.views == [old] * 3
    after.join("w1")
    after.say("w1", Propose(after.record))
    assert after.view.generation == old.generation, "no step is lost"
    assert after.view.number > newest.number
    assert [member.id for member in after.view.workers] == ["w0", "w1"]


def test_an_incarnation_that_only_its_member_knows_is_not_given_again() -> None:
    """The journal had no room for w1's joining; it had not proposed yet, so it is in no view."""
    play = Play(servers=2, replication=2).begin("w0")
    play.join("s1")
    play.steps(0, 3)
    journaled = play.shell.machine.state()
    play.join("w1")
    after = Play(journaled, servers=2, replication=2)
    after.incarnations, after.known = dict(play.incarnations), dict(play.known)
    after.join("w1", "s0", "s1", "w0")
    after.join("w2")
    given = list(after.incarnations.values())
    assert len(set(given)) == len(given), given
    assert min(after.incarnations["w1"], after.incarnations["w2"]) > play.incarnations["w1"]


@pytest.mark.parametrize("above", [0, 3])
def test_a_member_that_knows_a_view_of_another_coordinator_is_told_of_once_with_what_to_do(above: int) -> None:
    _, after, newest = after_a_full_disk(heartbeat=6.0)
    old = next(view for view in (after.shell.machine.view,) if view is not None)
    after.known |= {"s0": old, "s1": old}
    after.join("s0", "s1")
    after.take(inbox.Ticked(), seconds=3.1)
    epoch = after.shell.machine.course.views.epoch
    others = msgspec.structs.replace(newest, number=ViewNumber(epoch + above, 7))
    after.known |= {"w0": others, "w1": others}
    after.join("w0", "w1")
    said = [say.text for say in after.logged(Say) if "another coordinator" in say.text]
    assert len(said) == 1, "once, whoever comes with it"
    assert f"w0 comes back with view {others.number}, which another coordinator has published" in said[0]
    assert "end this one" in said[0]
    assert "`rallypoint resume`" in said[0]


def test_a_member_that_comes_back_with_our_own_newest_view_is_no_news() -> None:
    play = Play().begin()
    play.join("w0", "s0")
    assert not play.logged(Say)


def test_who_does_not_come_back_is_not_waited_for_longer_than_three_seconds() -> None:
    _, after, newest = after_a_full_disk(heartbeat=6.0)
    after.known["w0"] = newest
    after.join("w0", "s0")
    assert not after.sent(NewView)
    after.take(inbox.Ticked(), seconds=3.1)
    assert after.view.number == newest.number
    assert len(after.sent(NewView)) == 2


def test_two_coordinators_never_give_one_number_twice_even_if_the_journal_has_neither() -> None:
    play, after, newest = after_a_full_disk("s1", heartbeat=6.0)
    numbers = []
    for earlier in (1, 2):  # as the launcher counts them
        after = Play(play.shell.machine.recovered or after.shell.machine.recovered, servers=2, replication=2,
                     heartbeat=6.0, earlier=earlier)  # fmt: skip
        after.incarnations, after.known = {"w0": play.incarnations["w0"]}, {"w0": newest}
        after.join("w0")
        after.take(inbox.Ticked(), seconds=3.1)
        after.take(inbox.Ticked(), seconds=0.1)
        numbers.append(after.shell.machine.course.views.epoch)
    assert numbers[0] < numbers[1]
    assert newest.number.epoch < numbers[0]


def test_a_member_that_comes_too_late_with_a_newer_view_sends_everybody_back_to_a_snapshot() -> None:
    _, after, newest = after_a_full_disk(heartbeat=6.0)
    old = next(view for view in (after.shell.machine.view,) if view is not None)
    after.known |= {"s0": old, "s1": old, "w0": newest}
    after.join("s0", "s1")
    after.take(inbox.Ticked(), seconds=3.1)
    assert after.view.number == old.number
    after.join("w0")
    said = " ".join(say.text for say in after.logged(Say))
    assert f"w0 comes back with view {newest.number}, which the journal had no room for" in said
    assert after.shell.machine.phase is Phase.RECOVERING
    assert any(isinstance(act, FindSnapshot) for act in after.done)


def test_a_job_that_ends_before_anything_is_taken_over_ends_for_all_who_have_come_and_who_come_soon() -> None:
    _, after, newest = after_a_full_disk(heartbeat=1.0)
    after.known |= {"s0": newest, "w0": newest}
    after.join("s0", "w0", "s1")
    after.take(inbox.Closed("s1", after.hello("s1"), "its connection ended", inbox.End.LOST))
    after.take(Aborted("the coordinator failed"))
    told = lambda: [act.connection for act in after.done if isinstance(act, acts.SendMessage)]  # noqa: E731
    assert after.sent(Aborted) == [Aborted("the coordinator failed")] * 3
    assert set(told()) == {"s0", "w0", "s1"}
    assert not [act for act in after.done if isinstance(act, acts.Over)], "others are about to come"
    after.join("w1")
    assert told()[-1] == "w1"
    after.take(inbox.Ticked(), 2.0)
    assert not [act for act in after.done if isinstance(act, acts.Over)]
    assert after.take(inbox.Ticked(), 1.0) == [acts.Over("the coordinator failed")]
    assert not after.sent(NewView), "nothing is decided any more"
    assert set(after.shell.announcer.observers) == {"s0", "w0", "w1"}, "whom `close` waits for"


@pytest.mark.parametrize("heard", ["s0", "w0"])
def test_the_coordinator_after_one_that_went_on_without_a_view_knows_that_it_did(heard: str) -> None:
    """The one between hears too late of the newest view, and publishes one; it dies before it is told."""
    _, between, newest = after_a_full_disk("s1", heartbeat=6.0)
    between.known |= dict.fromkeys(("s0", "w0"), newest)
    between.take(inbox.Opened("w2", between.hello("w2")))
    between.take(inbox.Ticked(), seconds=3.1)
    between.say("w2", Propose(between.record))
    assert between.view.gaps == ((ViewNumber(1, 1), ViewNumber(2)),)
    assert ViewNumber(1, 1) < newest.number < between.view.number
    last = Play(between.shell.machine.state(), servers=2, replication=2, heartbeat=6.0)
    last.incarnations, last.known = dict(between.incarnations), dict(between.known)
    last.join(heard)
    last.take(inbox.Ticked(), seconds=3.1)
    said = " ".join(say.text for say in last.logged(Say))
    assert f"{heard} comes back with view {newest.number}, which the journal had no room for" in said
    assert last.shell.machine.phase is Phase.RECOVERING
    last.join("s2")
    last.take(Origin("step-1", 1))
    generation = last.view.generation
    assert last.view.gaps == ()
    last.join("w0" if heard == "s0" else "s0")
    assert last.view.generation == generation, "once is enough: nothing from before the generation counts"


def test_a_process_that_comes_in_the_place_of_another_waits_until_that_one_is_given_up() -> None:
    """Its coordinator died before it heard that it was admitted: it comes as somebody new."""
    _, after, newest = after_a_full_disk(heartbeat=6.0)
    before = after.incarnations.pop("w0")
    after.known |= dict.fromkeys(("s0", "s1", "w1"), newest)
    after.join("s0", "s1", "w1")
    after.join("w0")
    assert not after.sent(NewView), "it knows no view, and the one that it replaces may know a newer one"
    after.take(inbox.Ticked(), seconds=3.1)
    assert after.view.number == newest.number
    assert "w0" not in after.incarnations
    for _ in range(5):
        for name in ("s0", "s1", "w1"):
            after.say(name, protocol.Beat())
        after.take(inbox.Ticked(), seconds=1.5)
    assert after.incarnations["w0"] > before
    assert [act for act in after.done if isinstance(act, acts.RefuseConnection)] == []


@pytest.mark.parametrize("restarted", [False, True])
def test_a_token_holder_does_not_take_the_place_of_a_member_that_is_about_to_come_back(restarted: bool) -> None:
    """He is faster than the member after the coordinator's restart, or after its link broke."""
    play = Play(heartbeat=6.0).begin().steps(0, 3)
    view = play.view
    after = Play(play.shell.machine.state(), heartbeat=6.0) if restarted else play
    after.incarnations, after.known = dict(play.incarnations), dict(play.known)
    thief = protocol.Hello("server", "s0", "elsewhere", "elsewhere:1", process=b"of the thief")
    if not restarted:
        after.take(inbox.Closed("s0", after.hello("s0"), "its connection ended", inbox.End.LOST))
    after.done.clear()
    after.take(inbox.Opened("thief", thief))
    after.take(inbox.Opened("another", thief))
    after.take(inbox.Received("thief", thief, protocol.CaughtUp({})))
    after.join("s0", "w0")
    assert after.view == view, "no shard is lost"
    sentence = "the id s0 is taken: give every member one of its own"
    refused = [act for act in after.done if isinstance(act, acts.RefuseConnection)]
    assert sorted(str(act.connection) for act in refused) == ["another", "thief"]
    assert {act.reason for act in refused} == {sentence}
    assert not [act for act in after.done if isinstance(act, acts.SendMessage) and act.connection == "thief"]


def test_who_waits_for_a_name_and_goes_is_forgotten() -> None:
    play = Play(heartbeat=6.0).begin()
    play.take(inbox.Closed("s0", play.hello("s0"), "its connection ended", inbox.End.LOST))
    newcomer = protocol.Hello("server", "s0", "elsewhere", "elsewhere:1", process=b"new")
    play.take(inbox.Opened("newcomer", newcomer))
    said = [say.text for say in play.logged(Say)]
    assert said[-1] == "another process has come as s0: it waits until s0 is back, or is given up"
    play.take(inbox.Closed("newcomer", newcomer, "it closed its connection"))
    play.join("s0")
    assert not [act for act in play.done if isinstance(act, acts.RefuseConnection)]
    assert play.shell.members.keys() == {"s0", "w0"}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_cluster_that_comes_back_under_its_own_names_waits_for_its_ghosts_no_longer_than_a_heartbeat(
    restarted: bool,
) -> None:
    play = Play(heartbeat=6.0).begin().steps(0, 3)
    after = Play(play.shell.machine.state(), heartbeat=6.0) if restarted else play
    for name in () if restarted else ("s0", "w0"):
        after.take(inbox.Closed(name, after.hello(name), "its connection ended", inbox.End.LOST))
    for name, role in (("s0", "server"), ("w0", "worker")):
        after.take(inbox.Opened(f"new {name}", protocol.Hello(role, name, "here", f"{name}:2", process=b"new")))
    admitted: set[object] = set()
    seconds = 0.0
    while len(admitted) < 2 and seconds < 60.0:
        done, seconds = after.take(inbox.Ticked(), seconds=0.5), seconds + 0.5
        admitted |= {
            act.connection for act in done if isinstance(act, acts.SendMessage) and isinstance(act.message, Admitted)
        }
    assert admitted == {"new s0", "new w0"}
    assert seconds <= 2 * 6.0
    assert not [say.text for say in after.logged(Say) if "cut off" in say.text]


def test_an_end_that_the_shell_decides_is_in_the_journal_before_anybody_hears_of_it() -> None:
    play = Play().begin()
    ended = play.take(Aborted("the coordinator was interrupted"))
    saved = [act.state.last_word for act in ended if isinstance(act, acts.Save)]
    assert saved == [Aborted("the coordinator was interrupted")]
    first = next(index for index, act in enumerate(ended) if isinstance(act, acts.SendMessage))
    assert any(isinstance(act, acts.Save) for act in ended[:first])


def test_who_waits_for_a_name_hears_that_the_job_has_ended() -> None:
    play = Play(heartbeat=6.0).begin()
    play.take(inbox.Closed("w0", play.hello("w0"), "its connection ended", inbox.End.LOST))
    play.take(inbox.Opened("newcomer", protocol.Hello("worker", "w0", "elsewhere", process=b"new")))
    play.take(Aborted("enough"))
    assert [act for act in play.done if act == acts.SendMessage("newcomer", Aborted("enough"))]
    play.take(inbox.Ticked(), seconds=20.0)
    assert not play.shell.members.keys() & {"w0"}, "nobody is admitted to a job that has ended"


def test_a_member_cannot_claim_a_view_that_it_has_no_place_in() -> None:
    _, after, newest = after_a_full_disk()
    old = next(view for view in (after.shell.machine.view,) if view is not None)
    forged = msgspec.structs.replace(newest, number=ViewNumber(9, 9), workers=(), servers=())
    after.known |= {"s0": old, "s1": old, "w0": forged}
    after.join("s0", "s1", "w0")
    assert after.view.number == old.number


@pytest.mark.parametrize("proof", [b"", bytes(32), b"of another view"], ids=["none", "zeros", "another's"])
@pytest.mark.parametrize("late", [False, True])
def test_a_member_cannot_claim_a_view_that_no_coordinator_has_published(late: bool, proof: bytes) -> None:
    """A worker that stands by makes itself the one that uploads the state, or says what sends everybody back."""
    _, after, newest = after_a_full_disk(heartbeat=6.0)
    proof = Tickets(b"").proof(newest) if proof == b"of another view" else proof
    number = ViewNumber(newest.number.epoch, newest.number.count + 3)
    homes = {0: "s0", 1: "s0"}
    forged = msgspec.structs.replace(newest, number=number, generation=number, uploader="w1", primary=homes)
    old = next(view for view in (after.shell.machine.view,) if view is not None)
    after.known |= {"s0": newest, "s1": newest, "w0": old}
    after.join("s0", "s1", "w0")
    if late:
        after.take(inbox.Ticked(), seconds=3.1)
    after.take(inbox.Opened("w1", after.hello("w1")))
    after.say("w1", protocol.Knows(forged, proof))
    assert after.view.number == newest.number
    assert after.view.primary == newest.primary
    assert after.shell.machine.phase is Phase.RUNNING
    assert not after.logged(Say)


# ---- what is announced is known to the next coordinator (I7) ---------------------------------------------------


def test_a_new_size_is_written_down_before_the_launcher_hears_of_it() -> None:
    play = Play().begin()
    play.join("o0")
    done = play.say("o0", Resize(5))
    written = [n for n, act in enumerate(done) if isinstance(act, acts.Save) and act.state.workers_max == 5]
    told = [n for n, act in enumerate(done) if isinstance(act, acts.SendMessage) and act.message == Resize(5)]
    assert written < told
    assert len(written) == len(told) == 1


def test_a_member_whose_link_breaks_while_a_failing_job_is_stored_is_told_of_the_end() -> None:
    play = Play(snapshots=True, snapshot_steps=10).begin("w0", "w1")
    play.store()
    play.report(0, 0, "w0")
    play.report(0, 1, "w1")
    play.say("s0", protocol.Applied(0, 2, 0.0, generation=play.view.generation))
    play.say("w0", protocol.GiveUp("its loss is nan", 1, play.view.generation))
    assert play.shell.machine.phase is Phase.FAILING
    play.take(inbox.Closed("w1", play.hello("w1"), "a broken wire", inbox.End.LOST))
    ended = play.store()
    assert play.shell.last_word == Aborted("w0: its loss is nan")
    assert [act for act in ended if isinstance(act, acts.Over)] == [], "it is about to come back"
    play.take(inbox.Opened("w1", play.hello("w1")))
    assert acts.SendMessage("w1", Aborted("w0: its loss is nan")) in play.done
    assert play.take(inbox.Ticked(), 3.0) == [acts.Over("w0: its loss is nan")]


_MODES: dict[str, dict[str, Any]] = {"servers-hold-the-state": {}, "workers-hold-it": {"sync": {"type": "all-reduce"}}}


@pytest.mark.parametrize("settings", _MODES.values(), ids=_MODES.keys())
@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.FAILING])
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
        old.say("w0", protocol.Beat())
        step = 10
    if phase is Phase.RECOVERING:
        old.take(inbox.Closed("s0", old.hello("s0"), "it died"))
    if phase is Phase.OVER:
        old.take(Aborted("somebody pulled the plug"))
        old.shell.machine.course.end(Aborted("somebody pulled the plug"))
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
            new.say("w0", protocol.Beat())
        new.join("s1")
        if not settings:
            assert FindSnapshot() in new.done
            new.take(Origin("step-00000010-10002", 10))
    new.shell.machine.validate()
    new.steps(step, STEPS)
    new.say("w0", Done(new.view.generation))
    while not new.sent(protocol.Finished):
        new.store(writer())  # those by steps, then the last version
    new.shell.machine.validate()
