"""The only server is lost where workers have the state: they bring it to the next one, in the midst of whatever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.testing.reference import train_reference
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.loop.micro import BufferVersions
from rallypoint.worker.tensors import weights_hash
from support.rewinds import SETTINGS, Cluster, Once, build, cluster, loss_of, train
from support.training import finish

__all__ = ["cluster"]  # the fixture

ALL_REDUCE = {**SETTINGS, "sync": rp.AllReduce()}


@pytest.fixture(scope="module")
def undisturbed() -> str:
    model, data = build()
    train_reference(model, data, loss_of, resolve(ALL_REDUCE))
    return weights_hash(model)


def _train(cluster: Cluster, disturb: Once | None = None) -> tuple[str, list[int]]:
    """The weights' hash, and the steps that were yielded."""
    model, data = build()
    yielded = train(cluster.job, model, data, disturb or Once((0, 0, 0), lambda: None), **ALL_REDUCE)
    return weights_hash(model), [step for (step, _, _), _ in yielded]


@pytest.mark.parametrize("at", [(1, 0, 0), (3, 1, 0), (5, 1, 1)], ids=["early", "middle", "last"])
def test_only_the_step_in_progress_is_computed_again(cluster: Cluster, undisturbed: str, at: Any) -> None:
    hash, steps = _train(cluster, Once(at, cluster.lose_the_server))
    assert hash == undisturbed
    assert steps == sorted(steps), "nothing before it is"


def test_one_loss_after_the_other_changes_no_byte(cluster: Cluster, undisturbed: str) -> None:
    disturb = Once((1, 1, 0), cluster.lose_the_server, (2, 0, 0), (4, 0, 0))
    assert _train(cluster, disturb)[0] == undisturbed


def _before(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: Callable[[], None], version: int
) -> list[Any]:
    """Call it once, right before `name` is called with the model at that version; what `name` returned then."""
    original, called, returned = getattr(owner, name), list[int](), list[Any]()

    def disturbed(self: Any, *args: Any) -> Any:
        exchange = self if isinstance(self, Exchange) else self._exchange
        if exchange.holds != version or called:
            return original(self, *args)
        called.append(version)
        call()
        returned.append(original(self, *args))
        return returned[-1]

    monkeypatch.setattr(owner, name, disturbed)
    return returned


def test_a_version_that_becomes_stale_right_before_it_is_installed_is_let_go(
    cluster: Cluster, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lands in its place could be half of another."""
    returned = _before(monkeypatch, Exchange, "begin_install", cluster.lose_the_server, 3)
    assert _train(cluster)[0] == undisturbed
    assert returned == [None]


def test_a_version_that_becomes_stale_while_it_is_installed_is_installed_all_the_same(
    cluster: Cluster, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = _before(monkeypatch, Exchange, "take_states", cluster.lose_the_server, 3)
    hash, steps = _train(cluster)
    assert hash == undisturbed
    assert returned
    assert steps == sorted(steps)


def test_a_server_lost_while_the_state_is_uploaded_to_it_gets_it_again(
    cluster: Cluster, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Once((3, 1, 0), cluster.lose_the_server)
    returned = _before(monkeypatch, BufferVersions, "initialise", cluster.lose_the_server, 3)
    assert _train(cluster, first)[0] == undisturbed
    assert returned


def test_a_gradient_of_nothing_does_not_step(cluster: Cluster) -> None:
    """A model without a batch norm, so that its state is the parameters: skipped steps leave it alone."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    before = weights_hash(model)
    _, data = build()
    with cluster.job as job:
        run = job.train(model, data, **{**ALL_REDUCE, "nonfinite": "skip"})
        finish(run, model, lambda model, batch: loss_of(model, batch) * float("nan"))
    assert weights_hash(model) == before
