"""Every policy under the same contract; what is particular to each; and that the contract finds what is broken."""

from __future__ import annotations

import msgspec
import pytest
from policy_contract import PolicyContract

from rallypoint.core import policy as policies
from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Mode, Policy, ServerPolicy, Sync
from rallypoint.core.shard.effects import Apply, Gather, Hold, Reply, Take, TellWait
from rallypoint.core.shard.events import Acked, Assigned, Contribute, FillBackup, Initialise, Loaded, Want
from rallypoint.core.shard.machine import ShardMachine


@pytest.mark.parametrize("mode", [Sync(), AllReduce()], ids=str)
class TestSync(PolicyContract):
    bound = 0

    @pytest.fixture
    def policy(self, mode: Mode) -> Policy:
        return policies.server_policy(mode)

    def needed(self, replicas: int) -> int:
        return replicas


@pytest.mark.parametrize("quorum", [1, 2, 3])
class TestQuorum(PolicyContract):
    @pytest.fixture(autouse=True)
    def _quorum(self, quorum: int) -> None:
        self.quorum = quorum

    @pytest.fixture
    def policy(self, quorum: int) -> Policy:
        return Sync(quorum=quorum)

    def needed(self, replicas: int) -> int:
        return min(self.quorum, replicas)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
class TestBoundedStaleness(PolicyContract):
    @pytest.fixture(autouse=True)
    def _bound(self, staleness: int) -> None:
        self.bound = staleness

    @pytest.fixture
    def policy(self, staleness: int) -> Policy:
        return BoundedStaleness(staleness)


@pytest.mark.parametrize(
    "asynchronous", [Async(), Async(fold=3), Async(scale_by_staleness=True), Async(delay_compensation=0.04)], ids=repr
)
class TestAsync(PolicyContract):
    @pytest.fixture
    def policy(self, asynchronous: Async) -> Policy:
        return asynchronous


# ---- what is particular to each ----


def _machine(policy: ServerPolicy, replicas: int) -> ShardMachine:
    machine = ShardMachine(policy, replicas, rounds=9)
    machine.handle(Initialise(0))
    return machine


def test_under_a_bound_who_runs_ahead_waits_for_the_slowest_and_is_told_so() -> None:
    machine = _machine(BoundedStaleness(1), 2)
    machine.handle(Contribute(0, 0, 1.0, 1))
    assert machine.handle(Want("a", 0)) == [Reply("a", 0, 1, 1)]
    machine.handle(Contribute(1, 0, 1.0, 2, base=1))
    assert machine.handle(Want("a", 0)) == [TellWait("a", 0, 2)]
    assert machine.handle(Contribute(0, 1, 1.0, 3))[-1] == Reply("a", 0, 2, 3)


def test_under_a_bound_a_contribution_that_is_too_far_ahead_is_kept_until_its_step() -> None:
    """No worker of ours sends one: it would have to be given parameters that it must not have."""
    machine = _machine(BoundedStaleness(0), 2)
    machine.handle(Contribute(0, 0, 1.0, 1))
    assert BoundedStaleness(0).admit(machine, 1, 0) is policies.Verdict.HOLD
    assert machine.handle(Contribute(1, 0, 1.0, 2)) == [Hold(2)]
    effects = machine.handle(Contribute(0, 1, 1.0, 3))
    assert [effect.ticket for effect in effects if isinstance(effect, Take)] == [3, 2]
    assert [effect.version for effect in effects if isinstance(effect, Apply)] == [2, 3]
    assert machine.clocks.steps == [2, 1]


@pytest.mark.parametrize(("scaled", "expected"), [(False, [1 / 3, 1 / 3, 1 / 3]), (True, [1.0, 1.0, 1 / 2])])
def test_a_late_contribution_counts_less_only_if_it_is_wished(scaled: bool, expected: list[float]) -> None:
    machine = _machine(Async(scale_by_staleness=scaled), 3)
    effects = [e for r in range(3) for e in machine.handle(Contribute(0, r, 1.0, r + 1, base=0))]
    assert [effect.rate for effect in effects if isinstance(effect, Apply)] == expected
    assert machine.tally.staleness == {0: 1, 1: 1, 2: 1}


def test_what_is_folded_counts_as_often_as_what_is_not() -> None:
    machine = _machine(Async(fold=3), 4)
    assert machine.handle(Contribute(0, 2, 1.0, 1))[-1] == Gather()
    machine.handle(Contribute(0, 0, 1.0, 2))
    applied = [e for e in machine.handle(Contribute(0, 3, 1.0, 3)) if isinstance(e, Apply)]
    assert [effect.rate for effect in applied] == [3 / 4]
    assert (machine.version, machine.clocks.steps) == (1, [1, 0, 1, 1])
    assert (machine.tally.applied, machine.tally.folded) == (1, 2)


@pytest.mark.parametrize(("mode", "policy"), [
    (Sync(quorum=3), Sync(quorum=3)),
    (BoundedStaleness(0), Sync()),
    (BoundedStaleness(2), BoundedStaleness(2)),
    (Async(fold=2), Async(fold=2)),
    (LocalSteps(4), Sync()),
    (LocalSteps(4, over=Async()), Async()),
    (AllReduce(), Sync()),
], ids=str)  # fmt: skip
def test_what_a_server_does_under_each_mode(mode: Mode, policy: ServerPolicy) -> None:
    assert policies.server_policy(mode) == policy


@pytest.mark.parametrize("mode", [
    Sync(quorum=3), BoundedStaleness(2), Async(fold=2), LocalSteps(4), AllReduce(own="torch.optim.Muon"),
], ids=str)  # fmt: skip
def test_a_mode_travels_in_the_job_s_record(mode: Mode) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(mode), type=Mode) == mode  # type: ignore[arg-type]


# ---- defects that were found and must not come back ----


def test_who_asked_before_the_snapshot_was_read_is_told_too_that_its_replica_has_to_wait() -> None:
    machine = ShardMachine(BoundedStaleness(1), 2, rounds=9)
    assert machine.handle(Want("a", 0)) == []
    assert machine.handle(Loaded(5, (3, 1))) == [TellWait("a", 0, 3)]
    assert machine.handle(Contribute(1, 1, 1.0, 1))[-1] == Reply("a", 0, 3, 6)


def test_a_bound_is_on_what_followers_see_and_not_on_what_the_backup_has_not_acknowledged() -> None:
    machine = ShardMachine(BoundedStaleness(1), 2, rounds=9)
    for event in (Assigned(primary=True, backup=True, fresh=True), Initialise(0), FillBackup(), Acked(0)):
        machine.handle(event)
    machine.handle(Contribute(0, 0, 1.0, 1))
    machine.handle(Acked(1))
    machine.handle(Contribute(1, 0, 1.0, 2))
    machine.handle(Contribute(0, 1, 1.0, 3))
    machine.handle(Want("a", 0))
    assert machine.handle(Acked(2)) == []  # its own contribution is visible, that of the slowest is not
    assert (machine.slowest, machine.visible) == (1, 0)
    assert machine.handle(Acked(3)) == [Reply("a", 0, 2, 3)]
