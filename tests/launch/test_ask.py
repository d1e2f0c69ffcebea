"""Orders from another terminal whose answer does not come."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.core import protocol
from rallypoint.core.protocol import Members, Ordered, Pause, Planned, Resize, Snapshotted, SnapshotWanted, StepDone
from rallypoint.errors import DataError, LinkError, UsageError
from rallypoint.launch.commands import ask
from rallypoint.launch.folder import Where, coordinated, locked, write_where


class Job:
    """A job that goes on: a step ends every second of a clock of its own, and some `answers` come first."""

    def __init__(self, *answers: Any) -> None:
        self.now, self.step, self.sent = 0.0, 0, list[Any]()
        self._answers = list(answers)

    def send(self, wanted: Any) -> None:
        self.sent.append(wanted)

    def get(self, timeout: float) -> Any:
        assert self.now < 1000, "it waits without an end"
        if timeout < 1.0:
            self.now += timeout
            raise queue.Empty
        self.now, self.step = self.now + 1.0, self.step + 1
        return self._answers.pop(0) if self._answers else StepDone(self.step, 0.5, 8)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job(*request.param)

    @contextlib.contextmanager
    def asking(run: Path, id: str) -> Iterator[tuple[Job, Job]]:
        yield job, job

    monkeypatch.setattr(ask, "_asking", asking)
    monkeypatch.setattr(ask, "read_where", lambda run: None)
    monkeypatch.setattr(ask, "read_plan", lambda run: SimpleNamespace(workers=(1, 4), replication=1))
    monkeypatch.setattr(ask, "time", job)
    return job


SAID = Ordered("Pause", "the operator pauses the job before step 3")


@pytest.mark.parametrize("job", [()], indirect=True)
def test_an_order_whose_answer_was_lost_with_the_coordinator_ends_though_steps_go_on(job: Job) -> None:
    with pytest.raises(LinkError, match="no answer within 30 s"):
        ask.order(Path("run"), Pause(), print)
    assert job.sent == [Pause()]


@pytest.mark.parametrize("job", [()], indirect=True)
def test_a_snapshot_whose_answer_was_lost_with_the_coordinator_ends_though_steps_go_on(job: Job) -> None:
    with pytest.raises(LinkError, match="no snapshot within 600 s"):
        ask.take_snapshot(Path("run"), print)
    assert job.sent == [SnapshotWanted()]


@pytest.mark.parametrize("job", [()], indirect=True)
def test_a_resize_that_nobody_announces_ends_though_steps_go_on(job: Job) -> None:
    with pytest.raises(LinkError, match="not resized within 600 s"):
        ask.resize(Path("run"), 2, 0, lambda said: None)
    assert job.sent == [Resize(2, 0)]


BROKEN, WHOLE = False, True


@pytest.mark.parametrize("job", [(BROKEN, BROKEN, WHOLE, Snapshotted("step-8", 8, 1_000_000, 0.5))], indirect=True)
def test_a_snapshot_is_asked_for_again_when_the_coordinator_dies_before_it_answers(job: Job) -> None:
    said = list[str]()
    assert ask.take_snapshot(Path("run"), said.append) == "step-8: version 8, 1.0 MB in 0.50 s"
    assert job.sent == [SnapshotWanted(), SnapshotWanted()]
    assert said == [
        "the coordinator is gone before it has answered; waiting for the next one",
        "the coordinator is back, and was asked again",
    ]


@pytest.mark.parametrize("job", [(BROKEN, WHOLE, Members("2.1", ("worker0",), (), ("server0",)))], indirect=True)
def test_a_resize_is_asked_for_again_when_the_coordinator_dies_before_it_counts(job: Job) -> None:
    assert ask.resize(Path("run"), 1, 0, lambda said: None).endswith("1 worker and 1 server")
    assert job.sent == [Resize(1, 0), Resize(1, 0)]


def planned(replicas: int) -> Planned:
    return Planned(100, replicas, "samples", 93, 3, ("worker0",), ("server0",))


STANDS_BY = Members("1.3", ("worker0",), ("mine",), ("server0",))
WARMS = Members("1.4", ("worker0",), ("mine",), ("server0",), warming=("mine",))


@pytest.mark.parametrize("job", [(planned(8), STANDS_BY, WARMS)], indirect=True)
def test_a_resize_waits_until_a_worker_that_stood_by_takes_part(job: Job) -> None:
    """It was added by hand. The first news are of before the order."""
    said = list[str]()
    assert ask.resize(Path("run"), 2, 1, said.append).endswith(": 2 workers and 1 server")
    assert said == ["waiting for 1 worker to compute"]


@pytest.mark.parametrize("job", [(planned(1), STANDS_BY), (planned(1), WARMS)], indirect=True)
def test_a_resize_to_more_workers_than_replicas_says_why_some_stand_by(job: Job) -> None:
    answer = ask.resize(Path("run"), 2, 0, lambda said: None)
    assert answer.endswith(": 1 worker and 1 server; the others stand by: the job has 1 replica")


def test_who_gives_orders_to_a_run_by_hand_hears_what_to_do_instead(tmp_path: Path) -> None:
    orders = (
        lambda: ask.order(tmp_path, protocol.StopWanted("enough"), print), lambda: ask.resize(tmp_path, 2, 0, print),
        lambda: ask.take_snapshot(tmp_path, print), lambda: ask.order(tmp_path, Pause(), print),
    )  # fmt: skip
    with coordinated(tmp_path):
        for give in orders:
            with pytest.raises(UsageError, match=r"was started by hand: Ctrl-C \(SIGINT\) at it ends the job for all"):
                give()
    for give in orders:
        with pytest.raises(DataError, match="no run is under way in"):
            give()


@pytest.mark.parametrize("job", [(BROKEN, WHOLE, SAID)], indirect=True)
def test_an_order_is_given_again_when_the_coordinator_dies_before_it_answers(job: Job) -> None:
    assert ask.order(Path("run"), Pause(), lambda said: None) == SAID.text
    assert job.sent == [Pause(), Pause()]


def test_an_order_to_a_run_whose_launcher_and_coordinator_were_killed_says_how_to_go_on(tmp_path: Path) -> None:
    write_where(tmp_path, Where("127.0.0.1:1", "secret"))
    with coordinated(tmp_path), locked(tmp_path):
        pass
    with pytest.raises(DataError, match=rf"nothing of the run in .* runs any more: `rallypoint resume {tmp_path}`"):
        ask.order(tmp_path, Pause(), print)
