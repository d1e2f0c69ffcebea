"""The machine of a worker whose forward passes begin before all of their version is here, event by event."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self, cast

from slot_bench import AlignedBench, view_of

from rallypoint.core.view import Assignment, View
from rallypoint.core.worker import slots
from rallypoint.core.worker.aligned import OverlapMachine
from rallypoint.core.worker.slots import Compute, Fetch, Install, Land, LinkLost, LinkUp, ReplicaAbandoned, Viewed
from rallypoint.worker.exchange.exchange import JobEnd
from rallypoint.worker.exchange.locked import LockedShell

SHARDS = 4
MINE = {"me": (0,), "other": (1,)}


def _view(assigned: Mapping[str, Sequence[int]] = MINE, **others: Any) -> View:
    return view_of(SHARDS, assigned, **others)


class _Bench(AlignedBench):
    """A machine at step 1, which has sent its contribution; `begin_early` begins step 2."""

    def __init__(self, view: View | None = None) -> None:
        machine = OverlapMachine("me", SHARDS, frozenset(), 10)
        machine.allow_early(True)
        super().__init__(machine, view or _view())
        self.install(1)
        assert self.machine.next_action() == Compute(1, 0)
        self.compute()

    def begin_early(self) -> Self:
        action = self.machine.next_action()
        assert action == Compute(2, 0)
        assert self.machine.take(action)
        self.machine.validate()
        assert self.machine.early
        assert self.machine.reads == 2
        return self

    def swap(self, *shards: int) -> list[int]:
        assert self.machine.here(shards)
        swapped = self.machine.to_swap(shards)
        self.machine.validate()
        return swapped


def test_a_step_begins_while_its_version_arrives_and_takes_gradients_once_it_is_whole() -> None:
    bench = _Bench().begin_early()
    assert not bench.machine.here([3])
    bench.land(2, [3])
    assert bench.swap(3) == [3]
    assert bench.swap(3) == []  # the model has it
    assert [bench.machine.may_fill(shard) for shard in range(SHARDS)] == [None] * SHARDS
    bench.land(2, [0, 1, 2])
    assert bench.swap(0, 1, 2, 3) == [0, 1, 2]
    bench.handle(slots.Installed())
    assert (bench.machine.step, bench.machine.early) == (2, False)
    bench.fill_all(0)
    bench.handle(slots.ReplicaComputed())
    assert bench.machine.presum.sent == set(range(SHARDS))


def test_no_step_begins_early_unless_the_main_thread_allows_it() -> None:
    bench = _Bench()
    bench.machine.allow_early(False)
    assert bench.machine.next_action() is None
    bench.land(2)
    assert bench.machine.next_action() == Install(2)


def test_a_version_that_is_all_here_is_installed_before_its_step_begins() -> None:
    bench = _Bench()
    bench.land(2)
    assert bench.machine.next_action() == Install(2)


def test_no_step_begins_early_while_a_contribution_to_the_last_one_may_be_lost() -> None:
    bench = _Bench()
    bench.handle(LinkLost("s0"))
    assert bench.machine.next_action() is None
    bench.handle(LinkUp("s0"))
    assert bench.machine.next_action() == Compute(1, 0)


def test_a_forward_pass_that_began_early_gives_way_to_work_of_the_step_before() -> None:
    for cause in (
        [slots.Assisted(1, 1)],
        [Viewed(_view({"me": (0, 1)}, count=2))],  # the other worker has died
        [LinkLost("s0"), LinkUp("s0")],
        [LinkLost("s1"), Viewed(_view(count=2, homes=["s0"] * SHARDS))],  # server b has died
    ):
        bench = _Bench().begin_early()
        bench.land(2, [1])
        bench.swap(1)
        for event in cause:
            bench.handle(event)
        if bench.machine.view is not None and bench.machine.view.number.count == 2 and not bench.machine.rewound:
            bench.handle(LinkUp("s0"))
        assert bench.machine.rewound, cause
        bench.handle(ReplicaAbandoned())
        assert bench.machine.slots[1] is slots.Slot.LANDED, "the main thread has swapped version 2 back into its slot"
        assert isinstance(bench.machine.next_action(), Compute), cause
        assert bench.machine.next_action() != Compute(2, 0), cause


def test_a_forward_pass_goes_on_when_nothing_is_wanted_of_the_step_before() -> None:
    bench = _Bench().begin_early()
    bench.land(2, [0, 2])
    bench.handle(LinkLost("s0"))  # it has had all contributions to these: they are at version 2
    bench.handle(LinkUp("s0"))
    assert not bench.machine.rewound
    bench.handle(Viewed(_view(count=2)))
    assert not bench.machine.rewound


def test_a_lost_link_takes_no_shard_back_that_the_model_has() -> None:
    bench = _Bench().begin_early()
    bench.land(2, [0])
    bench.swap(0)
    assert bench.arrive(2, 2)[0] == Land(2)
    bench.handle(LinkLost("s0"))
    assert bench.machine.here([0])
    assert bench.machine.slots[2] is slots.Slot.FREE


def test_a_forward_pass_is_given_up_when_its_replica_moves_to_another_worker() -> None:
    bench = _Bench().begin_early()
    bench.handle(Viewed(_view(count=2, later=[Assignment(2, {"other": (0, 1)})])))
    assert bench.machine.rewound
    bench.handle(ReplicaAbandoned())
    assert bench.machine.next_action() is None


def test_a_forward_pass_is_given_up_when_every_shard_is_past_it() -> None:
    bench = _Bench().begin_early()
    bench.land(2, [0])
    bench.swap(0)
    for shard in range(SHARDS):
        bench.arrive(shard, 3)
    assert bench.machine.rewound
    effects = bench.handle(ReplicaAbandoned())
    assert [effect for effect in effects if isinstance(effect, Fetch)] == [
        Fetch(shard, 3, f"s{shard % 2}") for shard in range(SHARDS)
    ]


def test_a_new_generation_waits_for_the_slots_that_the_main_thread_swaps() -> None:
    bench = _Bench().begin_early()
    bench.land(2, [0, 1])
    bench.swap(0)
    bench.handle(Viewed(_view(count=2, generation=2, origin="snapshot")))
    for server in ("s0", "s1"):
        bench.handle(LinkUp(server))
    assert bench.machine.rewound
    assert not isinstance(bench.arrive(0, 0)[0], Land)
    bench.land(0, [1, 2, 3])
    assert bench.handle(ReplicaAbandoned()) == [Fetch(0, 0, "s0")]
    bench.land(0, [0])
    assert bench.machine.next_action() == Install(0)


def test_a_stale_install_changes_nothing_after_a_new_generation() -> None:
    bench = _Bench().begin_early()
    bench.land(2)
    bench.swap(*range(SHARDS))
    bench.handle(Viewed(_view(count=2, generation=2, origin="snapshot")))
    bench.handle(slots.Installed())
    assert bench.machine.step == -1
    assert bench.machine.rewound


def test_a_worker_that_fails_in_an_early_forward_pass_has_sent_all_of_the_step_before() -> None:
    bench = _Bench().begin_early()
    locked = SimpleNamespace(changed=threading.Condition(), shell=SimpleNamespace(machine=bench.machine))
    locked.shell.view = bench.machine.view
    said = JobEnd(cast(LockedShell, locked)).given_up("why")
    assert (said.version, said.sent, bench.machine.reads) == (1, "all", 2)
