"""Mutated frames against every role, before and after the proof, under every policy.

FRAMES=20000 in the environment (and `--timeout 0`) makes a long run of it, SEED=1 another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fuzz_campaign import AT_AN_AGGREGATOR, ATTACKS, OUTSIDE, WHOLE_JOBS, Campaign
from fuzz_decoders import Decoders
from fuzz_jobs import AGGREGATED, POLICIES

from rallypoint.net import handshake
from rallypoint.net.certificates import make_certificates
from rallypoint.net.frames import Kind
from rallypoint.server import member

SEED = int(os.environ.get("SEED", "20261122"))
FRAMES = int(os.environ.get("FRAMES", "150"))  # of each attack on each policy; strangers' connections cost the most
QUICK = [which for which in ATTACKS if which not in WHOLE_JOBS]
LONG, LONG_OF = "server after, its coordinator", ("sync", "async", "all-reduce")  # nearly half a minute each
IN_CI = {
    "sync": [which for which in WHOLE_JOBS if which != LONG],
    "all-reduce": ["worker after, its servers"], "ssp": ["server after, its servers"],
}  # fmt: skip


@pytest.fixture(scope="module")
def campaign_of() -> Callable[[str], Campaign]:
    """One campaign for each policy: its undisturbed job runs once."""

    @cache
    def campaign(policy: str) -> Campaign:
        found = Campaign(policy, SEED)
        found.record()
        return found

    return campaign


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of a view that does not exist is waited for, and the rest of a greeting: not for long."""
    monkeypatch.setattr(member, "VIEW_TIMEOUT_S", 0.5)
    monkeypatch.setattr(handshake, "GREETING_TIMEOUT_S", 2.0)


@pytest.mark.some("sync")
@pytest.mark.parametrize("policy", POLICIES)
def test_strangers_and_servers_that_lie_change_nothing(policy: str, campaign_of: Callable[[str], Campaign]) -> None:
    """Nobody fails or hangs, and a job whose bytes do not depend on timing ends with the undisturbed ones."""
    campaign = campaign_of(policy)
    campaign.attack(dict.fromkeys(QUICK, FRAMES))
    assert not campaign.faults
    assert all(campaign.thrown[which] >= FRAMES for which in QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_strangers_at_an_aggregator_change_nothing(tls: bool, tmp_path: Path) -> None:
    """Before the proof, as a worker near it that stands by, and elsewhere in its job. With TLS, also its handshake."""
    if tls:
        make_certificates(tmp_path)
    campaign = Campaign(AGGREGATED, SEED, tmp_path if tls else None)
    campaign.record()
    campaign.attack(dict.fromkeys((*OUTSIDE, *AT_AN_AGGREGATOR), FRAMES))
    assert not campaign.faults
    assert all(campaign.thrown[which] >= FRAMES for which in AT_AN_AGGREGATOR)


@pytest.mark.some("int8")
@pytest.mark.parametrize("policy", POLICIES)
def test_decoders_decode_or_refuse(policy: str, campaign_of: Callable[[str], Campaign]) -> None:
    decoders = Decoders(campaign_of(policy), SEED)
    decoders.attack(max(4000, 27 * FRAMES))
    assert not decoders.faults
    assert len(decoders.thrown) == len(Kind)


def _possessed() -> list[object]:
    """Every role under every policy (`LONG` under three); some always, the others in `make test-all`."""
    cases = [(policy, which) for policy in POLICIES for which in WHOLE_JOBS if which != LONG or policy in LONG_OF]
    return [pytest.param(*case, marks=() if case[1] in IN_CI.get(case[0], ()) else pytest.mark.slow) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "which"), _possessed())
def test_members_that_send_mutated_frames_too(policy: str, which: str, campaign_of: Callable[[str], Campaign]) -> None:
    """A man in the middle with the keys may change or end a job: but with a sentence, and no member fails."""
    campaign = campaign_of(policy)
    faults = len(campaign.faults)
    campaign.attack({which: max(40, FRAMES // 60)})
    assert not campaign.faults[faults:]
