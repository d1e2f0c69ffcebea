"""The simulation plays jobs whose replicas carry a state from step to step."""

from __future__ import annotations

import pytest

from rallypoint.core.aggregator import BlockSum
from rallypoint.core.policy import AllReduce, Sync
from rallypoint.core.shard.server import ServerPlan
from rallypoint.core.worker.slots import SlotMachine
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.run import simulate
from support.failing import first_failure

FIXED = range(3, 11)
ENOUGH = range(40)  # seeds within which a planted bug has to be found


@pytest.mark.some("all-reduce")
@pytest.mark.parametrize("sync", [Sync(), AllReduce()], ids=["sync", "all-reduce"])
def test_whatever_fails_the_bytes_are_those_of_an_undisturbed_run(sync: Sync | AllReduce) -> None:
    plans = [make_plan(seed, Play("carrying", sync)) for seed in FIXED]
    assert any(plan.faults for plan in plans)
    assert any(plan.job.replicas > 1 for plan in plans)
    for seed in FIXED:
        simulate(seed, Play("carrying", sync))


def test_each_replica_contributes_to_its_own_state_and_to_no_other() -> None:
    job = make_plan(3, Play("carrying")).job
    carried = [shard.index for shard in job.layout.shards if shard.replica is not None]
    assert [list(job.contributing(index)) for index in carried] == [[replica] for replica in range(job.replicas)]


@pytest.mark.slow
def test_a_worker_that_leaves_the_state_to_replica_0_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what replicas carry is sent as buffers are, by replica 0 alone."""
    monkeypatch.setattr(
        SlotMachine, "contributes", lambda machine, shard, replica: shard not in machine.buffer_shards or replica == 0
    )
    assert first_failure(Play("carrying"), ENOUGH)


def test_a_server_that_takes_the_state_of_replica_0_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a server does not know which replica carries a shard."""
    whole = ServerPlan.machine

    def forgets(plan: ServerPlan, index: int, *, primary: bool):  # type: ignore[no-untyped-def]
        machine = whole(plan, index, primary=primary)
        machine.lowest = machine._sum.lowest = 0  # type: ignore[attr-defined]
        return machine

    monkeypatch.setattr(ServerPlan, "machine", forgets)
    assert first_failure(Play("carrying"), ENOUGH)


@pytest.mark.slow
def test_an_aggregator_that_takes_the_state_of_replica_0_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an aggregator drops what other replicas carry."""
    whole = BlockSum.__init__

    def forgets(self: BlockSum, shard: int, step: int, replicas: int, lowest: int = 0) -> None:
        whole(self, shard, step, replicas)

    monkeypatch.setattr(BlockSum, "__init__", forgets)
    assert first_failure(Play("carrying"), ENOUGH)


def test_its_words_are_understood() -> None:
    for word, played in (("carrying", Play("carrying")), ("carrying:all-reduce", Play("carrying", AllReduce()))):
        assert parse_policy(word) == played == make_plan(3, played).played
        assert word_for(played) == word
    with pytest.raises(ValueError, match="no policy"):
        parse_policy("carrying:ssp:1")
