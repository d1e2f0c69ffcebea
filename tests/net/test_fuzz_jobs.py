"""What the fuzzer takes for granted of its jobs: undisturbed, each has the same bytes every time."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from fuzz_jobs import POLICIES, running


@pytest.mark.some("sync")
@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.same])
def test_a_job_has_the_same_bytes_whatever_other_threads_draw(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's generator is the process's, and `job.train` of the other worker seeds it: to look at its data set."""
    found, seeds, reset = [], count(1), torch.nn.Linear.reset_parameters

    def disturbed(layer: torch.nn.Linear) -> None:
        torch.manual_seed(next(seeds))  # as another thread may, between any two lines of this one
        reset(layer)

    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", disturbed)
    for _ in range(2):
        with running(POLICIES[policy]) as cluster:
            assert cluster.finish()
        assert not cluster.errors
        found.append(cluster.hashes)
    assert found[0] == found[1]
