"""A worker's route: through its aggregator from a step's beginning on, and to the servers at once when that is lost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from rallypoint.core.modes import ModeTraits
from rallypoint.core.placing.pinned import nearest_aggregators
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.core.worker import slots
from rallypoint.core.worker.shell import LinkTable, WorkerPlan, WorkerShell, shell_for
from rallypoint.core.worker.slots import Arriving, Compute, DropArriving, Effect, Filled, Follow, Install, Land, Send

A0 = Member("a0", "rack", "a0", 7)
SERVERS = (Member("s0", "h", "s0", 1), Member("s1", "h", "s1", 2))


def view_of(count: int, aggregator: Member | None = A0, generation: int = 1) -> View:
    return View(
        number=ViewNumber(1, count), generation=ViewNumber(1, generation), workers=(Member("w", "h"),), servers=SERVERS,
        assignments=(Assignment(0, {"w": (0,)}),), primary={0: "s0", 1: "s1"}, uploader="x", contributors={"w": (0,)},
        aggregators=() if aggregator is None else (aggregator,),
        aggregator_of={} if aggregator is None else {"w": aggregator.id},
    )  # fmt: skip


class Bench:
    """A worker's shell in a view with an aggregator, all links up."""

    def __init__(self, view: View) -> None:
        self.shell: WorkerShell = shell_for("w", WorkerPlan(2, frozenset(), 9, ModeTraits()))
        self.adopt(view)

    def adopt(self, view: View, *, up: bool = True) -> list[Effect]:
        ended = self.shell.links_to_end(view)
        assert ended is not None
        effects = self.shell.adopt(view, ended)
        new = self.shell.links.to_open(view)
        for member in new if up else ():
            effects += self.shell.link_up(member.id)
        self.shell.machine.validate()
        self.shell.validate()
        return effects

    def arrive(self, version: int, server: str, shards: Sequence[int] = (0, 1)) -> list[Effect]:
        effects: list[Effect] = []
        for shard in shards:
            event = Arriving(shard, version, self.shell.number)
            effects += self.shell.arriving(event, server)
            if Land(shard) in effects:
                effects += self.shell.machine.handle(slots.Landed(shard))
        return effects

    def install(self, version: int, server: str = "") -> list[Effect]:
        for shard, home in enumerate(("s0", "s1")):
            self.arrive(version, server or home, [shard])
        assert self.shell.machine.take(Install(version))
        effects = self.shell.installed()
        self.shell.machine.validate()
        return effects

    def compute(self) -> list[tuple[int, str]]:
        """Compute the replica. Returns the (shard, receiver) of each contribution that is sent."""
        machine, sent = self.shell.machine, []
        assert self.shell.begin_replica(machine.step, 0) is not None
        for shard in range(2):
            if machine.may_fill(shard):
                machine.fill(shard)
                for effect in machine.handle(Filled(shard)):
                    if isinstance(effect, Send):
                        sent.append((shard, effect.server))
                        machine.handle(slots.SlotSent(shard, effect.serial))
        self.shell.end_replica(whole=True)
        return sent


def followed(effects: Sequence[Effect]) -> list[Follow]:
    return [effect for effect in effects if isinstance(effect, Follow)]


@pytest.fixture
def bench() -> Bench:
    """At step 0, through the aggregator."""
    made = Bench(view_of(1))
    made.install(0)
    return made


def test_a_worker_begins_with_the_servers_and_its_next_step_goes_through_the_aggregator() -> None:
    bench = Bench(view_of(1))
    assert bench.shell.route.through == ""
    assert bench.arrive(0, "a0") == [DropArriving(0), DropArriving(1)]  # it was not asked
    effects = bench.install(0)
    assert followed(effects) == [Follow("a0", step=0), Follow("s0", on=False), Follow("s1", on=False)]
    assert bench.compute() == [(0, "a0"), (1, "a0")]


def test_versions_come_from_the_route_only(bench: Bench) -> None:
    bench.compute()
    assert bench.arrive(1, "s0", [0]) == [DropArriving(0)]
    bench.install(1, "a0")
    assert bench.shell.machine.step == 1


