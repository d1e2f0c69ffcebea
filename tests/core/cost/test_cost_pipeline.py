"""A step through the servers, against closed forms at the ends and against what was measured (docs/performance.md)."""

from __future__ import annotations

import msgspec
import pytest

from rallypoint.core.plan import site as sites
from rallypoint.core.plan.pipeline import bundles_of, split, step_cost
from rallypoint.core.plan.site import ACKNOWLEDGED, PACED, PAYLOAD, Servers, Site, Wiring, Workers, paced, paced_by_port
from rallypoint.core.plan.workload import Layer, Workload, transformer

MBIT = 1e6 / 8
RACK = 100 * MBIT  # a rack's uplink
NETLAB_QUEUE = 512 * 1024.0  # what `tests/support/netlab.py` lets wait at a port
IDEAL = {"losses": None, "speeds": sites.Rates(add=0.0, apply=0.0, own=0.0, latency=0.0)}


def site(workers: int, servers: int, mbit: float, **more: object) -> Site:
    rate = mbit * MBIT
    return Site(workers=(Workers(workers, rate),), servers=(Servers(servers, rate),), **more)  # type: ignore[arg-type]


def gpt(mbit: float, ratio: float, *, kib: int = 1024, clip: bool = False, width: int = 512) -> Workload:
    """The GPT of `benchmarks/train.py`, whose blocks sleep for `ratio` times K/B."""
    block = 8
    sizes = [(256 + block) * width, *([4 * width**2 + 6 * width, 8 * width**2 + 7 * width] * 6)]
    each = ratio * 4 * sum(sizes) / (mbit * MBIT) / 54  # a third of a block's forward pass
    slept = [0.0, *([each, 2 * each] * 6)]
    layers = tuple(Layer(size, forward, 2 * forward) for size, forward in zip(sizes, slept, strict=True))
    return Workload(layers=layers, shard_bytes=kib << 10, clip=clip)


# ---- the ends, where a closed form says what must come out ----


@pytest.mark.parametrize(("workers", "servers"), [(4, 4), (4, 2), (8, 8), (2, 4), (16, 4)])
def test_with_tiny_shards_and_nothing_to_compute_a_step_takes_what_the_busiest_link_takes(
    workers: int, servers: int
) -> None:  # fmt: skip
    work = Workload(layers=(Layer(25_000_000),), shard_bytes=64 << 10)
    got = step_cost(work, site(workers, servers, 1000.0, **IDEAL)).seconds
    rate = PAYLOAD / ACKNOWLEDGED * 1000 * MBIT  # a worker's link carries K each way, a server's m K / n
    least = work.nbytes / rate * max(1.0, workers / servers)
    assert least < got < 1.06 * least


def test_where_links_are_fast_a_step_takes_what_computing_takes() -> None:
    work = Workload(layers=transformer(1e7, 2.0))
    cost = step_cost(work, site(4, 4, 1e6))
    assert cost.seconds == pytest.approx(2.0, rel=0.01)
    assert cost.waited < 0.02


def test_the_last_shards_come_down_alone() -> None:
    """Shards are the grain: each of S links carries the last of its shards down when all have gone up."""
    small, large = (
        step_cost(Workload(layers=(Layer(25_000_000),), shard_bytes=kib << 10), site(8, 8, 200.0, **IDEAL)).seconds
        for kib in (128, 1024)
    )
    assert large - small == pytest.approx(8 * (896 << 10) / (PAYLOAD / ACKNOWLEDGED * 200 * MBIT), rel=0.2)


def test_the_first_block_travels_while_nothing_is_computed() -> None:
    """All parameters in the first layer: no overlap at all, each way costs K/B of its own in small shards."""
    rate = PAYLOAD / ACKNOWLEDGED * 1000 * MBIT
    layers = (Layer(20_000_000, 0.1, 0.2), Layer(0, 0.4, 0.8))
    first = step_cost(Workload(layers=layers, shard_bytes=64 << 10), site(4, 4, 1000.0, **IDEAL)).seconds
    last = step_cost(Workload(layers=layers[::-1], shard_bytes=64 << 10), site(4, 4, 1000.0, **IDEAL)).seconds
    assert first == pytest.approx(1.5 + 80e6 / rate, rel=0.05)
    assert last < 1.7  # the way is hidden behind the other layer


def test_the_smallest_part_of_a_step_is_never_below_its_limits() -> None:
    for ratio in (0.2, 0.5, 1.0, 2.0, 4.0):
        work = gpt(500, ratio)
        cost = step_cost(work, site(4, 4, 500.0))
        assert cost.seconds > max(work.compute, work.nbytes / (500 * MBIT))
        assert cost.waited == pytest.approx(cost.seconds - work.compute)


