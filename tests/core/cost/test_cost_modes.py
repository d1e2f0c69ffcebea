"""Which mode on which machine: what `rallypoint plan` and the start of a job advise."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from rallypoint.core.plan.candidates import MARGIN, Judgement, Machines, ModeAdvice, advice_at_start, candidates_for
from rallypoint.core.plan.workload import Workload, transformer

K = 4 * 355_000_000  # a GPT of 355 M
SERVERS, WORKERS = "rp.Sync()", "sync=rp.AllReduce()"
GBIT = 1000.0  # Mbit/s


def advised(found: ModeAdvice) -> tuple[str, int]:
    mode = WORKERS if found.all_reduce else SERVERS
    assert found.says.startswith(f"with servers, the mode for these machines is {mode}")
    return mode, found.ranks


@pytest.mark.some("machines1-*", "machines5-*", "machines3-*")
@pytest.mark.parametrize(
    ("machines", "how", "mode", "ranks", "why"),
    [  # (workers, hosts, servers)
        ((1, 1, 4), {}, WORKERS, 1, "0.0595 s beside what a worker computes, 0.239 s with the optimizer on"),
        ((8, 1, 4), {}, SERVERS, 8, "workers of 8 ranks (--ranks 8)"),
        ((4, 4, 4), {"mbit": 10 * GBIT}, SERVERS, 1, "the default"),
        ((4, 4, 4), {"mbit": 100 * GBIT}, WORKERS, 1, "processors of 4 servers"),
        ((4, 4, 4), {"mbit": 10 * GBIT, "beside": True}, SERVERS, 1, "the default"),
        ((32, 4, 4), {"mbit": 100 * GBIT}, SERVERS, 8, "each sends one sum"),
        ((4, 2, 2), {"mbit": 100 * GBIT, "ranks": 4}, SERVERS, 4, "workers of 4 ranks"),
        ((1, 1, 4), {"memory": 4e9}, SERVERS, 1, "each would need 5.68 GB"),
        ((4, 4, 4), {}, SERVERS, 1, "(links of 1 Gbit/s are assumed)"),
    ],
)  # fmt: skip
def test_what_a_job_is_told_when_it_begins(
    machines: tuple[int, int, int], how: dict[str, Any], mode: str, ranks: int, why: str
) -> None:
    found = advice_at_start(K, *machines, **how)
    assert advised(found) == (mode, ranks)
    assert why in found.says


@pytest.mark.parametrize(
    ("compute", "servers", "mode"),
    [(0.35, 1, WORKERS), (0.35, 2, WORKERS), (0.9, 1, WORKERS), (3.0, 1, SERVERS), (3.0, 4, SERVERS)],
)
def test_in_one_box_a_step_of_less_than_a_second_does_not_wait_for_the_servers_processors(
    compute: float, servers: int, mode: str
) -> None:
    machines = Machines(gpus=1, rate=1.25e9, servers=(servers,))
    verdict = Judgement.of(candidates_for(Workload(layers=transformer(K / 4, compute)), machines))
    assert f"is {mode}" in verdict.advice
    assert not verdict.ours  # with nobody to add up with, DDP costs nothing


@pytest.mark.some("4-1-*", "1-1-*")
@pytest.mark.parametrize(
    ("gpus", "per_host", "gbit"), [(1, 1, 10), (8, 8, 10), (4, 1, 10), (4, 1, 1), (4, 1, 100), (32, 8, 100)]
)
def test_plan_and_the_start_of_a_job_say_the_same(gpus: int, per_host: int, gbit: int) -> None:
    machines = Machines(gpus=gpus, per_host=per_host, rate=gbit * 125e6, servers=(4,))
    planned = Judgement.of(candidates_for(Workload(layers=transformer(K / 4, 0.0)), machines))
    started = advice_at_start(K, gpus, gpus // per_host, 4, mbit=gbit * GBIT)
    assert started.says.startswith(planned.advice)
    ours = planned.best if planned.ours else planned.other
    assert ours.step.seconds == pytest.approx(started.step.seconds, rel=0.005)  # on the workers' hosts, it may be


def test_the_layout_that_is_recommended_is_in_the_mode_that_is_advised() -> None:
    """One voice: the row's seconds, its name, and the sentence."""
    machines = Machines(gpus=4, rate=12.5e9, servers=(4,))
    verdict = Judgement.of(candidates_for(Workload(layers=transformer(K / 4, 0.1)), machines))
    ours = verdict.best if verdict.ours else verdict.other
    assert ours.all_reduce
    assert verdict.why.startswith("use 4 servers on the workers' hosts, AllReduce: ")
    assert f"is {WORKERS}: a step takes {ours.step.seconds:.3g} s, " in verdict.advice


def test_where_only_servers_can_step_nothing_is_said_of_workers() -> None:
    """Backups are refused where workers step; a round of local steps is a mode of its own."""
    machines = Machines(gpus=4, rate=12.5e9, servers=(4,), mtbf=3600.0)
    work = Workload(layers=transformer(K / 4, 0.1))
    backed = [one for one in candidates_for(work, machines) if one.replication == 2]
    assert backed
    assert {one.all_reduce for one in backed} == {False}
    assert all("workers" not in one.advice for one in backed)
    rounds = [one for one in candidates_for(msgspec.structs.replace(work, steps=4), machines) if one.ours]
    assert {one.advice for one in rounds} == {""}


@pytest.mark.some("1-4-*")
@pytest.mark.parametrize(("gpus", "servers", "mode"), [(1, 1, WORKERS), (1, 4, WORKERS), (8, 4, "(--ranks 8)")])
def test_from_the_time_on_that_the_start_names_plan_says_so_too(gpus: int, servers: int, mode: str) -> None:
    says = advice_at_start(K, gpus, 1, servers).says
    found = re.search(r"; from ([0-9.]+) s of computing on the default is as quick$", says)
    assert found is not None
    assert mode in says
    machines = Machines(gpus=gpus, per_host=gpus, rate=1.0, servers=(servers,))
    for factor in (0.4, 1.0):
        work = Workload(layers=transformer(K / 4, factor * float(found[1])))
        ways = {one.name: one for one in candidates_for(work, machines) if one.ours}
        least = min(one.step.seconds for one in ways.values())
        usual = ways["1 server" if servers == 1 else f"{servers} servers"]  # a worker for each GPU
        assert (usual.all_reduce or MARGIN * least < usual.step.seconds) is (factor < 1.0)
