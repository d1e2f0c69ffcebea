"""Where torch's processes meet, and sums on a machine that is short of something: nobody waits in vain."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rallypoint.bridges import joining
from rallypoint.bridges.c10d import FutureWork, RallypointGroup
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


def test_what_was_added_up_is_let_go_with_its_sum_and_not_when_python_looks_for_cycles() -> None:
    asked = [PendingSum()]
    made = SimpleNamespace(reducer=SimpleNamespace(sum=lambda *_: asked[0]))
    tensor, collects = torch.ones(2), gc.isenabled()
    part = joining.SumPart(tensor, tensor)
    gone = weakref.ref(part)
    gc.disable()
    try:
        part.ask(cast(Sums, made), lambda error: None)
        asked.pop().ended(None)
        del part
        assert gone() is None
    finally:
        if collects:
            gc.enable()


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


# ---- The c10d backend in one process: who waits for a sum hears of its error; nothing is left to torch's class ----


def _future() -> torch.futures.Future[list[torch.Tensor]]:
    return torch.futures.Future()


def test_waiting_for_a_sum_that_failed_raises_its_sentence() -> None:
    future = _future()
    work = FutureWork(future)
    assert not work.is_completed()
    future.set_exception(RuntimeError("worker1 is gone"))
    with pytest.raises(RuntimeError, match="worker1 is gone"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()


def test_a_sum_that_is_there_is_given_also_through_its_future() -> None:
    future, result = _future(), [torch.ones(2)]
    work = FutureWork(future)
    future.set_result(result)
    assert work.wait()
    assert work.is_success()
    assert work.get_future() is future
    assert torch.equal(work.result()[0], result[0])


def test_ddp_raises_the_sentence_of_a_sum_that_failed_and_does_not_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reducer is in C++, and looks at the future itself."""
    broken = JobAborted("worker1 is gone, and this script's world is fixed")
    made = _NoSums(broken)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    group = RallypointGroup(cast(Sums, made), dist.HashStore(), 0, 1, timedelta(seconds=10))
    model = torch.nn.Linear(2, 2)
    reducer = dist.Reducer(
        list(model.parameters()), [[0, 1]], [1 << 20], group, [False, False], 1 << 20, False, False, {}, 1 << 20, 0
    )  # type: ignore[attr-defined]
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    with pytest.raises(RuntimeError, match="worker1 is gone, and this script's world is fixed"):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(JobAborted, match="worker1 is gone"):
        group.allreduce([torch.ones(2)]).wait()
    group.shutdown()


# Methods of a group that move nothing between ranks: what it is called, which backends it has.
MOVES_NOTHING = {
    "boxed", "unbox", "rank", "size", "name", "get_group_store", "_id", "_backend_id", "_get_backend",
    "_get_backend_name", "_has_hooks", "_register_backend", "_set_default_backend", "_set_group_desc",
    "_set_group_name", "_pybind11_conduit_v1_",
}  # fmt: skip


def test_no_method_of_a_group_is_left_to_torch_s_class() -> None:
    """torch would call it while it holds Python's lock, for which Gloo's threads may wait."""
    methods = {name for name in set(dir(dist.ProcessGroup)) - set(dir(object)) if _is_method(name)}
    assert {"broadcast", "barrier", "recv_anysource", "_allgather_base", "allgather_into_tensor_coalesced"} <= methods
    assert methods - set(vars(RallypointGroup)) <= MOVES_NOTHING


def _is_method(name: str) -> bool:
    one = getattr(dist.ProcessGroup, name)
    return callable(one) and not isinstance(one, type)


def test_what_torch_calls_from_c_plus_plus_reaches_gloo_by_the_group_s_own_method() -> None:
    group = _alone()
    calls: list[str] = []
    group._plain = _Noting(group._plain, calls)
    values = torch.ones(3)
    dist._broadcast_coalesced(group, [values], 100, 0)  # type: ignore[attr-defined]
    group.barrier().wait()
    dist.ProcessGroup.broadcast(group, values, 0).wait()
    assert calls == ["broadcast", "barrier", "broadcast"]
    group.shutdown()


class _Noting:
    """A group that notes which of its methods are called."""

    def __init__(self, group: Any, calls: list[str]) -> None:
        self._group, self._calls = group, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._group, name)


class _NoSums:
    """Sums of one worker, each of which fails with `error`."""

    told = Sums.told

    def __init__(self, error: BaseException | None = None) -> None:
        self.world, self.failed, self.reducer = 1, None, self
        self._error = error

    def sum(self, *_: Any) -> PendingSum:
        one = PendingSum()
        one.ended(self._error)
        return one


def _alone() -> RallypointGroup:
    return RallypointGroup(cast(Sums, _NoSums()), dist.HashStore(), 0, 1, timedelta(seconds=10))


def test_a_model_with_the_hook_can_be_saved_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hook's state is the process's sums, which no other process can have."""
    made = Sums.__new__(Sums)
    made.lock = threading.Lock()  # type: ignore[attr-defined]  # as the real one's threads and links: not to be copied
    monkeypatch.setattr(joining, "_joined", [made])
    assert copy.deepcopy({"state": made})["state"] is made
    assert pickle.loads(pickle.dumps(made)) is made