def test_replication_costs_what_its_bytes_cost() -> None:
    work = Workload(layers=(Layer(25_000_000),), shard_bytes=64 << 10)
    plain = step_cost(work, site(4, 4, 1000.0, **IDEAL))
    twice = step_cost(work, site(4, 4, 1000.0, replication=2, **IDEAL))
    assert twice.seconds / plain.seconds == pytest.approx(1.25, abs=0.07)


def test_servers_on_the_workers_hosts_cost_what_a_ring_costs() -> None:
    work = Workload(layers=(Layer(25_000_000),), shard_bytes=64 << 10)
    cost = step_cost(work, site(4, 4, 1000.0, beside=True, **IDEAL)).seconds
    assert cost == pytest.approx(1.5 * work.nbytes / (PAYLOAD / ACKNOWLEDGED * 1000 * MBIT), rel=0.08)


def test_an_aggregator_carries_k_over_a_narrow_uplink_where_workers_carry_one_each() -> None:
    """benchmarks/racks.py: two racks of 4, 100 Mbit/s uplinks, 4 servers outside."""
    work = Workload(layers=(Layer(2_500_000),), shard_bytes=256 << 10)
    flat = site(8, 4, 100.0, rack=4, uplink=100 * MBIT, **IDEAL)
    with_them = msgspec.structs.replace(flat, aggregators=True, aggregator_rate=400 * MBIT)
    ideal = work.nbytes / (PAYLOAD / ACKNOWLEDGED * 100 * MBIT)
    assert step_cost(work, flat).seconds == pytest.approx(4 * ideal, rel=0.15)
    assert step_cost(work, with_them).seconds < 1.75 * ideal


@pytest.mark.parametrize(("workers", "rack", "in_rack"), [
    ([Workers(8, RACK)], 4, 4), ([Workers(4, RACK)], 8, 4), ([Workers(16, RACK)], 8, 8), ([Workers(12, RACK)], 8, 8),
    ([Workers(6, RACK), Workers(2, RACK, slowness=3.0)], 4, 4),  # two groups: every rack has its part of each
])  # fmt: skip
def test_a_rack_has_one_uplink(workers: list[Workers], rack: int, in_rack: int) -> None:
    """A rack sends what its own workers send, K each."""
    work = Workload(layers=(Layer(2_500_000),), shard_bytes=64 << 10)
    servers = (Servers(sum(group.count for group in workers), RACK),)
    there = Site(workers=tuple(workers), servers=servers, rack=rack, uplink=RACK, **IDEAL)  # type: ignore[arg-type]
    ideal = work.nbytes / (PAYLOAD / ACKNOWLEDGED * RACK)
    assert step_cost(work, there).seconds == pytest.approx(in_rack * ideal, rel=0.15)


def test_each_of_three_racks_has_one_aggregator() -> None:
    work = Workload(layers=(Layer(2_500_000),), shard_bytes=64 << 10)
    there = site(12, 12, 100.0, rack=4, uplink=100 * MBIT, aggregators=True, aggregator_rate=400 * MBIT, **IDEAL)
    ideal = work.nbytes / (PAYLOAD / ACKNOWLEDGED * 100 * MBIT)
    assert step_cost(work, there).seconds < 1.5 * ideal


def test_a_host_of_several_workers_has_one_link() -> None:
    work = Workload(layers=(Layer(25_000_000),), shard_bytes=64 << 10)
    rate = 1000 * MBIT
    shared = Site(workers=(Workers(8, rate, per_host=4),), servers=(Servers(8, rate),), **IDEAL)  # type: ignore[arg-type]
    assert step_cost(work, shared).seconds == pytest.approx(4 * work.nbytes / (PAYLOAD / ACKNOWLEDGED * rate), rel=0.06)
    assert step_cost(work, msgspec.structs.replace(shared, aggregators=True)).seconds < 0.4 * (
        step_cost(work, shared).seconds
    )


def test_clip_lets_nothing_come_down_while_gradients_go_up() -> None:
    """The forward pass still overlaps with the way down, the backward with the way up."""
    free, clipped = (step_cost(gpt(500, 0.1, clip=clip), site(4, 4, 500.0)).seconds for clip in (False, True))
    assert clipped > 1.3 * free


def test_half_the_bytes_take_half_as_long_where_links_are_all_there_is() -> None:
    work = Workload(layers=(Layer(25_000_000),), shard_bytes=64 << 10)
    half = msgspec.structs.replace(work, up=2.0, down=2.0)
    there = site(4, 4, 1000.0, **IDEAL)
    assert step_cost(half, there).seconds == pytest.approx(step_cost(work, there).seconds / 2, rel=0.03)


