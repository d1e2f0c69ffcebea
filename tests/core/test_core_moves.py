"""Shards move between two steps, and who joins fetches a version before it gets replicas: nobody waits, nothing is
computed twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import pytest
from test_core_cluster import beat

from rallypoint.core.cluster import events
from rallypoint.core.cluster.effects import Effect, FindSnapshot, PublishView
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import Origin
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.placing.handover import Handover
from rallypoint.core.protocol import CaughtUp, Leaving, Pause, Propose, Reached
from rallypoint.core.view import Member, StandingOrders, View, ViewNumber
from rallypoint.core.worker.ending import Reaching
from rallypoint.core.worker.shell import shell_for
from rallypoint.core.worker.slots import Compute
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.worker.exchange.exchange import worker_plan

JOB = SimulatedJob(shards=12, buffers=0, replicas=6, steps=40, clip=None)


@dataclass
class Cluster:
    """A coordinator's machine with two servers and two workers, in the midst of a job at step `step`."""

    step: int = 5
    replication: int = 1
    machine: ClusterMachine = field(init=False)
    views: list[View] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = ClusterMachine(Terms(workers_start=2, workers_max=4, servers=2, replication=self.replication))
        for name in ("s0", "s1", "w0", "w1"):
            self.come(name)
        for step in range(self.step + 1):
            self.compute(step)
        self.catch_up()

    def play(self, event: events.Event) -> list[Effect]:
        effects = self.machine.handle(event)
        self.machine.validate()
        self.views += [effect.view for effect in effects if isinstance(effect, PublishView)]
        return effects

    def come(self, name: str) -> Self:
        self.play(events.Joined(Member(name, name, f"{name}:1"), "server" if name[0] == "s" else "worker"))
        if name[0] == "w":
            self.play(events.From(name, Propose(JOB.record)))
        return self

    def compute(self, step: int) -> None:
        for worker, own in self.view.assigned(step).items():
            for replica in own:
                self.play(events.Computed(worker, step, replica, 0.1, self.view.generation))

    def catch_up(self) -> None:
        """All backups and third servers of the view that is in force now have been filled."""
        paired, homes = dict(self.view.paired), dict(self.view.primary)
        thirds = {shard: one.paired for shard, one in self.view.incoming.items()}
        for known in (paired, thirds):
            for server in sorted(set(homes.values())):
                own = {shard: of for shard, of in known.items() if homes[shard] == server}
                self.play(events.From(server, CaughtUp(own)))

    def tick(self, now: float) -> None:
        for name in (*self.machine.course.members.workers, *self.machine.course.members.servers):
            self.play(beat(name))
        self.play(events.Tick(now))

    def reach(self, worker: str, version: int, generation: ViewNumber | None = None) -> None:
        self.play(events.From(worker, Reached(version, generation or self.view.generation)))

    def reach_all(self, version: int) -> None:
        self.reach("w0", version)
        self.reach("w1", version)

    @property
    def view(self) -> View:
        assert self.machine.view is not None
        return self.machine.view

    @property
    def homes(self) -> set[str]:
        return {*self.view.primary.values()}


def about_to_move(**given: int) -> Cluster:
    """A third server has come, and has copies of what it is to get."""
    cluster = Cluster(**given).come("s2")
    cluster.catch_up()
    return cluster


# ---- shards ----------------------------------------------------------------------------------------------------


def test_shards_that_have_caught_up_move_before_a_step_that_nobody_has_begun() -> None:
    cluster = Cluster(step=5).come("s2")
    assert cluster.view.orders.handover is None
    cluster.catch_up()
    assert cluster.view.orders.handover == 7
    assert "s2" not in cluster.homes
    cluster.compute(6)
    assert "s2" not in cluster.homes
    cluster.reach("w1", 7)
    assert "s2" not in cluster.homes
    cluster.reach("w0", 7)
    assert "s2" in cluster.homes
    assert cluster.view.orders.handover is None


def test_one_who_does_not_say_it_holds_nobody_up_for_long() -> None:
    cluster = about_to_move()
    cluster.tick(10.0)
    assert cluster.view.orders.handover == 7
    cluster.reach("w1", 7)
    cluster.tick(11.0)
    assert cluster.view.orders.handover == 7
    cluster.tick(12.1)
    assert cluster.view.orders.handover is None
    assert "s2" in cluster.homes


