"""What the planner recommends: also that servers would not pay."""

from __future__ import annotations

import msgspec
import pytest

from rallypoint.core.plan.candidates import (
    Judgement,
    Machines,
    PlannedCodec,
    Ring,
    candidates_for,
    ddp_cost,
    fsdp_cost,
    ring_bytes,
)
from rallypoint.core.plan.site import PAYLOAD, Rates, Workers
from rallypoint.core.plan.workload import Layer, Workload, transformer

GBIT = 1e9 / 8
MACHINES = Machines(gpus=8, rate=GBIT / 8)
SLOW_LINKS = Workload(layers=transformer(1.25e7, 1.0))  # K/B is 3.2 s


def test_with_as_many_server_links_as_workers_and_little_to_compute_servers_win() -> None:
    verdict = Judgement.of(candidates_for(SLOW_LINKS, MACHINES))
    assert verdict.ours
    assert verdict.best.servers in (8, 10)
    assert "times as fast as DDP" in verdict.why


def test_few_servers_do_not_pay() -> None:
    verdict = Judgement.of(candidates_for(SLOW_LINKS, msgspec.structs.replace(MACHINES, servers=(2,))))
    assert not verdict.ours
    assert "servers would not pay" in verdict.why


def test_servers_do_not_pay_inside_one_host_or_where_computing_hides_the_ring() -> None:
    one_host = msgspec.structs.replace(MACHINES, per_host=8)
    assert not Judgement.of(candidates_for(SLOW_LINKS, one_host)).ours
    slow = Judgement.of(candidates_for(Workload(layers=transformer(1.25e7, 300.0)), MACHINES))
    assert not slow.ours
    assert "computing hides all but" in slow.why


def test_failures_make_a_job_that_goes_back_nowhere_worth_it() -> None:
    """Computing hides everything; a machine fails twice a day."""
    work, gpus = Workload(layers=transformer(1.25e7, 60.0), shard_bytes=64 << 10), 64
    calm = msgspec.structs.replace(MACHINES, gpus=gpus, servers=(64,))
    rough = msgspec.structs.replace(calm, mtbf=43200.0)
    assert not Judgement.of(candidates_for(work, calm)).ours
    verdict = Judgement.of(candidates_for(work, rough))
    assert verdict.ours
    assert verdict.best.replication == 2
    assert verdict.other.goodput < 0.9 < verdict.best.goodput


def test_what_does_not_fit_is_not_recommended() -> None:
    """1e9 parameters: DDP needs 16 GB a device, a worker with servers 4 and a layer's gradients."""
    work = Workload(layers=transformer(1e9, 1.0), shard_bytes=8 << 20)
    small = msgspec.structs.replace(MACHINES, memory=6e9, servers=(8,))
    found = candidates_for(work, small)
    fits = {one.name: one.fits for one in found}
    assert fits["DDP"] is False
    assert fits["FSDP"] is True
    assert all(one.fits for one in found if one.ours)
    nothing = Judgement.of(candidates_for(work, msgspec.structs.replace(small, memory=1e9)))
    assert nothing.why.startswith("nothing fits")


def test_a_codec_that_a_collective_could_use_too_is_granted_to_it() -> None:
    codecs = [PlannedCodec("bf16", 2.0, 2.0, True), PlannedCodec("int8", 1.0, 1.0, False)]
    found = candidates_for(SLOW_LINKS, MACHINES, codecs)
    assert {one.codec for one in found if one.name == "DDP"} == {"raw", "bf16"}
    assert {one.codec for one in found if one.ours} == {"raw", "bf16", "int8"}
    ddp = {one.codec: one.step.seconds for one in found if one.name == "DDP"}
    assert ddp["bf16"] < 0.7 * ddp["raw"]


def test_several_devices_of_a_host_are_ranks_of_a_worker_or_have_an_aggregator() -> None:
    names = {one.name for one in candidates_for(SLOW_LINKS, msgspec.structs.replace(MACHINES, gpus=32, per_host=8))}
    assert {
        "4 servers (ranks of a host are one worker)", "4 servers and an aggregator a host",
        "4 servers (ranks of a host are one worker) on the workers' hosts",
    } <= names  # fmt: skip


def test_failures_that_let_no_step_end_are_said() -> None:
    lost = msgspec.structs.replace(MACHINES, mtbf=1e-3)
    alone = Judgement.of(candidates_for(SLOW_LINKS, msgspec.structs.replace(lost, gpus=1, servers=(1,))))
    assert "no layout gets on" in alone.why
    assert "more than 100 times" in Judgement.of(candidates_for(SLOW_LINKS, lost)).why  # with backups it does


@pytest.mark.parametrize("gpus", [1, 2, 64])
def test_any_number_of_devices_gets_a_verdict(gpus: int) -> None:
    verdict = Judgement.of(candidates_for(SLOW_LINKS, msgspec.structs.replace(MACHINES, gpus=gpus)))
    assert verdict.why
    if gpus == 1:
        assert not verdict.ours  # nobody to add up with


# ---- DDP and FSDP as the planner sees them ----


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