def test_local_steps_send_once_a_round() -> None:
    work = Workload(layers=transformer(2.5e7, 0.1), shard_bytes=256 << 10)
    alone = step_cost(work, site(4, 4, 1000.0)).seconds
    tenth = step_cost(msgspec.structs.replace(work, steps=10), site(4, 4, 1000.0)).seconds
    assert 0.1 < tenth < 0.1 + 1.5 * (alone / 10) + 0.1
    assert tenth < 0.4 * alone


def test_everybody_waits_for_a_slow_worker() -> None:
    work = Workload(layers=transformer(1e6, 1.0))
    rate = 1000 * MBIT
    mixed = Site(workers=(Workers(3, rate), Workers(1, rate, slowness=3.0)), servers=(Servers(4, rate),))
    assert step_cost(work, mixed).seconds == pytest.approx(3.0, rel=0.02)


def test_a_server_with_half_the_link_holds_everybody_up_as_shards_are_placed_evenly() -> None:
    work = Workload(layers=(Layer(25_000_000),), shard_bytes=64 << 10)
    rate = 1000 * MBIT
    lame = Site(
        workers=(Workers(4, rate),), servers=(Servers(3, rate), Servers(1, rate / 2)), **IDEAL,  # type: ignore[arg-type]
    )  # fmt: skip
    even = step_cost(work, site(4, 4, 1000.0, **IDEAL)).seconds
    assert step_cost(work, lame).seconds == pytest.approx(2 * even, rel=0.06)


# ---- bundles ----


@pytest.mark.parametrize("servers", [1, 3, 4, 7, 64])
def test_bundles_hold_every_word_once_and_are_ready_with_their_lowest_layer(servers: int) -> None:
    work = Workload(layers=transformer(3e7, 1.0))
    made = bundles_of(work, split(work, site(4, servers, 1000.0)).servers)
    held = sum(bundle.words * bundle.count for bundle in made)
    assert work.words <= held < work.words + sum(bundle.count for bundle in made)
    assert {layer for bundle in made for layer in bundle.layers} == set(range(len(work.layers)))
    assert all(bundle.ready == min(bundle.layers) for bundle in made)
    assert [bundle.ready for bundle in made] == sorted((bundle.ready for bundle in made), reverse=True)


def test_a_large_model_is_moved_in_few_bundles_and_costs_the_same() -> None:
    work = Workload(layers=transformer(7e9, 10.0))
    there = split(work, site(64, 64, 25_000.0))
    assert len(bundles_of(work, there.servers)) < 1300
    cost = step_cost(work, site(64, 64, 25_000.0))
    assert work.nbytes / (25_000 * MBIT) < cost.seconds < 2 * work.nbytes / (25_000 * MBIT)


# ---- what was measured ----


@pytest.mark.parametrize(
    ("workers", "servers", "mbit", "megabytes", "seconds"),
    [
        (4, 4, 200.0, 25, 1.438), (4, 4, 500.0, 60, 1.312), (4, 4, 1000.0, 100, 1.172), (2, 2, 1000.0, 100, 0.902),
        (4, 1, 200.0, 6, 1.329), (4, 1, 500.0, 15, 1.324), (4, 1, 1000.0, 30, 1.210),
    ],
)  # fmt: skip
def test_one_synchronisation_takes_what_was_measured(
    workers: int, servers: int, mbit: float, megabytes: int, seconds: float
) -> None:
    """Measured with shards of 512 KiB (`benchmarks/reduce.py`). None of these was used for fitting."""
    work = Workload(layers=(Layer(megabytes * 250_000),), shard_bytes=512 << 10)
    got = step_cost(work, site(workers, servers, mbit, queue=max(NETLAB_QUEUE, 0.010 * mbit * MBIT))).seconds
    assert got == pytest.approx(seconds, rel=0.09)


@pytest.mark.parametrize(("kib", "seconds"), [(512, 1.163), (256, 1.133), (128, 1.134)])
def test_a_paced_synchronisation_takes_what_was_measured(kib: int, seconds: float) -> None:
    """The same: 25 MB, 4 + 4 at 200 Mbit/s with `--pace 194`."""
    work = Workload(layers=(Layer(6_250_000),), shard_bytes=kib << 10)
    got = step_cost(work, paced(site(4, 4, 200.0, queue=NETLAB_QUEUE))).seconds
    assert got == pytest.approx(seconds, rel=0.04)


@pytest.mark.parametrize(("mbit", "megabytes", "seconds"), [(200.0, 6, 1.279), (500.0, 15, 1.214)])
def test_where_servers_are_few_pacing_spares_half_of_what_ports_lose(
    mbit: float, megabytes: int, seconds: float
) -> None:  # fmt: skip
    """The same page: 4 + 1. `PACED_LOSSES` was fitted to these two."""
    work = Workload(layers=(Layer(megabytes * 250_000),), shard_bytes=512 << 10)
    got = step_cost(work, paced(site(4, 1, mbit, queue=max(NETLAB_QUEUE, 0.010 * mbit * MBIT)))).seconds
    assert got == pytest.approx(seconds, rel=0.03)


