"""The intra-op threads of `python train.py` alone: the job's own while it lasts, said when they are fewer."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

import rallypoint as rp

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 24).view(8, 3))


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def train_alone(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many threads the loop has."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    model = torch.nn.Linear(3, 1)
    with rp.join() as job:
        for micro in job.train(model, DATA, batch=4, steps=1, optimizer=rp.SGD(lr=0.1)):
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
        return torch.get_num_threads()


def test_a_job_alone_says_that_it_has_fewer_threads_and_gives_them_back(
    three_threads: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert train_alone(monkeypatch) == 1
    assert torch.get_num_threads() == 3
    shown = " ".join(capfd.readouterr().out.split())
    assert shown.count("computing with 1 intra-op thread (torch had 3 here): OMP_NUM_THREADS=3 gives") == 1, shown


def test_a_job_alone_with_as_many_as_before_says_nothing_of_fewer(
    three_threads: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert train_alone(monkeypatch) == 3
    assert torch.get_num_threads() == 3
    assert "computing with" not in capfd.readouterr().out