def test_a_lost_aggregator_costs_the_step_in_progress_and_nobody_is_waited_for(bench: Bench) -> None:
    bench.compute()
    assert followed(bench.shell.link_lost("a0")) == [Follow("s0"), Follow("s1")]
    assert bench.shell.next_action() == Compute(0, 0)
    assert bench.compute() == [(0, "s0"), (1, "s1")]
    assert bench.arrive(1, "a0") == [DropArriving(0), DropArriving(1)]
    bench.install(1)


def test_it_goes_back_to_an_aggregator_that_it_has_lost_after_a_while(bench: Bench) -> None:
    bench.shell.link_lost("a0")
    bench.shell.link_up("a0")
    bench.compute()
    bench.install(1)
    assert bench.shell.route.through == ""
    bench.compute()
    bench.install(2)
    assert bench.shell.route.through == "a0"
    bench.shell.link_lost("a0")
    bench.shell.link_up("a0")
    steps = 0
    while not bench.shell.route.through:
        bench.compute()
        steps += 1
        bench.install(2 + steps)
    assert steps == 4


def test_another_aggregator_in_its_place_is_used_from_the_next_step_on(bench: Bench) -> None:
    effects = bench.adopt(view_of(2, Member("a1", "rack", "a1", 9)))
    assert followed(effects) == [Follow("s0"), Follow("s1")]  # until then
    bench.compute()
    assert followed(bench.install(1))[0] == Follow("a1", step=1)


def test_a_view_without_aggregators_ends_the_link(bench: Bench) -> None:
    bench.compute()
    view = view_of(2, None)
    assert bench.shell.links_to_end(view) == ["a0"]
    bench.adopt(view)
    assert bench.compute() == [(0, "s0"), (1, "s1")]


def test_a_shard_that_moves_is_the_aggregator_s_affair(bench: Bench) -> None:
    bench.compute()
    moved = msgspec.structs.replace(view_of(2), primary={0: "s1", 1: "s1"})
    bench.adopt(moved)
    assert bench.shell.next_action() is None  # what it has sent counts: the aggregator sends it to the new primary
    assert bench.shell.view.primary == {0: "s1", 1: "s1"}


def test_a_new_generation_begins_with_the_servers(bench: Bench) -> None:
    assert sorted(bench.shell.links_to_end(view_of(2, generation=2)) or []) == ["a0", "s0", "s1"]
    effects = bench.adopt(view_of(2, generation=2))
    assert bench.shell.route.through == ""
    assert {effect.server for effect in followed(effects) if effect.on} == {"s0", "s1"}
    bench.install(0)
    assert bench.shell.route.through == "a0"


def test_an_aggregator_that_cannot_be_reached_is_not_used() -> None:
    bench = Bench(view_of(1, None))
    bench.adopt(view_of(2), up=False)
    bench.install(0)
    assert bench.shell.route.through == ""
    bench.shell.link_up("a0")
    assert bench.compute() == [(0, "s0"), (1, "s1")]  # not in the middle of a step
    assert followed(bench.install(1))[0] == Follow("a0", step=1)


def test_only_the_worker_s_own_aggregator_is_linked() -> None:
    links = LinkTable("somebody else")
    assert links.to_open(view_of(1)) == list(SERVERS)


# ---- who uses which ----


def _at(place: str, *names: str) -> list[Member]:
    return [Member(name, "h", near=place) for name in names]


def test_workers_use_the_aggregator_near_them() -> None:
    workers = [*_at("rack1", "w0", "w1"), *_at("rack2", "w2"), *_at("", "w3")]
    aggregators = [*_at("rack1", "a0"), *_at("", "a9"), *_at("rack3", "a3")]
    assert nearest_aggregators(workers, aggregators, {}) == {"w0": "a0", "w1": "a0", "w3": "a9"}


def test_aggregators_of_one_place_share_its_workers_by_their_replicas() -> None:
    workers = _at("", "w0", "w1", "w2", "w3", "idle")
    assigned = {"w0": (6, 7), "w1": (0, 1), "w2": (4, 5), "w3": (2, 3)}
    used = nearest_aggregators(workers, _at("", "a1", "a0"), assigned)
    assert used == {"w1": "a0", "w3": "a0", "w2": "a0", "w0": "a1", "idle": "a1"}
    assert nearest_aggregators(workers[:4], _at("", "a1", "a0"), assigned) == {
        "w1": "a0", "w3": "a0", "w2": "a1", "w0": "a1"
    }  # fmt: skip
