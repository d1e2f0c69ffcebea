"""A worker between the job's words: what it says when it comes back, leaves, fails, or comes at the very end."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from rallypoint.coordinator import connections
from rallypoint.core import protocol
from rallypoint.core.protocol import Aborted, Done, Finished, GiveUp, Hello, Message, Metrics, NewView, Propose
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.errors import JobAborted, RallypointError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.net import handshake
from rallypoint.net.channel import Channel
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Identity, ticket_for
from rallypoint.net.transport import InprocTransport
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.loop import session
from rallypoint.worker.loop.run import Run
from rallypoint.worker.loop.session import Job
from support.beside import until
from support.gathering import DATA, SETTINGS, Once, build, gathering, loss_of, reference_hash
from support.training import finish

PATIENCE_S = 240.0  # against hanging only
SECRET = b"the secret of this coordinator"


class Coordinator:
    """Says what the test says; keeps what it hears."""

    def __init__(self) -> None:
        self.transport = InprocTransport()
        self.training: Training | None = None
        self.joined: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self.heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        me, welcome = Identity("coordinator", "", secret=SECRET), protocol.Welcome(heartbeat=1000.0)
        self.gate = Gate(self.transport, "coordinator:1", me, lambda hello: welcome, self._serve)

    def _serve(self, channel: Channel, hello: Hello) -> None:
        self.joined.put(channel)
        while True:
            self.heard.put(protocol.decode(channel.receive_bytes(channel.receive_header())))

    def admit(self, incarnation: int) -> Channel:
        channel = self.joined.get(timeout=PATIENCE_S)
        channel.send_message(protocol.Admitted(incarnation, ticket_for(SECRET, "worker", "w", incarnation)))
        return channel

    def next(self, kind: type[Message]) -> Any:
        while not isinstance(message := self._hear(kind), kind):
            pass
        return message

    def _hear(self, kind: type[Message]) -> Message:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.heard.get(timeout=0.05)
            except queue.Empty:
                if self.training is not None and self.training.error is not None:
                    raise self.training.error from None  # it will say nothing any more
                more = self.joined.qsize()
                assert time.monotonic() < deadline, f"no {kind.__name__} has come; {more} more connections have"


def view(count: int) -> View:
    number = ViewNumber(1, count)
    return View(
        number, ViewNumber(1, 1), (Member("w", "here", incarnation=1),), (), (Assignment(0, {"w": (0, 1, 2, 3)}),),
        dict.fromkeys(range(40), "s"), {}, uploader="w",
    )  # fmt: skip


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    # A greeting that takes longer is given up, and the worker comes again. The test would admit the first one, in vain.
    monkeypatch.setattr(handshake, "GREETING_TIMEOUT_S", 2 * PATIENCE_S)
    coordinator = Coordinator()
    yield coordinator
    coordinator.gate.close()


@pytest.fixture
def job(coordinator: Coordinator) -> Iterator[Job]:
    job = Job(id="w", coordinator="coordinator:1", transport=coordinator.transport)
    yield job
    job.close()
    if coordinator.training is not None:  # of a test that has failed: no thread of it meets the next one
        job._fail(JobAborted("the test is over"))
        coordinator.training.join()


class Training:
    """`job.train` on a thread: it waits for what the test says."""

    def __init__(self, coordinator: Coordinator, job: Job) -> None:
        coordinator.training = self
        self.run: Run | None = None
        self.error: BaseException | None = None
        self._job = job
        self._thread = threading.Thread(target=self._train, name="training", daemon=True)
        self._thread.start()

    def _train(self) -> None:
        try:
            self.run = self._job.train(build(), DATA, **SETTINGS)
            for micro in self.run:
                with micro:
                    pytest.fail("there is no server that could have given it parameters")
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE_S)

    def end(self) -> None:
        self.join()
        assert not self._thread.is_alive(), "it still waits"
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(("admitted", "word", "sentence"), [
    (True, Finished("another"), "the job was over before this worker took part in it"),
    (False, Aborted("w1 pulled the plug"), "w1 pulled the plug"),  # not admitted: else a refusal means to come back
    (False, protocol.Refused("w1 pulled the plug"), "w1 pulled the plug"),
    (True, Hello("worker", "w", "here"), "a worker has no use for a Hello message"),
])  # fmt: skip
def test_a_worker_that_waits_for_the_job_is_told_why_there_will_be_none(
    coordinator: Coordinator, job: Job, admitted: bool, word: Message, sentence: str
) -> None:
    training = Training(coordinator, job)
    channel = coordinator.admit(1) if admitted else coordinator.joined.get(timeout=PATIENCE_S)
    if isinstance(word, Finished):
        coordinator.next(Propose)
    channel.send_message(word)
    with pytest.raises(JobAborted, match=sentence):
        training.end()


@pytest.mark.parametrize("word", [Finished("w"), Aborted("the plug")], ids=["finished", "aborted"])
def test_the_last_word_is_not_lost_on_a_worker_that_is_making_its_exchange(
    coordinator: Coordinator, job: Job, monkeypatch: pytest.MonkeyPatch, word: Message
) -> None:
    """A large model's exchange buffer takes a while to be made, and the job may be over by then."""
    making, told = threading.Event(), threading.Event()
    real = Exchange.__init__

    def slowly(self: Exchange, *args: Any, **options: Any) -> None:
        making.set()
        assert told.wait(PATIENCE_S)
        real(self, *args, **options)

    monkeypatch.setattr(Exchange, "__init__", slowly)
    training = Training(coordinator, job)
    channel = coordinator.admit(1)
    coordinator.next(Propose)
    channel.send_message(NewView(view(1)))
    assert making.wait(PATIENCE_S)
    channel.send_message(word)
    until(lambda: job._finished or job._failure is not None)
    told.set()
    with pytest.raises(JobAborted, match="the plug" if isinstance(word, Aborted) else "was over before this worker"):
        training.end()


