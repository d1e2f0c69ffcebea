"""What a page is told of a run: from the coordinator's announcements, and only what has changed."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint import own_files
from rallypoint.core import protocol
from rallypoint.core.protocol import AuditFound, Finished, LinkSample, Members, Message, Metrics, Sampled, StepDone
from rallypoint.launch.folder import coordinated
from rallypoint.own_files import COORDINATOR_LOCK, LOCK
from rallypoint.watch.app import PageReader
from rallypoint.watch.follow import EVENTS, Follower, event_of
from rallypoint.watch.state import RunState, Series, StepPace, StepTimes, Timelines

PLAN = protocol.Planned(10, 2, "samples", 100, 3, ("worker0", "worker1"), ("server0",), items=8)


def members(workers: str = "worker0 worker1", standby: str = "", servers: str = "server0") -> Members:
    return Members("1.1", tuple(workers.split()), tuple(standby.split()), tuple(servers.split()))


def run_of(*messages: Message, every: float = 1.0) -> RunState:
    run = RunState()
    for number, message in enumerate(messages):
        run.take(message, number * every)
    return run


def steps(first: int, last: int) -> list[Message]:
    return [StepDone(step, 5.0 - step, 8, lr=0.1, figures={"accuracy": 0.5}) for step in range(first, last)]


def test_what_an_audit_has_found_is_a_mark_however_many_servers_say_it() -> None:
    run = RunState()
    differ, decided = AuditFound(2, 1, 0, (), ("worker0", "worker1")), AuditFound(2, 1, 0, ("w0", "w2"), ("w1",))
    for message in (PLAN, *steps(0, 2), differ, msgspec.structs.replace(differ, shard=3), decided, decided):
        run.take(message, 1.0)
    assert [(mark["kind"], mark["step"], mark["text"]) for mark in run.marks] == [
        ("audit", 2, "audit of step 2, replica 1: worker0 and worker1 have computed different bytes"),
        ("audit", 2, "audit of step 2, replica 1: w1 has computed other bytes than w0 and w2"),
    ]  # fmt: skip


def test_curves_hold_what_was_logged_at_each_step() -> None:
    run = run_of(PLAN, members(), *steps(0, 4), Metrics(4, {"val_loss": 1.5}))
    assert run.curves["loss"].columns()["mean"] == [5.0, 4.0, 3.0, 2.0]
    assert run.curves["accuracy"].columns()["mean"] == [0.5] * 4
    assert run.curves["seconds a step"].columns()["step"] == [1, 2, 3]
    assert run.evaluations["val_loss"].columns() == {"step": [4], "mean": [1.5], "low": [1.5], "high": [1.5]}
    assert (run.step, run.ended) == (4, "")


def test_a_step_whose_loss_nobody_has_said_has_none() -> None:
    run = run_of(msgspec.structs.replace(PLAN, loss="said"), StepDone(0, 5.0, 8), StepDone(1, math.nan, 8))
    assert run.row == (1, {})
    assert run.curves["loss"].columns()["step"] == [0]
    assert run.loss == 5.0


def test_the_last_stall_has_the_sentence_that_was_said_meanwhile() -> None:
    run = run_of(PLAN, members(), *steps(0, 20))
    assert run.stalled is None
    sentence = "waiting for worker1 on node7 to send shard 3, 5 s so far"
    run.take(protocol.Waiting(sentence), 30.0)
    run.take(StepDone(20, 1.0, 8), 40.0)
    assert run.stalled == {"step": 20, "seconds": 19.0, "text": sentence}
    run.take(StepDone(21, 1.0, 8), 41.0)
    assert run.stalled["step"] == 20
    told = PageReader().news(run)
    assert told["stalled"]["text"] == sentence


def test_the_ledger_says_what_was_used_and_counted() -> None:
    run = run_of(PLAN, members(), *steps(0, 4))
    told = PageReader().news(run)
    assert told["ledger"] == {"updates": 4, "used": 32}
    run.take(protocol.Accounted(applied=6, folded=0, dropped=1, repeats=2, staleness={0: 3, 2: 3}), 9.0)
    told = PageReader().news(run)
    assert told is not None
    counted = {"applied": 6, "folded": 0, "dropped": 1, "repeats": 2, "staleness": [1.0, 2]}
    assert told["ledger"] == {"updates": 4, "used": 32, **counted}


def test_a_death_and_a_join_are_marked_where_they_happened() -> None:
    run = run_of(
        PLAN, members("worker0 worker1", "worker2"), *steps(0, 2), members("worker0 worker2"), *steps(2, 3),
        members("worker0 worker2", "worker3"),
    )  # fmt: skip
    assert [(mark["kind"], mark["step"], mark["text"]) for mark in run.marks] == [
        ("loss", 2, "without worker1"), ("join", 3, "with worker3"),
    ]  # fmt: skip
    assert run.members.spans["worker1"] == [(1.0, "computing"), (4.0, "gone")]
    assert run.members.spans["worker2"] == [(1.0, "standby"), (4.0, "computing")]


def test_a_new_coordinator_s_clock_goes_on_from_the_old_one_s() -> None:
    run = RunState()
    for t, message in [(0.0, PLAN), (5.0, StepDone(0, 1.0, 8)), (1.0, PLAN), (3.0, StepDone(1, 1.0, 8))]:
        run.take(message, t)
    assert run.now == 7.0
    assert run.curves["seconds a step"].columns()["mean"] == [2.0]


@pytest.mark.parametrize(("last", "how", "why"), [
    (Finished("worker0"), "finished", ""), (Finished("worker0", 7, "enough"), "finished", "stopped at step 7: enough"),
    (protocol.Aborted("no room"), "failed", "no room"),
])  # fmt: skip
def test_the_end_is_told_and_nobody_is_here_any_more(last: Message, how: str, why: str) -> None:
    run = run_of(PLAN, members(), *steps(0, 2), last)
    assert (run.ended, run.why) == (how, why)
    assert run.members.here == set()


def test_a_run_that_went_back_says_so_and_draws_the_new_values() -> None:
    run = run_of(PLAN, members(), *steps(0, 5), StepDone(2, 9.0, 8, again=3))
    assert run.marks[-1]["text"] == "back to step 2"
    assert run.curves["loss"].columns()["mean"] == [5.0, 4.0, 9.0]
    assert run.again == 3


@pytest.mark.slow
def test_every_bound_holds_in_a_very_long_run() -> None:
    run = RunState()
    for step in range(5000):
        run.take(StepDone(step, 1.0, 8, figures={f"name{step}": 1.0}), step)
        run.take(members(f"worker{step}"), step)
        run.take(protocol.Say("x" * 100), step)
        run.take(protocol.Skipped(step, (0,)), step)
        run.take(protocol.Snapshotted("a", step, 1, 1.0), step)
    said = PageReader().news(run)
    assert said is not None
    assert len(json.dumps(said)) < 3 << 20
    assert len(run.curves) == 64
    assert len(run.members.spans) <= 4096


def test_stalls_are_longer_than_three_medians_and_have_a_cause() -> None:
    times = StepTimes()
    for step in range(100):
        times.add(step, 0.1, "unknown")
    times.add(100, 2.1, "loss")
    assert times.stalls == 1
    assert times.lost["loss"] == pytest.approx(2.0, rel=0.01)
    assert times.longest == (2.1, 100, "loss")
    assert times.quantile(0.5) == pytest.approx(0.1, rel=0.03)
    assert times.goodput == pytest.approx(1 - 2.0 / 12.1, rel=0.01)


def test_a_wait_is_the_cause_of_the_stall_that_it_is_in() -> None:
    run = run_of(PLAN, members(), *steps(0, 20))
    run.take(protocol.Waiting("waiting for a worker"), 30.0)
    run.take(StepDone(20, 1.0, 8), 60.0)
    assert list(run.times.lost) == ["waiting"]


def test_a_stall_that_no_sentence_explains_is_named_by_the_members() -> None:
    for before, cause in [
        ([], "slow steps"), ([members("worker0")], "members gone"),
        ([members("worker0"), *steps(20, 21)], "fewer workers"),
        ([msgspec.structs.replace(members(), view="1.2")], "new view"),
        ([msgspec.structs.replace(members(), exposed=0)], "new backup"),
    ]:  # fmt: skip
        run = run_of(PLAN, msgspec.structs.replace(members(), exposed=1), *steps(0, 20), *before)
        run.take(StepDone(21, 1.0, 8), 60.0)
        assert list(run.times.lost) == [cause]


def test_a_resume_is_no_stall_and_a_roll_back_is_one() -> None:
    for done, said, causes in [
        (17, "resumed from step 17", []),
        (0, "back to step 17", ["roll-back"]), (None, "back to step 17", ["roll-back"]),
    ]:  # a coordinator that took over, in the same run, says that 0 steps are done
        run = run_of(PLAN, members(), *steps(0, 20))
        if done is not None:
            run.take(msgspec.structs.replace(PLAN, done=done), 0.0)  # a new coordinator counts from 0
        run.take(StepDone(17, 1.0, 8), 30.0)
        run.take(StepDone(18, 1.0, 8), 31.0)
        assert [mark["text"] for mark in run.marks] == [said]
        assert list(run.times.lost) == causes


def test_the_slowest_workers_are_known_until_they_leave() -> None:
    run = run_of(PLAN, members(), protocol.Applied(0, 2, 1.0, {"worker0": 0.0, "worker1": 0.5}))
    assert run.late == {"worker0": 0.0, "worker1": 0.5}
    run.take(members("worker0"), 9.0)
    assert run.late == {"worker0": 0.0}


def test_of_very_many_members_the_oldest_that_are_gone_are_forgotten() -> None:
    lines = Timelines()
    for number in range(4200):
        lines.take(members(f"worker{number}"), float(number))
    assert len(lines.spans) == 4096
    assert "worker0" not in lines.spans
    assert "worker4199" in lines.here


# ---- what is sent ----


def test_a_page_is_told_everything_once_and_then_only_what_is_new() -> None:
    run, reader = run_of(PLAN, members(), *steps(0, 3), protocol.Say("hello")), PageReader()
    first = reader.news(run)
    assert first["plan"]["steps"] == 10
    assert first["sentences"][0]["text"] == "hello"
    assert reader.news(run) is None
    run.take(StepDone(3, 1.0, 8), 10.0)
    second = reader.news(run)
    assert second["curves"]["loss"]["step"] == [2, 3]
    assert not {"plan", "sentences", "members", "snapshots"} & second.keys()
    assert "lr" not in second["curves"]


def test_a_page_that_puts_the_parts_together_has_the_whole() -> None:
    run, reader, have = RunState(), PageReader(), dict[str, list[tuple[int, float]]]()
    t = 0.0
    for step in [*range(3000), *range(1500, 5000)]:
        t += 1.0
        run.take(StepDone(step, float(step % 7), 8), t)
        if step % 37 == 0:
            _put_together(have, reader.news(run))
    _put_together(have, reader.news(run))
    whole = run.curves["loss"].columns()
    assert have["loss"] == list(zip(whole["step"], whole["mean"], strict=True))


def _put_together(have: dict[str, list[tuple[int, float]]], news: dict[str, Any] | None) -> None:
    """As page.js does."""
    assert news is not None
    for name, part in news["curves"].items():
        kept = [] if part["from"] == 0 else [point for point in have[name] if point[0] < part["from"]]
        have[name] = kept + list(zip(part["step"], part["mean"], strict=True))


# ---- the log ----


def line(t: float, message: Message) -> bytes:
    return msgspec.json.encode({"t": t, **msgspec.to_builtins(message)}) + b"\n"


def test_a_log_is_followed_while_it_grows_and_lines_that_are_none_are_passed_over(tmp_path: Path) -> None:
    log = tmp_path / EVENTS
    log.write_bytes(line(0.0, PLAN) + b"no event\n" + line(1.0, StepDone(0, 4.0, 8))[:-9])
    follower = Follower(tmp_path)
    follower.look()
    assert (follower.run.plan, follower.run.step) == (PLAN, 0)
    with log.open("ab") as file:
        file.write(line(1.0, StepDone(0, 4.0, 8))[-9:] + line(2.0, StepDone(1, 3.0, 8)))
    follower.look()
    assert follower.run.curves["loss"].columns()["mean"] == [4.0, 3.0]
    assert follower.generation == 0


def no_locks(*_: Any) -> None:
    raise OSError(37, "No locks available")


def test_a_run_that_nothing_runs_any_more_was_interrupted_until_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / EVENTS
    log.write_bytes(line(0.0, PLAN) + line(1.0, StepDone(0, 4.0, 8)))
    follower = Follower(tmp_path)
    (tmp_path / LOCK).touch()  # a launcher's: by hand, workers may go on without a coordinator
    with coordinated(tmp_path):
        follower.look()
        assert follower.run.ended == ""
    follower.look()
    assert (follower.run.ended, follower.run.why) == ("interrupted", "nothing of it runs any more")
    with coordinated(tmp_path), log.open("ab") as file:
        file.write(line(2.0, StepDone(1, 4.0, 8)) + line(2.0, protocol.Snapshotted("a", 1, 1, 1.0)))
        file.flush()
        follower.look()
        assert follower.run.ended == ""
    with monkeypatch.context() as patch:
        patch.setattr(own_files.fcntl, "flock", no_locks)
        follower.look()
        assert follower.run.ended == "", "nobody knows: the file system has no locks"
    follower.look()
    assert follower.run.why == f"nothing of it runs any more: rallypoint resume {tmp_path}"


@pytest.mark.parametrize(("host", "launched"), [("", True), ("another-machine", True), (socket.gethostname(), False)])
def test_a_run_by_hand_or_of_another_machine_goes_on_as_far_as_anybody_knows(
    tmp_path: Path, host: str, launched: bool
) -> None:
    (tmp_path / EVENTS).write_bytes(line(0.0, PLAN))
    if host:
        (tmp_path / COORDINATOR_LOCK).write_text(f"process 7 on {host}")
    if launched:
        (tmp_path / LOCK).touch()
    follower = Follower(tmp_path)
    follower.look()
    assert follower.run.ended == ""


def test_a_log_that_was_replaced_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / EVENTS
    log.write_bytes(line(0.0, PLAN) + line(1.0, StepDone(0, 4.0, 8)))
    follower = Follower(tmp_path)
    follower.look()
    log.unlink()
    log.write_bytes(line(0.0, PLAN))
    follower.look()
    assert (follower.run.step, follower.generation) == (0, 1)


@pytest.mark.parametrize("bad", [
    b"", b"{}", b'{"t":1}', b'{"t":1.0,"type":"Unheard","x":1}', b'{"t":1e999,"type":"Say","text":"x"}', b"\xff" * 10,
    b'{"t":"x","type":"Say","text":"x"}', b'{"t":1.0,"type":"Say","text":3}', b'{"t":1.2.3,"type":"Say","text":"x"}',
])  # fmt: skip
def test_a_line_that_is_no_event_of_ours_is_passed_over(bad: bytes) -> None:
    assert event_of(bad) is None


def test_numbers_that_json_cannot_tell_are_nan() -> None:
    for event in (StepDone(3, math.nan, 8, figures={"x": math.inf, "y": 2.0}), Metrics(3, {"val": math.nan})):
        found = event_of(line(0.0, event))
        assert str(found[0]) == str(event).replace("inf", "nan")


def test_steps_that_a_new_coordinator_announces_at_once_are_no_fast_steps() -> None:
    """They were done while there was no coordinator: the steps after them would all count as stalls."""
    run = run_of(PLAN, members(), *steps(0, 4))
    for t, message in [
        (0.0, msgspec.structs.replace(PLAN, steps=100)), *((1.0, step) for step in steps(4, 30)),
        *((float(step.step) - 28.0, step) for step in steps(30, 40) if isinstance(step, StepDone)),
    ]:  # fmt: skip
        run.take(message, t)
    assert run.step == 40
    assert run.curves["seconds a step"].columns()["mean"] == [1.0] * 14
    assert (run.times.stalls, run.times.goodput) == (0, 1.0)


def test_a_job_whose_steps_are_always_that_fast_is_measured_after_some() -> None:
    pace = StepPace()
    pace.begins()
    measured = [pace.step(number * 1e-4) for number in range(2000)]
    assert measured[:1001] == [None] * 1001
    assert None not in measured[1001:]


# ---- machines and links ----


def sampled(member: str, cpu: float = 0.5, host: str = "here", **links: LinkSample) -> Sampled:
    return Sampled(5.0, cpu, 6, 8, own_cpu=1.0, own_memory=5, links=links, member=member, host=host)


def test_machines_have_the_figures_of_all_their_members_and_go_with_the_last() -> None:
    run = run_of(PLAN, members(), sampled("worker0"), sampled("worker1"), sampled("server0", 1.0, "there"), every=2.0)
    told = run.machines.told()
    here, there = told["hosts"]
    assert (here["name"], here["members"], here["own_cpu"], here["own_memory"]) == ("here", 2, 2.0, 10)
    assert (there["cpu"], here["memory"]) == ([100], [75])
    run.take(members(workers="worker0", servers=""), 20.0)
    assert [host["name"] for host in run.machines.told()["hosts"]] == ["here"]
    run.take(sampled("worker1"), 21.0)  # its word came after it was gone
    assert list(run.machines.members) == ["worker0"]


def test_links_are_a_matrix_of_who_dials_whom_and_of_many_those_that_talk_most() -> None:
    link = LinkSample(0.001, 100.0, 50.0)
    run = run_of(PLAN, members(), sampled("worker0", server0=link), sampled("worker1"))
    assert run.machines.told()["links"] == {
        "rows": ["worker0"], "columns": ["server0"], "cells": [[[0.001, 100.0, 50.0]]], "members": [1, 1],
    }  # fmt: skip
    many = members(" ".join(f"worker{i}" for i in range(1000)))
    large = run_of(PLAN, many, *(sampled(f"worker{i}", server0=LinkSample(0, i, 0)) for i in range(1000)))
    shown = large.machines.told()["links"]
    assert (len(shown["rows"]), shown["rows"][-1], shown["members"]) == (24, "worker999", [1000, 1])


# ---- Values by step in bounded memory ----


def test_few_values_are_kept_as_they_are() -> None:
    series = Series()
    for step in range(5):
        series.add(step, step / 2)
    assert series.columns() == {
        "step": [0, 1, 2, 3, 4], "mean": [0.0, 0.5, 1.0, 1.5, 2.0], "low": [0.0, 0.5, 1.0, 1.5, 2.0],
        "high": [0.0, 0.5, 1.0, 1.5, 2.0],
    }  # fmt: skip


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=200), st.integers(2, 16))
def test_no_value_is_lost_however_few_points_there_are(values: list[float], most: int) -> None:
    series = Series(most=most)
    for step, value in enumerate(values):
        series.add(step, value)
    assert len(series.points) <= most
    assert sum(point.count for point in series.points) == len(values)
    assert [p.step for p in series.points] == list(range(0, len(values), series.width))
    for point in series.points:
        own = values[point.step : point.step + series.width]
        assert (point.low, point.high) == (min(own), max(own))
        assert math.isclose(point.total, math.fsum(own), rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.slow
def test_a_million_steps_are_two_thousand_points() -> None:
    series = Series()
    for step in range(1_000_000):
        series.add(step, 1.0)
    assert 1024 <= len(series.points) <= 2048
    assert series.width == 512


def test_a_run_that_went_back_shows_what_it_computes_anew() -> None:
    series = Series()
    for step in range(10):
        series.add(step, 1.0)
    seen = series.revision
    for step in range(4, 7):
        series.add(step, 2.0)
    assert series.columns()["mean"] == [1.0] * 4 + [2.0] * 3
    assert series.whole > seen


def test_values_that_are_no_numbers_are_left_out() -> None:
    series = Series()
    for step, value in enumerate([1.0, math.nan, math.inf, 2.0]):
        series.add(step, value)
    assert series.columns()["step"] == [0, 3]


def test_only_what_is_new_can_be_asked_for() -> None:
    series = Series()
    for step in range(10):
        series.add(step, 1.0)
    end = series.end
    series.add(10, 3.0)
    assert series.columns(end)["step"] == [9, 10]
    assert series.whole == 0
