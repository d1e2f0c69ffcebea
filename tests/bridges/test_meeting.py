"""Where torch's processes meet, and sums on a machine that is short of something: nobody waits in vain."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rallypoint.bridges import joining
from rallypoint.errors import JobAborted, UsageError
from rallypoint.launch import environment
from rallypoint.worker.collective import PendingSum, Sums
from rallypoint.worker.loop.session import Job

ADDRESS = "127.0.0.1:4700"


def job_in(folder: Path, id: str) -> Job:
    return cast(Job, SimpleNamespace(id=id, welcome=SimpleNamespace(folder=str(folder))))


def env_of(token: str) -> dict[str, str]:
    return {environment.COORDINATOR: ADDRESS, environment.WORKERS: "2", environment.TOKEN: token}


def test_the_others_meet_where_rank_0_of_the_same_run_has_said(tmp_path: Path) -> None:
    first, second = env_of("of this run"), env_of("of this run")
    assert joining._place(job_in(tmp_path, "worker0"), first) == (0, 2)
    assert joining._place(job_in(tmp_path, "worker1"), second) == (1, 2)
    assert [second[name] for name in ("MASTER_ADDR", "MASTER_PORT")] == [first["MASTER_ADDR"], first["MASTER_PORT"]]
    assert "of this run" not in (tmp_path / joining.MEETING).read_text(), "a token is a secret"


def test_what_an_earlier_run_in_the_folder_has_said_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coordinator had the same address, and nobody listens any more where its rank 0 did."""
    joining._place(job_in(tmp_path, "worker0"), env_of("of an earlier run"))
    monkeypatch.setattr(joining, "_PATIENCE_S", 0.2)
    with pytest.raises(UsageError, match="rank 0 has not said"):
        joining._place(job_in(tmp_path, "worker1"), env_of("of this run"))


def test_a_result_that_no_thread_can_be_started_for_is_an_error_and_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread:
        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    here = PendingSum()
    here.ended(None)
    made = SimpleNamespace(reducer=SimpleNamespace(sum=lambda *args: here), failed=None)
    tensor = torch.ones(2)
    part = joining.SumPart(tensor, tensor)
    monkeypatch.setattr(joining, "threading", SimpleNamespace(Thread=NoThread, Lock=threading.Lock))
    future = joining.sum_of(cast(Sums, made), [part], [tensor], torch.device("cpu"))
    assert future.done()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        future.wait()


@pytest.mark.parametrize("turned", [False, True])
def test_a_parameter_that_is_added_up_needs_no_gradient_for_that(turned: bool) -> None:
    """The script says `torch.no_grad()` on its own thread; the result comes on the thread of the sums."""

    def doubled(values: torch.Tensor, into: torch.Tensor, keeps: range) -> PendingSum:
        into.copy_(2 * values)
        (here := PendingSum()).ended(None)
        return here

    made = SimpleNamespace(reducer=SimpleNamespace(sum=doubled), failed=None)
    values = torch.ones(3, 2)
    parameter = torch.nn.Parameter(values.t() if turned else values.bfloat16())
    with torch.no_grad():
        part = joining.SumPart(parameter, parameter)
    joining.sum_of(cast(Sums, made), [part], [parameter], torch.device("cpu")).wait()
    assert parameter.is_leaf
    assert (parameter == 2).all()


def _broken(over: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[BaseException], list[int]]:
    """Tell a process that no sum can be made any more: with which errors it fails its job, and its exit statuses."""
    failed, statuses = list[BaseException](), list[int]()
    for name in ("_NOTICED_S", "_BROKEN_S"):
        monkeypatch.setattr(joining, name, 0.01)
    monkeypatch.setattr(joining.os, "_exit", statuses.append)
    event = threading.Event()
    if over:
        event.set()
    before = set(threading.enumerate())
    error = JobAborted("worker1 is gone")
    joining._end_who_waits(cast(Sums, SimpleNamespace(fail=failed.append)), event, error)
    waiting = {"__name__": "torch.distributed.distributed_c10d", "threads": set(threading.enumerate()) - before}
    exec("for thread in threads: thread.join()", waiting)
    return failed, statuses


def test_a_script_that_waits_without_a_sum_is_ended_once_none_can_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed, statuses = _broken(False, monkeypatch)
    assert [str(error) for error in failed] == ["worker1 is gone"]
    assert statuses == [1]
    assert "worker1 is gone (this script is ended in" in capsys.readouterr().err


def test_a_script_that_does_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has heard of the error, and saves what it has."""
    looks = list[float]()
    over = SimpleNamespace(wait=lambda seconds: looks.append(seconds) or len(looks) > 5)
    monkeypatch.setattr(joining.os, "_exit", pytest.fail)
    before = set(threading.enumerate())
    joining._end_who_waits(cast(Sums, None), cast(threading.Event, over), JobAborted("worker1 is gone"))
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert len(looks) == 6


def test_a_script_that_ends_by_itself_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _broken(True, monkeypatch) == ([], [])
    assert capsys.readouterr().err == ""