def test_to_a_coordinator_that_has_forgotten_it_a_worker_says_everything_again(
    coordinator: Coordinator, job: Job
) -> None:
    training = Training(coordinator, job)
    channel = coordinator.admit(1)
    proposed = coordinator.next(Propose)
    channel.send_message(NewView(view(1)))
    until(lambda: job._exchange is not None)
    job.done(ViewNumber(1, 1))
    assert coordinator.next(Done) == Done(ViewNumber(1, 1))
    channel.refuse("given up: no sign of life for 3.1 s")
    channel = coordinator.admit(2)
    assert coordinator.next(Propose) == proposed
    assert coordinator.next(Done) == Done(ViewNumber(1, 1))
    channel.connection.close()
    channel = coordinator.admit(2)  # perhaps another coordinator, which has come to the same number by counting anew
    assert coordinator.next(Propose) == proposed
    assert coordinator.next(Done) == Done(ViewNumber(1, 1))
    end(channel, training)


def test_what_a_worker_has_done_before_a_roll_back_is_not_said_again(coordinator: Coordinator, job: Job) -> None:
    training = Training(coordinator, job)
    channel = coordinator.admit(1)
    channel.send_message(NewView(view(1)))
    until(lambda: job._exchange is not None)
    job.done(ViewNumber(1, 1))
    assert coordinator.next(Done)
    channel.send_message(NewView(msgspec.structs.replace(view(2), generation=ViewNumber(1, 2))))
    until(lambda: not job._stopping._done)
    job.done(ViewNumber(1, 1))  # it has evaluated that version for so long
    job._leaving = True  # what it says last when it is admitted again, after whatever it has done
    channel.connection.close()
    channel = coordinator.admit(1)
    said = [type(coordinator.heard.get(timeout=PATIENCE_S))]
    while said[-1] is not protocol.Leaving:
        said.append(type(coordinator.heard.get(timeout=PATIENCE_S)))
    assert Propose in said
    assert Done not in said
    end(channel, training)


