"""The work that the c10d backend gives for a sum: who waits for it hears of the sum's error."""

from __future__ import annotations

import pytest
import torch

from rallypoint.bridges.c10d import FutureWork


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
