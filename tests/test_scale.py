"""Large clusters that are not there: the same seed plays the same, and nothing that a member says is lost."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rallypoint.core.cluster.course import check_course
from rallypoint.core.layout import Shard
from rallypoint.core.placing.placement import _score, place
from rallypoint.core.plan.workload import Workload, transformer
from rallypoint.core.view import assign_replicas, reassign_orphans
from rallypoint.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # its modules import one another by name

from scale_cluster import BigCluster, Play, PlayOutcome, Scenario, Size, change_bytes, messages_of
from simulate import ScaleOptions, limits_of, scenario_of, simulate

MODEL = Workload(layers=transformer(1e8, 1.0))


def _scenario(**others: object) -> Scenario:
    size = Size(workers=64, servers=8, standby=2, replication=2, heartbeat=5.0)
    given = {"size": size, "workload": MODEL, "rate": 1e9, "server_rate": 1e9, "steps": 12, **others}
    return msgspec.convert(msgspec.to_builtins(given), Scenario)


def _played(scenario: Scenario) -> PlayOutcome:
    return Play(scenario, clock=lambda: 0.0).run()


def test_the_same_seed_plays_the_same() -> None:
    scenario = _scenario(mtbf=3000.0, stragglers=0.1, seed=3)
    assert _played(scenario) == _played(scenario)
    assert _played(scenario).failures > 0


def test_without_failures_nothing_is_lost_and_no_view_is_made() -> None:
    outcome = _played(_scenario())
    assert outcome.goodput == pytest.approx(1.0)
    assert (outcome.failures, outcome.views) == (0, 0)


def test_a_failure_costs_its_step_a_heartbeat_and_computing_again_and_no_other_step() -> None:
    outcome = _played(_scenario(mtbf=6000.0, seed=1))
    struck = [step for step in outcome.steps if step.failures]
    assert struck
    assert max(step.seconds for step in struck) > 5.0 + MODEL.compute
    assert all(step.seconds == pytest.approx(step.undisturbed) for step in outcome.steps if not step.failures)


def test_a_spot_machine_that_is_told_in_time_costs_its_step_nothing_and_one_that_is_not_a_heartbeat() -> None:
    size = msgspec.to_builtins(Size(workers=64, servers=8, standby=6, replication=2, heartbeat=5.0))
    told, untold = (
        _played(_scenario(size=size, spot=1.0, taken=1500.0, notice=notice, seed=4, steps=20)) for notice in (30.0, 0.0)
    )
    assert told.taken > 0
    assert told.goodput == pytest.approx(1.0)
    assert (told.failures, told.views > 0) == (0, True)
    struck = [step for step in untold.steps if step.seconds > step.undisturbed + 1e-6]
    assert struck
    assert all(step.taken and step.seconds > 5.0 + MODEL.compute for step in struck)


def test_a_spot_machine_whose_notice_is_shorter_than_a_step_leaves_its_replica_to_another() -> None:
    size = msgspec.to_builtins(Size(workers=64, servers=8, standby=6, replication=2, heartbeat=5.0))
    late = _played(_scenario(size=size, spot=1.0, taken=1500.0, notice=MODEL.compute / 2, seed=4, steps=20))
    struck = [step for step in late.steps if step.seconds > step.undisturbed + 1e-6]
    assert struck
    assert max(step.seconds - step.undisturbed for step in struck) < 5.0  # nobody waits for a heartbeat


def test_only_so_many_workers_as_are_told_are_on_spot_machines_and_no_server() -> None:
    play = Play(_scenario(spot=0.5, taken=100.0, seed=1), clock=lambda: 0.0)
    play.run()
    taken = {member for _, _, what, member in play._due if what == "is taken"}
    assert taken
    assert all(member.startswith("worker") for member in taken)
    assert _played(_scenario(spot=0.0, taken=1.0)).taken == 0


def test_a_round_of_local_steps_takes_as_long_as_its_steps_compute_and_an_exchange() -> None:
    local, exchange = msgspec.structs.replace(MODEL, steps=10), _played(_scenario(steps=2)).ideal
    round = _played(_scenario(workload=msgspec.to_builtins(local), steps=2)).ideal
    assert 10 * MODEL.compute + 0.9 * exchange < round < 10 * MODEL.compute + 1.1 * exchange


def test_without_replication_a_lost_server_takes_the_job_back_to_its_snapshot() -> None:
    size = Size(workers=4, servers=8, replication=1, heartbeat=5.0)
    outcome = _played(_scenario(size=msgspec.to_builtins(size), mtbf=150.0, snapshot_steps=4, seed=2))
    assert outcome.rollbacks > 0
    assert len(outcome.steps) > 12


def test_workers_of_a_rack_compute_neighbouring_replicas_so_a_rack_of_a_power_of_two_pushes_one_block() -> None:
    def blocks(racks: int) -> float:
        size = Size(workers=64, servers=8, racks=racks)
        return _played(_scenario(size=msgspec.to_builtins(size), steps=1)).steps[0].blocks

    assert blocks(4) == 1.0
    assert blocks(5) > 1.0


def test_the_machine_keeps_its_invariants_while_members_of_a_large_cluster_come_and_go() -> None:
    cluster = BigCluster(Size(workers=64, servers=8, racks=4, standby=2, replication=2), clock=lambda: 0.0)
    cluster.gather()
    for dead in ("worker-00003", "server-00002", "worker-00040"):
        before = cluster.view
        cluster.die(dead)
        check_course(cluster.machine.course, before)
    cluster.join(66)
    assert sorted(r for own in cluster.view.assigned(0).values() for r in own) == list(range(64))


def test_the_size_of_all_messages_of_a_view_is_that_of_the_real_ones() -> None:
    cluster = BigCluster(Size(workers=16, servers=4), clock=lambda: 0.0)
    exact, sampled = messages_of(cluster.gather(), sample=100), messages_of(cluster.view, sample=10)
    assert exact.members == 20
    assert sampled.total == pytest.approx(exact.total, rel=0.02)
    assert exact.message > exact.view


# ---- what was made faster gives what it gave ----


@given(st.integers(1, 40), st.integers(1, 12), st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=12, max_size=12))
def test_replicas_go_one_by_one_to_the_worker_that_would_be_done_first(
    replicas: int, count: int, speeds: list[float]
) -> None:
    workers = [f"w{i}" for i in range(count)]
    cost = {worker: 1 / speed for worker, speed in zip(workers, speeds, strict=False)}
    busy, shares = dict.fromkeys(workers, 0.0), dict.fromkeys(workers, 0)
    for _ in range(replicas):
        worker = min(workers, key=lambda w: busy[w] + cost[w])
        shares[worker] += 1
        busy[worker] += cost[worker]
    rates = {worker: 1 / seconds for worker, seconds in cost.items()}
    assert {w: len(own) for w, own in assign_replicas(replicas, workers, rates).items()} == shares


@given(st.integers(2, 40), st.integers(2, 8))
def test_orphans_go_one_by_one_to_the_worker_that_would_be_done_first(replicas: int, count: int) -> None:
    workers = [f"w{i}" for i in range(count)]
    before = assign_replicas(replicas, workers)
    after = reassign_orphans(before, workers[1:])
    own = {worker: len(before[worker]) for worker in workers[1:]}
    for _ in before["w0"] if all(own.values()) else ():
        own[min(own, key=lambda worker: own[worker] + 1)] += 1
    if all(before.values()):
        assert {worker: len(runs) for worker, runs in after.items()} == own


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 9))
def test_a_shard_is_placed_on_the_first_server_of_its_order_that_has_room_and_none_of_its_run(
    sizes: list[int], count: int
) -> None:
    shards = [Shard(i, 0, 16 * i, 16 * i + size) for i, size in enumerate(sizes)]
    servers = [f"s{i}" for i in range(count)]
    largest = max(shard.nbytes for shard in shards)
    share = math.ceil(sum(shard.nbytes for shard in shards) / count)
    room = math.ceil(share / largest) * largest
    loads, placed = dict.fromkeys(servers, 0), {}
    for first in range(0, len(shards), count):
        run = shards[first : first + count]
        for shard in run:
            ranked = sorted(servers, key=lambda s: (_score(shard.index, s), s), reverse=True)
            free = [server for server in ranked if loads[server] + shard.nbytes <= room]
            beside = {placed.get(other.index) for other in run}
            home = next((s for s in free if s not in beside), free[0]) if free else min(ranked, key=lambda s: loads[s])
            placed[shard.index] = home
            loads[home] += shard.nbytes
    assert place(shards, servers) == placed


# ---- the command ----


def test_the_command_says_the_limits_and_writes_json() -> None:
    app = typer.Typer()
    app.command()(simulate)
    asked = ["--workers", "20", "--servers", "4", "--steps", "3", "--model", "10M"]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0
    assert "a server's link" in " ".join(told.output.split())
    as_json = CliRunner().invoke(app, [*asked, "--json"])
    assert len(msgspec.json.decode(as_json.stdout)["steps"]) == 3


def test_servers_are_the_limit_where_there_are_few_and_aggregators_where_a_rack_has_a_small_one() -> None:
    few = limits_of(scenario_of(ScaleOptions(workers=100, servers=5, model="1B")))
    racks = limits_of(scenario_of(ScaleOptions(workers=100, servers=50, racks=2, model="1B")))
    assert few["a server's link"] > few["a worker's link"]
    assert max(racks, key=lambda name: racks[name]) == "an aggregator's link"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"codec": "zip"}, "int8"), ({"codec": "int8", "racks": 4}, "aggregator"),
        ({"local_steps": 10, "fragments": 4}, "no multiple"),
        ({"sites": 101}, "no server"), ({"notice": "soon"}, "--notice soon"), ({"model": "7"}, "no model"),
        ({"workers": 3, "racks": 4}, "empty"), ({"servers": 1}, "as many servers"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        scenario_of(ScaleOptions(**options))  # type: ignore[arg-type]


def test_the_death_of_one_member_costs_each_other_as_many_bytes_in_a_small_job_as_in_a_large_one() -> None:
    sizes = []
    for workers in (50, 400):
        cluster = BigCluster(Size(workers=workers, servers=10))
        before = cluster.gather()
        cluster.die("worker-00007")
        sizes.append(change_bytes(before, cluster.view))
    assert max(sizes) < 1000
    assert sizes[1] < sizes[0] + 50