def test_with_aggregators_nobody_is_paced() -> None:
    there = site(8, 8, 100.0, rack=4, uplink=100 * MBIT, aggregators=True)
    assert paced(there) == there
    assert paced(site(8, 8, 100.0)) == site(8, 8, PACED * 100.0, losses=None)


def test_members_find_a_pace_where_there_are_as_many_servers_as_workers() -> None:
    assert paced_by_port(site(4, 4, 100.0)) == paced(site(4, 4, 100.0))
    for workers_only in (site(4, 6, 100.0), site(4, 4, 100.0, replication=2)):
        found = paced_by_port(workers_only)
        assert [group.rate for group in found.workers] == [PACED * 100.0 * MBIT]
        assert found.servers == workers_only.servers
        assert found.losses == sites.PortLosses(gathered=0.0)
    for nobody in (
        site(4, 2, 100.0), site(1, 1, 100.0), site(4, 4, 100.0, beside=True),
        site(8, 8, 100.0, rack=4, uplink=100 * MBIT), site(8, 8, 100.0, rack=4, uplink=100 * MBIT, aggregators=True),
    ):  # fmt: skip
        assert paced_by_port(nobody) == nobody


def test_an_aggregator_on_a_host_gets_versions_through_the_same_port_as_one_worker_would() -> None:
    """Each of 4 hosts has a port to which 4 servers send, whoever listens there; a rack's aggregator has its own."""
    grouped = Wiring(site(4, 4, 100.0)).capacity["host0 in"]
    hosts, servers = Workers(32, 100 * MBIT, per_host=8), Servers(4, 100 * MBIT)
    aggregated = Site(workers=(hosts,), servers=(servers,), aggregators=True)
    assert Wiring(aggregated).capacity["host0 in"] == grouped
    assert Wiring(msgspec.structs.replace(aggregated, rack=8)).capacity["host0 in"] > grouped


def test_on_the_workers_hosts_a_port_gets_what_the_other_workers_send() -> None:
    for workers, part in ((2, 1.0 - 0.03), (3, 0.93), (5, 0.79)):
        lost = Wiring(site(workers, workers, 100.0, beside=True)).capacity["host0 in"]
        free = Wiring(site(workers, workers, 100.0, beside=True, losses=None)).capacity["host0 in"]
        assert lost == pytest.approx(part * free)


def test_ports_lose_something_for_each_further_sender_up_to_three() -> None:
    """The busiest port is a server's: four workers send to one."""
    work = Workload(layers=(Layer(2_500_000),), shard_bytes=64 << 10)
    alone = step_cost(work, site(1, 1, 100.0)).seconds
    for workers, part in ((2, 0.93), (4, 0.79), (8, 0.79)):
        took = step_cost(work, site(workers, 1, 100.0)).seconds
        assert took == pytest.approx(workers * alone / part, rel=0.03)
        even = step_cost(work, site(workers, 1, 100.0, losses=None)).seconds
        assert even == pytest.approx(workers * alone, rel=0.03)
    down = sites.PortLosses(gathered=0.0, spread=0.1)
    assert step_cost(work, site(4, 4, 100.0, losses=down)).seconds > 1.2 * step_cost(
        work, site(4, 4, 100.0, losses=None)
    ).seconds  # fmt: skip


@pytest.mark.parametrize(("mbit", "kib", "seconds"), [(250.0, 1024, 3.975), (500.0, 1024, 2.05), (500.0, 256, 1.92)])
def test_a_step_beside_an_accelerator_takes_what_was_measured(mbit: float, kib: int, seconds: float) -> None:
    """Measured by `benchmarks/train.py --ratio 1`; not used for fitting. What it takes at 1 Gbit/s is left
    out, because there the two cores are what binds."""
    got = step_cost(gpt(mbit, 1.0, kib=kib), site(4, 4, mbit, queue=NETLAB_QUEUE)).seconds
    assert got == pytest.approx(seconds, rel=0.07)


def test_pacing_makes_a_step_shorter_by_what_was_measured() -> None:
    """The same page: 62.5 Mbit/s, width 256, shards of 256 KiB, 4.16 s without and 3.59 with `--pace 60.5`."""
    work = gpt(62.5, 1.0, kib=256, width=256)
    plain = step_cost(work, site(4, 4, 62.5, queue=NETLAB_QUEUE)).seconds
    shorter = step_cost(work, paced(site(4, 4, 62.5, queue=NETLAB_QUEUE))).seconds
    assert plain == pytest.approx(4.16, rel=0.05)
    assert shorter == pytest.approx(3.59, rel=0.05)