def test_a_server_that_leaves_waits_ten_seconds_for_the_end_of_a_step() -> None:
    cluster = Cluster(step=5).come("s2")
    cluster.tick(100.0)
    cluster.catch_up()
    cluster.tick(120.0)
    assert cluster.view.orders.handover == 7  # nobody leaves: steps may be long
    cluster.play(events.From("s0", Leaving()))
    cluster.catch_up()
    cluster.tick(121.0)
    cluster.tick(130.9)
    assert cluster.view.orders.handover == 7
    assert "s0" in cluster.homes
    cluster.tick(131.1)
    assert cluster.homes == {"s1", "s2"}


def test_one_that_dies_is_not_waited_for() -> None:
    cluster = about_to_move()
    cluster.reach("w1", 7)
    cluster.play(events.Left("w0", "it was killed"))
    assert cluster.view.orders.handover is None
    assert "s2" in cluster.homes


def test_the_word_of_an_earlier_generation_or_of_a_stranger_moves_nothing() -> None:
    cluster = about_to_move()
    cluster.reach("w1", 7, ViewNumber(0, 1))
    cluster.reach("s0", 7)
    cluster.reach("w9", 7)
    cluster.reach("w0", 6)
    assert "s2" not in cluster.homes
    assert cluster.view.orders.handover == 7


def test_a_word_that_is_too_high_counts_for_this_move_alone() -> None:
    cluster = about_to_move()
    cluster.reach("w1", 30)
    assert cluster.machine.course.handover.reached == {"w1": 7}


def test_a_new_home_that_dies_before_the_step_lets_everybody_go_on() -> None:
    cluster = about_to_move()
    cluster.play(events.Left("s2", "it was killed"))
    assert cluster.view.orders.handover is None
    assert cluster.homes == {"s0", "s1"}


def test_a_primary_that_dies_before_the_step_is_replaced_at_once() -> None:
    cluster = about_to_move(replication=2)
    assert cluster.view.orders.handover == 7
    generation = cluster.view.generation
    cluster.play(events.Left("s1", "it was killed"))
    assert cluster.view.orders.handover is None
    assert "s1" not in cluster.homes
    assert cluster.view.generation == generation


@pytest.mark.parametrize("step", [37, 38, 39])
def test_at_the_job_s_end_no_step_is_waited_for_that_does_not_come(step: int) -> None:
    cluster = about_to_move(step=step)
    assert cluster.view.orders.handover in (None, step + 2 if step < 39 else 40)
    assert cluster.view.orders.handover is None or cluster.view.orders.handover <= 40
    if cluster.view.orders.handover is not None:
        cluster.reach_all(cluster.view.orders.handover)
    assert "s2" in cluster.homes


def test_a_pause_is_the_step_before_which_shards_move() -> None:
    cluster = Cluster(step=5)
    cluster.play(Pause(True))
    cluster.come("s2")
    cluster.catch_up()
    assert cluster.view.orders.handover == cluster.view.orders.paused == 6
    cluster.reach_all(6)
    assert "s2" in cluster.homes


# ---- workers ---------------------------------------------------------------------------------------------------


def test_a_worker_that_joins_gets_replicas_once_it_holds_a_version() -> None:
    cluster = Cluster(step=5).come("w2")
    assert cluster.view.orders.warming == ("w2",)
    assert not cluster.view.takes_part("w2", 0)
    cluster.compute(6)
    assert not cluster.view.takes_part("w2", 0)
    cluster.reach("w2", 3)  # it has held that since it was given up
    assert cluster.view.orders.warming == ("w2",)
    cluster.reach("w2", 7)
    assert cluster.view.orders.warming == ()
    assert cluster.view.takes_part("w2", 8)
    assert cluster.view.assignments[-1].start > 6


def test_one_that_takes_over_from_a_worker_that_is_gone_gets_its_replicas_at_once() -> None:
    cluster = Cluster(step=5).come("w2")
    cluster.play(events.Left("w0", "it was killed"))
    assert cluster.view.orders.warming == ()
    assert cluster.view.takes_part("w2", 6)


def test_a_worker_that_leaves_while_it_fetches_changes_nothing_for_the_others() -> None:
    cluster = Cluster(step=5)
    before = cluster.view.assignments
    cluster.come("w2")
    cluster.play(events.Left("w2", "it was killed"))
    assert cluster.view.orders.warming == ()
    assert cluster.view.assignments == before
    cluster.come("w2")
    assert cluster.view.orders.warming == ("w2",)  # what its earlier process held is gone


# ---- the worker's side -----------------------------------------------------------------------------------------


def view(**others: Any) -> View:
    base = Cluster(step=0).views[0]
    fields = {name: getattr(base, name) for name in View.__struct_fields__}
    return View(**{**fields, **others})


