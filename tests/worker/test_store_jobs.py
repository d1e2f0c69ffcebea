"""A key-value store on real processes: pushes count once, whoever is killed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.errors import UsageError
from rallypoint.testing.processes import ProcessCluster

STEPS = 6
POLICIES = {"sync": rp.Sync(), "async": rp.Async(), "ssp": rp.BoundedStaleness(1)}


def counting(job: rp.Job, sync: Any, contributors: int, steps: int) -> tuple[list[float], float]:
    """Each push to `w` is contributor + 1; `b` is pushed half as often. SGD(lr=1) on the mean: an exact sum."""
    store = job.store(
        {"w": torch.zeros(70), "b": (3,)}, contributors=contributors, sync=sync, optimizer=rp.SGD(lr=1.0),
        network=rp.Network(shard_bytes=128),
    )  # fmt: skip
    store.init("b", torch.ones(3))
    for step, contributor in store.due("w", steps):
        store.push("w", torch.full((70,), float(contributor + 1)), step=step, contributor=contributor)
        if step % 2:
            store.push("b", torch.ones(3), step=step // 2, contributor=contributor)
    for _ in store.due("b", steps // 2):
        raise AssertionError("somebody has not pushed")
    w, b = store.pull("w", step=0), store.pull("b", step=0)
    assert (w == w[0]).all()
    return w[:1].tolist(), float(b[0])


@pytest.mark.some("sync")
@pytest.mark.parametrize("policy", POLICIES)
def test_each_push_counts_once(policy: str) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        values = cluster.run(counting, POLICIES[policy], 4, STEPS)
    assert values == [([-STEPS * 2.5], 1.0 - STEPS // 2)] * 2


def one_round(job: rp.Job) -> list[float]:
    store = job.store({"w": torch.ones(3)}, contributors=1, optimizer=rp.SGD(lr=1.0))
    for step, contributor in store.due("w", 1):
        store.push("w", torch.full((3,), 5.0), step=step, contributor=contributor).result()
    return [float(store.pull("w", step=step)[0]) for step in (0, 1, 0)]


def test_the_first_values_are_read_again_after_the_first_round() -> None:
    """Whoever makes a dead worker's pushes of step 0 has one key that is a round further: docs/store.md."""
    with ProcessCluster(workers=1, servers=1) as cluster:
        assert cluster.run(one_round) == [[1.0, -4.0, 1.0]]


def alternating(job: rp.Job, steps: int) -> tuple[float, float]:
    """Two models, each with an optimizer of its own, that are pushed alternately: docs/store.md."""
    optimizers = {"discriminator": rp.SGD(lr=1.0), "generator": rp.SGD(lr=0.5)}
    store = job.store(
        {"discriminator": torch.zeros(4), "generator": torch.ones(4)}, contributors=2, steps=steps, optimizer=optimizers
    )
    with pytest.raises(UsageError, match=r"store\.due of no key"):
        next(store.due([], steps))
    for step, contributor in store.due(["discriminator", "generator"], steps):
        d, g = store.pull("discriminator", step=step), store.pull("generator", step=step)
        store.push("discriminator", d - g, step=step, contributor=contributor)
        store.push("generator", d + g, step=step, contributor=contributor)
    return float(store.pull("discriminator", step=steps)[0]), float(store.pull("generator", step=steps)[0])


def test_two_models_pushed_alternately_end_as_if_one_process_had_stepped_them() -> None:
    with ProcessCluster(workers=2, servers=1) as cluster:
        values = cluster.run(alternating, STEPS)
    d, g = 0.0, 1.0
    for _ in range(STEPS):
        d, g = d - (d - g), g - 0.5 * (d + g)
    assert values == [(d, g)] * 2


def futures(job: rp.Job) -> None:
    store = job.store({"w": (2, 3)}, contributors=2)
    waiting = store.pull_later("w")
    assert not waiting.done(), "nobody has given a first value"
    store.init("w", torch.ones(2, 3))
    store.init("w", torch.zeros(2, 3))  # the first one wins
    out = torch.empty(2, 3)
    assert waiting.result(out) is out
    assert (out == 1).all()
    first = store.push("w", torch.ones(2, 3), contributor=0)
    assert not first.done(), "its round lacks contributor 1"
    store.push("w", torch.ones(2, 3), contributor=1).result()
    assert first.done()
    assert store.step("w", 0) == 1
    store.push("w", torch.full((2, 3), 100.0), step=0, contributor=0).result()  # it counts already
    assert store.step("w", 0) == 1
    with pytest.raises(UsageError, match="contributor 0 has pushed only 1"):
        store.push("w", torch.ones(2, 3), step=5, contributor=0)
    with pytest.raises(UsageError, match="no key 'v'"):
        store.pull("v")
    with pytest.raises(UsageError, match=r"shape \[3\] for key w"):
        store.push("w", torch.ones(3), contributor=0)


def test_futures_are_done_when_a_push_counts_and_mistakes_are_told() -> None:
    with ProcessCluster(workers=1, servers=1) as cluster:
        cluster.run(futures)
