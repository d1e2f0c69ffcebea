"""A job that ends with other bytes is told by where its frames first differ from the undisturbed job's."""

from __future__ import annotations

import fuzz_jobs
import pytest
import torch
from fuzz_campaign import Campaign
from fuzz_jobs import Net


@pytest.mark.slow
def test_a_job_that_begins_with_other_weights_is_a_fault_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = Campaign("int8", seed=1)
    campaign.record()
    other = Net(table=False)
    with torch.no_grad():
        other.last.bias.add_(1.0)
    monkeypatch.setitem(fuzz_jobs._NETS, False, other)
    campaign.attack({"server before": 1})
    assert len(campaign.faults) == 1
    assert "int8, server before: the job has other bytes on worker0 and worker1: " in campaign.faults[0]
    assert "; first the uploaded weights: shard " in campaign.faults[0]
    assert "; version 16, the last: shard 0 is " in campaign.faults[0]
    assert campaign.faults[0].endswith(" views, 0 members came back as new ones")
