"""DDP and FSDP as the planner sees them."""

from __future__ import annotations

import msgspec
import pytest

from rallypoint.core.plan.candidates import Ring, ddp_cost, fsdp_cost, ring_bytes
from rallypoint.core.plan.site import PAYLOAD, Rates, Workers
from rallypoint.core.plan.workload import Layer, Workload, transformer

RATE = 125e6
WORKERS = Workers(4, RATE)
RING = Ring(4, PAYLOAD * RATE, 0.0)
STILL = Rates(step=0.0)


def ring_seconds(nbytes: float, members: int, rate: float) -> float:
    """A ring all-reduce over links of one rate, both directions in use."""
    return ring_bytes(nbytes, members) / rate


def test_a_ring_moves_nearly_twice_k() -> None:
    """Servers move K: two workers gain nothing by them, many nearly half."""
    assert [ring_bytes(1.0, n) for n in (2, 4, 8)] == [1.0, 1.5, 1.75]


def test_with_nothing_to_compute_ddp_takes_what_its_ring_takes() -> None:
    """And that is what Gloo took (docs/performance.md): 1.258 s for K = 100 MB at 1 Gbit/s."""
    work = Workload(layers=(Layer(25_000_000),))
    cost = ddp_cost(work, WORKERS, RING, STILL)
    assert cost.seconds == pytest.approx(ring_seconds(work.nbytes, 4, PAYLOAD * RATE))
    assert cost.seconds == pytest.approx(1.258, rel=0.01)


def test_ddp_overlaps_with_the_backward_pass_but_for_what_its_last_layer_completes() -> None:
    """Computing takes ten times as long as the ring: the first layer's gradients, and a bucket that was not full."""
    work = Workload(layers=transformer(1e8, 40.0))
    cost = ddp_cost(work, WORKERS, RING, STILL)
    first = ring_seconds(4 * work.layers[0].words, 4, PAYLOAD * RATE)
    bucket = ring_seconds(25 << 20, 4, PAYLOAD * RATE)
    assert work.compute < cost.seconds < work.compute + first + bucket


def test_a_model_of_one_bucket_is_reduced_when_the_backward_pass_has_ended() -> None:
    work = Workload(layers=transformer(2.5e6, 1.0))  # 10 MB: 1 MiB, then the rest
    cost = ddp_cost(work, WORKERS, RING, STILL)
    assert cost.seconds == pytest.approx(1.0 + ring_seconds(work.nbytes - (1 << 20), 4, PAYLOAD * RATE), rel=0.01)


def test_the_optimizer_steps_after_the_last_bucket_on_every_worker_under_ddp_and_on_a_part_under_fsdp() -> None:
    work, speeds = Workload(layers=transformer(1e8, 1.0)), Rates(step=1e-9)
    ddp, fsdp = (
        cost(work, WORKERS, RING, speeds).seconds - cost(work, WORKERS, RING, STILL).seconds
        for cost in (ddp_cost, fsdp_cost)
    )
    assert ddp == pytest.approx(0.4)
    assert fsdp == pytest.approx(0.1)


def test_fsdp_moves_three_ks_and_hides_what_it_can() -> None:
    """Rajbhandari et al., 2020: gathered twice, gradients scattered, 3(n-1)/n K."""
    work = Workload(layers=transformer(1e8, 0.0))
    cost = fsdp_cost(work, WORKERS, RING, STILL)
    assert cost.seconds == pytest.approx(3 * 3 / 4 * work.nbytes / (PAYLOAD * RATE), rel=0.02)
    hidden = fsdp_cost(msgspec.structs.replace(work, layers=transformer(1e8, 100.0)), WORKERS, RING, STILL)
    assert hidden.seconds < 102.0


def test_replicas_are_added_up_before_anything_is_sent() -> None:
    work = Workload(layers=transformer(1e8, 1.0))
    one = ddp_cost(work, WORKERS, RING, STILL).seconds
    three = ddp_cost(work, msgspec.structs.replace(WORKERS, replicas=3), RING, STILL).seconds
    assert three == pytest.approx(one + 2.0)


def test_inside_one_host_no_link_is_used() -> None:
    assert Ring.of(Workers(8, RATE, per_host=8), 0.0).rate > 100 * RATE
    assert Ring.of(Workers(16, RATE, per_host=8), 0.0).rate == PAYLOAD * RATE
    assert Ring.of(Workers(1, RATE), 0.0).seconds(1e9) == 0.0
