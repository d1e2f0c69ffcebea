"""Steps across data centres: what a site's link carries, and what hides it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from rallypoint.core.plan.workload import Workload, transformer

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))  # its modules import one another by name

from scale_cluster import EXCHANGES, ONE_SITE, Sites, sites_seconds, uplink_bytes

MODEL = Workload(layers=transformer(1e9, 2.0))
INT8 = msgspec.structs.replace(MODEL, up=1.0, down=1.0)
FAR = Sites(count=8, rate=1e9 / 8, delay=0.05)


def _local(workload: Workload, steps: int) -> Workload:
    return msgspec.structs.replace(workload, steps=steps)


def _streaming(fragments: int) -> Sites:
    return msgspec.structs.replace(FAR, fragments=fragments)


def test_a_site_sends_what_docs_sites_md_says_of_three_sites_with_two_copies() -> None:
    three = Sites(count=3, rate=1e9, replication=2)
    assert uplink_bytes(MODEL, three) == pytest.approx(5 / 3 * MODEL.nbytes)


def test_what_an_aggregator_of_a_site_adds_up_is_sent_once_and_each_worker_else_sends_its_own() -> None:
    assert uplink_bytes(MODEL, msgspec.structs.replace(FAR, senders=5)) == pytest.approx(5 * uplink_bytes(MODEL, FAR))


def test_within_one_site_nothing_is_added() -> None:
    assert sites_seconds(MODEL, ONE_SITE, 2.5) == 2.5


def test_a_synchronous_step_is_bound_by_the_link_and_waits_for_its_delays() -> None:
    least = uplink_bytes(MODEL, FAR) / FAR.rate
    assert least + EXCHANGES * 0.05 < sites_seconds(MODEL, FAR, 2.0) < 1.1 * least
    near = 1000.0  # computing takes longer than what the link carries
    assert sites_seconds(MODEL, FAR, near) == pytest.approx(near + EXCHANGES * 0.05)


def test_a_round_of_local_steps_waits_for_its_exchange_and_fragments_hide_it() -> None:
    whole = sites_seconds(_local(INT8, 16), FAR, 2.0)
    assert whole == pytest.approx(2.0 + (sites_seconds(INT8, FAR, 0.0)) / 16)
    assert sites_seconds(_local(INT8, 16), _streaming(4), 2.0) == 2.0


def test_fragments_cannot_hide_more_than_the_time_between_two_of_them() -> None:
    assert sites_seconds(_local(MODEL, 8), _streaming(4), 2.0) > 2.0
    rare, often = (sites_seconds(_local(MODEL, steps), _streaming(4), 0.0) for steps in (64, 8))
    assert rare == pytest.approx(often / 8)
