"""A key-value store on real processes: pushes count once, whoever is killed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.testing.processes import ProcessCluster

STEPS = 6
POLICIES = {"sync": rp.Sync(), "async": rp.Async(), "ssp": rp.BoundedStaleness(1)}


def counting(job: rp.Job, sync: Any, contributors: int, steps: int) -> tuple[list[float], float]:
    """Each push to `w` is contributor + 1; `b` is pushed half as often. SGD(lr=1) on the mean: an exact sum."""
    store = job.store(
        {"w": torch.zeros(70), "b": (3,)}, contributors=contributors, sync=sync, optimizer=rp.SGD(lr=1.0),
        shard_bytes=128,
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


@pytest.mark.parametrize("policy", POLICIES)
def test_each_push_counts_once(policy: str) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        values = cluster.run(counting, POLICIES[policy], 4, STEPS)
    assert values == [([-STEPS * 2.5], 1.0 - STEPS // 2)] * 2
