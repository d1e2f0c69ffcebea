"""A worker that gets lower replicas in mid-step does not wait for credits that only these replicas would free."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.beside import until
from support.gathering import Gathering, gathering, reference_hash

sys.path.insert(0, str(Path(__file__).parent))



def _credits_are_kept_back(cluster: Gathering) -> bool:
    reducer = cluster.servers[0]._reducer
    assert reducer is not None
    return any(early.owed is not None for early in list(reducer._tickets._early.values()))


@pytest.mark.some("1073741824-4")
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("presum_bytes", [0, 1 << 30])
def test_a_worker_whose_credits_are_kept_back_takes_over_what_was_to_free_them(window: int, presum_bytes: int) -> None:
    """One worker dies before it has sent replicas 0 and 1; the other one has sent what waits for them."""
    settings = {"network.hold_bytes": 0, "network.window": window, "network.presum_bytes": presum_bytes}
    with gathering(1, workers_start=2, workers_max=2) as cluster:

        def die(step: int, replica: int) -> None:
            if (step, replica) == (4, 0):
                until(lambda: _credits_are_kept_back(cluster))
                cluster.workers[0].job._link.close()  # as if the process were killed
                raise SystemExit

        doomed = {"worker0": die}
        workers = [cluster.add_worker(at=doomed.get(f"worker{n}", _nothing), **settings) for n in range(2)]
        assert workers[1].result() == reference_hash(**settings)
        assert {(4, 0), (4, 1)} <= set(workers[1].computed)


def _nothing(step: int, replica: int) -> None:
    """The other worker goes on."""