def end(channel: Channel, training: Training) -> None:
    channel.send_message(Aborted("enough"))
    with pytest.raises(JobAborted, match="enough"):
        training.end()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
        (KeyboardInterrupt(), "it was interrupted"),
        (RallypointError("ours"), "ours"),
    ],
    ids=["a bug", "ctrl-c", "our own"],
)
def test_a_worker_that_fails_says_why_before_it_goes(
    coordinator: Coordinator, error: BaseException, sentence: str
) -> None:
    def fail() -> None:
        with Job(id="w", coordinator="coordinator:1", transport=coordinator.transport) as job:
            coordinator.admit(1)
            until(lambda: job._link.incarnation == 1)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert coordinator.next(GiveUp) == GiveUp(sentence)


def test_a_worker_that_fails_says_which_version_it_has_got(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said, generations = build(), list[Message](), list[ViewNumber]()

    def fail() -> None:
        with EmbeddedJob() as job:
            send = job._link.send
            monkeypatch.setattr(job._link, "send", lambda message: (said.append(message), send(message)))
            for micro in job.train(model, DATA, **SETTINGS):
                with micro:
                    if micro.step == 1:
                        generations.append(job._view.generation)
                        raise RallypointError("ours")
                    micro.backward(loss_of(model, micro.batch))

    with pytest.raises(RallypointError, match="ours"):
        fail()
    assert [message for message in said if isinstance(message, GiveUp)] == [GiveUp("ours", 1, *generations)]


# ---- leaving -----------------------------------------------------------------------------------------------------


class Exits:
    """`os`, whose `_exit` is only written down, and `time`, whose `sleep` ends when the test says so."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.slept: list[float] = []
        self.over = threading.Event()

    def _exit(self, code: int) -> None:
        self.codes.append(code)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.over.wait(PATIENCE_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exits]:
    exits = Exits()
    monkeypatch.setattr(session, "os", exits)
    monkeypatch.setattr(session, "time", exits)
    yield exits
    exits.over.set()
    for thread in threading.enumerate():  # after a test that has failed too: then `os` is the real one again
        if thread.name == "leave":
            thread.join(PATIENCE_S)


@pytest.mark.slow
def test_a_worker_that_is_told_to_go_hands_its_replicas_over_and_its_loop_ends_with_success(exits: Exits) -> None:
    with gathering(2, workers_start=2, workers_max=2, heartbeat=5.0) as cluster:
        leave = Once(2, 3, lambda: cluster.workers[1].job.leave())
        cluster.add_worker()
        cluster.add_worker(leave)
        with pytest.raises(SystemExit) as left:
            cluster.workers[1].result()
        assert left.value.code == 0
        assert cluster.workers[0].result() == reference_hash()
        assert max(step for step, _ in cluster.workers[1].computed) < SETTINGS["steps"] - 1
        assert [said for said in cluster.sentences() if said.startswith("worker1 has left: ")]
        assert exits.codes == [], "it went by itself"
        exits.over.set()
        until(lambda: exits.codes == [0])
        assert sum(exits.slept) == session.LEAVE_WITHIN_S, "and would have gone all the same"


@pytest.mark.parametrize(("settled", "admitted"), [(True, True), (False, True), (False, False)])
def test_who_has_to_end_before_servers_have_its_codec_states_says_so(
    exits: Exits, capsys: pytest.CaptureFixture[str], settled: bool, admitted: bool
) -> None:
    """Not who was given up, and finds no coordinator any more: others have its replicas, or the job is over."""
    done: list[str] = []
    states = SimpleNamespace(hand_over=lambda: done.append("hand over") or settled)
    exchange = SimpleNamespace(leave=lambda: done.append("leave"), codec_states=states)
    link: Any = SimpleNamespace(send=lambda message: None, welcome=SimpleNamespace(heartbeat=5.0), admitted=admitted)
    exits.over.set()
    Job._leave(cast(Any, SimpleNamespace(
        id="worker1", _run=None, _link=link, _plane=exchange, _exchange=exchange, _finished=False
    )), 0)  # fmt: skip
    assert done == ["leave", "hand over", "hand over"]
    assert exits.codes == [0]
    said = "worker1 ends before servers have its codec states" in capsys.readouterr().out
    assert said == (admitted and not settled)


def test_a_loop_that_is_left_early_is_a_clean_end_of_the_job() -> None:
    with gathering(1) as cluster:
        job = cluster.member("worker0")
        with job:
            model = build()
            for micro in job.train(model, DATA, **SETTINGS):
                with micro:
                    micro.backward(loss_of(model, micro.batch))
                break
        assert cluster.coordinator.wait() is None


@pytest.mark.slow
def test_a_straggler_s_replica_is_computed_by_an_idle_worker_too() -> None:
    """The first one wins, and no byte is different."""
    go_on = threading.Event()
    with gathering(1, workers_start=2, workers_max=2, backup_tasks=True, heartbeat=4.0) as cluster:
        seen: set[tuple[str, int, int]] = set()

        def linger(step: int, replica: int) -> None:
            seen.add((threading.current_thread().name, step, replica))
            if step == 5 and threading.current_thread().name == "loop of worker1":
                go_on.wait(PATIENCE_S)

        def let_go(step: int, replica: int) -> None:
            seen.add((threading.current_thread().name, step, replica))
            if step == 7:  # it may begin with step 6 while step 5 is not over
                go_on.set()

        cluster.add_worker(let_go)
        cluster.add_worker(linger)
        hashes = [worker.result() for worker in cluster.workers]
        assert hashes == [reference_hash()] * 2
        both = [(s, r) for who, s, r in seen if who == "loop of worker0" and ("loop of worker1", s, r) in seen]
        assert {step for step, _ in both} == {5}


def test_a_script_that_exits_in_the_middle_of_the_loop_is_a_failure_of_the_job() -> None:
    """Also with success: nobody has told it to leave."""

    def exits(step: int, replica: int) -> None:
        if step == 3:
            raise SystemExit

    with gathering(1) as cluster:
        worker = cluster.add_worker(exits)
        with pytest.raises(SystemExit):
            worker.result()
        until(lambda: cluster.coordinator._over.is_set())
        assert cluster.coordinator.wait() == "worker0: its loop ended before the last step"


def test_a_script_that_exits_after_the_loop_has_done_its_work() -> None:
    with gathering(1) as cluster:
        with pytest.raises(SystemExit), cluster.member("worker0") as job:  # noqa: PT012
            model = build()
            finish(job.train(model, DATA, **SETTINGS), model, loss_of)
            raise SystemExit(0)
        assert cluster.coordinator.wait() is None


class _Never(Exception):
    """Nothing raises it."""


def test_figures_that_were_sent_into_a_broken_link_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LinkClosed", _Never)  # a pipe that ends is to look broken
    with gathering(1) as cluster:
        job = cluster.member("worker0")
        evaluations = cluster.coordinator._shell.evaluations
        with job:
            model = build()
            run = job.train(model, DATA, **SETTINGS)

            @run.every(2)
            def evaluate(step: int) -> dict[str, float]:
                if step == 2:  # the network carries nothing from here on, and nobody has noticed
                    monkeypatch.setattr(job._link._channel.connection, "send", lambda head, payload=None: None)
                return {"score": float(step)}

            for micro in run:
                if (micro.step, micro.replica) == (2, 0):
                    job._link._channel.flush(PATIENCE_S)
                    assert evaluations.of(2) == {}
                    job._link._channel.connection.close()
                with micro:
                    micro.backward(loss_of(model, micro.batch))
        assert evaluations.of(2) == {"score": 2.0}
        until(lambda: any(said.step == SETTINGS["steps"] for said in cluster.heard(Metrics)))
        assert [sum(said.step == step for said in cluster.heard(Metrics)) for step in (2, 4, 6, 8)] == [1] * 4
