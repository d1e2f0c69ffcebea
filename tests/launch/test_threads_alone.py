"""What computes with which threads, and when, in `python train.py` alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import rallypoint as rp
from rallypoint.coordinator.service import JoinInfo
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.observe.usage import usable_cores
from rallypoint.observe.waits import SharedCores
from rallypoint.optim import ShardOptimizer

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 24).view(8, 3))


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def train_alone(monkeypatch: pytest.MonkeyPatch) -> tuple[int, bool]:
    """Return how many threads the loop has, and whether the server waits for the cores."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    model = torch.nn.Linear(3, 1)
    taken = threading.Event()
    monkeypatch.setattr(SharedCores, "wait", lambda cores: None if cores._free.is_set() else taken.set())
    with rp.join() as job:
        settings = {"optimizer": rp.SGD(lr=0.1), "average": rp.EMA(decay=0.9)}  # (its server gets gradients meanwhile)
        for micro in job.train(model, DATA, batch=4, steps=1, **settings):
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
                taken.wait(2.0)
        return torch.get_num_threads(), taken.is_set()


def test_a_job_alone_computes_with_torchs_threads_and_says_what_that_means(
    three_threads: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train_alone(monkeypatch)[0] == 3
    assert torch.get_num_threads() == 3
    shown = " ".join(capfd.readouterr().out.split())
    assert "3 intra-op threads: the weights differ in the last digits" in shown, shown


@pytest.mark.parametrize("spared", [False, True])
def test_the_server_waits_for_the_cores_only_where_the_script_takes_most_cores(
    monkeypatch: pytest.MonkeyPatch, spared: bool
) -> None:
    monkeypatch.setattr("rallypoint.launch.embedded.usable_cores", lambda: 2 if spared else 1)
    assert train_alone(monkeypatch) == (1, not spared)
    assert usable_cores() >= 1


def test_the_servers_thread_has_the_jobs_threads_whatever_another_thread_has_set_for_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples are loaded with one thread: what began to compute meanwhile kept that number, and added up otherwise."""
    found: list[int] = []
    apply = ShardOptimizer.apply
    monkeypatch.setattr(
        ShardOptimizer, "apply", lambda *args, **how: (found.append(torch.get_num_threads()), apply(*args, **how))
    )
    model = torch.nn.Linear(3, 1)
    with EmbeddedJob(servers=2, about=JoinInfo(threads=3)) as job:
        run = job.train(model, DATA, batch=4, steps=2, optimizer=rp.SGD(lr=0.1))
        torch.set_num_threads(1)
        for micro in run:
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
    assert found
    assert set(found) == {3}


def begin_in_vain(job: EmbeddedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with job:
        run = job.train(torch.nn.Linear(3, 1), DATA, batch=4, steps=2, optimizer=rp.SGD(lr=0.1))
        monkeypatch.setattr("rallypoint.worker.loop.run.seed_everything", lambda seed: 1 // 0)
        for micro in run:
            with micro:
                raise AssertionError("it has not begun")


def test_an_error_before_a_micro_batch_has_begun_leaves_the_cores_to_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rallypoint.launch.embedded.usable_cores", lambda: 1)
    job = EmbeddedJob()
    with pytest.raises(ZeroDivisionError):
        begin_in_vain(job, monkeypatch)
    assert not job._shared.give(), "the server would wait for each event that is left"
