"""Tables end to end, on real processes: what the servers keep is what plain PyTorch keeps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rallypoint as rp
from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import table_jobs.py by name

from table_jobs import reference, train

SGD = rp.SGD(lr=rp.cosine(0.3, warmup=3))
LAZY_ADAM = rp.AdamW(lr=rp.cosine(0.02, warmup=3), weight_decay=0.0)


@pytest.mark.parametrize("optimizer", [SGD, LAZY_ADAM], ids=["sgd", "lazy adam"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 3)])
def test_a_table_on_the_servers_is_trained_as_by_plain_pytorch(optimizer: Any, workers: int, servers: int) -> None:
    settings = {"optimizer": optimizer}
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        results = cluster.run(train, settings)
    _equal(results, reference(settings), exactly=True)


@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"clip": 0.05}, {"clip": 0.05, "nonfinite": "skip"}], ids=str)
def test_accumulation_and_clipping_count_the_tables_too(settings: dict[str, Any]) -> None:
    settings = {"optimizer": LAZY_ADAM, **settings}
    with ProcessCluster(workers=2, servers=2) as cluster:
        results = cluster.run(train, settings)
    _equal(results, reference(settings), exactly="clip" not in settings)


def _equal(results: list[dict[str, Any]], expected: dict[str, Any], *, exactly: bool) -> None:
    """The lead's state, and the losses that each worker saw, are the reference's."""
    state = next(result["state"] for result in results if result["state"])
    assert state.keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        if exactly:
            assert np.array_equal(state[name], values), name
        else:
            np.testing.assert_allclose(state[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    losses = {place: loss for result in results for place, loss in result["losses"].items()}
    for place, loss in expected["losses"].items():
        assert losses[place] == (loss if exactly else pytest.approx(loss, rel=1e-4)), place