def test_a_worker_says_once_that_it_holds_what_a_view_asks_for() -> None:
    shell = shell_for("w0", worker_plan(JOB.config, JOB.layout, frozenset()))
    number = ViewNumber(1, 9)
    asking = view(number=number, orders=StandingOrders(handover=3))
    shell.adopt(asking, ())
    assert shell.reaching.take() is None  # it holds no version
    shell.machine.step = 2
    assert shell.reaching.take() is None
    assert not shell.leased.holds_back(asking, Compute(2, 0))
    assert shell.leased.holds_back(asking, Compute(3, 0))
    shell.machine.step = 3
    assert shell.reaching.take() == (asking.generation, 3)
    assert shell.reaching.take() is None
    shell.reaching.again()
    assert shell.reaching.take() == (asking.generation, 3)


def test_a_worker_that_warms_up_follows_versions() -> None:
    shell = shell_for("w9", worker_plan(JOB.config, JOB.layout, frozenset()))
    shell.adopt(view(number=ViewNumber(1, 9)), ())
    assert not shell.machine.following
    shell.adopt(view(number=ViewNumber(1, 10), orders=StandingOrders(warming=("w9",))), ())
    assert shell.machine.following
    assert shell.reaching.take() is None
    for step in (4, 5):
        shell.machine.step = step
        assert shell.reaching.take() == (shell.view.generation, step)
        assert shell.reaching.take() is None


def test_nobody_is_cold_before_anything_is_computed() -> None:
    assert Handover().cold(["w0", "w1"], {}, 3) == []
    assert Handover().cold(["w0", "w1"], {"w0": (0,)}, 3) == ["w1"]
    assert Handover(warm={"w1"}).cold(["w0", "w1"], {"w0": (0,)}, 3) == []


def test_shards_leave_a_server_that_holds_the_job_up_at_once() -> None:
    cluster = Cluster(step=5)
    cluster.machine.course.members.apart.add("s1")
    cluster.come("s2")
    cluster.catch_up()
    assert all(view.orders.handover is None for view in cluster.views)
    assert "s1" not in cluster.homes


def test_a_step_that_a_later_view_asks_for_again_is_said_again() -> None:
    """What was said while the coordinator had a view without one counts for nothing: it would wait without an end."""
    view = msgspec.structs.replace(Cluster().view, orders=StandingOrders(handover=5))
    machine = SimpleNamespace(me="w0", step=5, steps=40, computing=False, view=view)
    reaching = Reaching(machine)
    assert (reaching.take(), reaching.take()) == ((view.generation, 5), None)
    for later, handover, said in ((1, None, None), (2, 5, (view.generation, 5)), (3, 6, None)):
        number = ViewNumber(view.number.epoch, view.number.count + later)
        machine.view = msgspec.structs.replace(view, number=number, orders=StandingOrders(handover=handover))
        assert reaching.take() == said


# ---- the third server ------------------------------------------------------------------------------------------


def test_a_third_server_that_a_primary_cannot_reach_is_set_apart() -> None:
    """The primary publishes nothing that it has not acknowledged, once it has acknowledged anything."""
    cluster = Cluster(step=5, replication=2).come("s2")
    third = cluster.view.incoming
    assert {one.server for one in third.values()} == {"s2"}
    primary = cluster.view.primary[next(iter(third))]
    for second in range(2, 60):
        for name in ("w0", "w1", "s0", "s1", "s2"):
            unreachable = {"s2": float(second)} if name == primary else {}
            cluster.play(beat(name, unreachable, float(second) if name[0] == "w" else 0.0, 1))
        cluster.play(events.Tick(float(second)))
    assert cluster.machine.course.members.apart == {"s2"}
    assert not cluster.view.incoming


def test_a_third_server_that_has_caught_up_is_none_after_a_roll_back() -> None:
    cluster = Cluster(step=5, replication=2).come("s2")
    for shard, one in dict(cluster.view.incoming).items():
        cluster.play(events.From(cluster.view.primary[shard], CaughtUp({shard: one.paired})))
    cluster.machine.course.views.arrived |= set(cluster.view.incoming)
    for server in ("s0", "s1"):
        cluster.play(events.Left(server, "killed"))
    cluster.play(Origin("step-2", 2))
    assert not cluster.machine.course.views.arrived
    cluster.come("s3")
    cluster.catch_up()


def test_two_servers_leave_and_one_stays_and_the_first_may_die_at_once() -> None:
    cluster = about_to_move(replication=2)
    for version in range(6, 12):
        cluster.compute(version)
        cluster.reach_all(version + 1)
    cluster.catch_up()
    for server in ("s0", "s1"):
        cluster.play(events.From(server, Leaving()))
    assert FindSnapshot() not in cluster.play(events.Left("s0", "its grace is over"))
