"""Shards move away from a link that turns out to be slow: when it is worth it, and not again and again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Self

import msgspec
import pytest
from test_core_cluster import beat

from rallypoint.core.cluster import events
from rallypoint.core.cluster.effects import Effect, PublishView
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.plan.topology import HostFacts, Topology
from rallypoint.core.policy import AllReduce
from rallypoint.core.protocol import CaughtUp, Propose, Say
from rallypoint.core.view import Member, View
from rallypoint.testing.simulation.job import SimulatedJob

SERVERS = ("s0", "s1", "s2", "s3")
JOB = SimulatedJob(shards=70, buffers=0, replicas=3, steps=100, clip=None)
TERMS = Terms(workers_start=3, workers_max=3, servers=4, heartbeat=4.0, measure_links=True)
BEAT_S = 1.0


@dataclass
class Cluster:
    """A coordinator's machine, its members, and links of servers as they are."""

    machine: ClusterMachine
    links: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SERVERS, 1.0))
    busy: float = 0.8
    now: float = 0.0
    said: list[str] = field(default_factory=list)
    job: SimulatedJob = JOB

    def run(self, effects: list[Effect]) -> None:
        self.said += [effect.text for effect in effects if isinstance(effect, Say)]
        self.machine.validate()
        for effect in effects:
            if isinstance(effect, PublishView):
                self.catch_up(effect.view)

    def catch_up(self, view: View) -> None:
        for server in SERVERS:
            backups = {shard: number for shard, number in view.paired.items() if view.primary[shard] == server}
            if backups and view is self.machine.view:
                self.run(self.machine.handle(events.From(server, CaughtUp(backups))))

    def start(self, **link_mbit: float) -> Self:
        for server in SERVERS:
            member = Member(server, server, f"{server}:1", link_mbit=link_mbit.get(server, 0.0))
            self.run(self.machine.handle(events.Joined(member, "server")))
        for worker in ("w0", "w1", "w2"):
            self.run(self.machine.handle(events.Joined(Member(worker, worker), "worker")))
            self.run(self.machine.handle(events.From(worker, Propose(self.job.record))))
        return self

    def beats(self, count: int) -> None:
        for _ in range(count):
            self.now += BEAT_S
            paced = {server: (speed * self.busy * 1e6, self.busy) for server, speed in self.links.items()}
            for worker in ("w0", "w1", "w2"):
                self.run(self.machine.handle(beat(worker, paced=paced)))
            for server in SERVERS:
                self.run(self.machine.handle(beat(server)))
            self.run(self.machine.handle(events.Tick(self.now)))

    @property
    def load(self) -> dict[str, int]:
        return dict(Counter(self.machine.view.primary.values()))

    @property
    def moves(self) -> list[str]:
        return [text for text in self.said if "shards move" in text]


def cluster(terms: Terms = TERMS, recovered: ClusterState | None = None) -> Cluster:
    return Cluster(ClusterMachine(terms, recovered=recovered))


def spread(load: dict[str, int]) -> list[int]:
    return [load[server] for server in SERVERS]


def test_a_link_that_gets_slower_keeps_its_share_of_the_shards_and_no_more() -> None:
    job = cluster().start()
    job.beats(10)
    before = spread(job.load)
    assert max(before) - min(before) <= 2
    job.links["s3"] = 0.5
    job.beats(12)
    assert job.load["s3"] == pytest.approx(10, abs=2)
    assert "compared with the median one: s3's 0." in job.moves[0]
    moves = len(job.moves)
    job.beats(400)
    assert len(job.moves) <= moves + 1  # at most one that makes the first estimate better
    assert spread(job.load) == pytest.approx([20, 20, 20, 10], abs=2)


def test_without_the_option_nothing_is_moved_by_what_members_say() -> None:
    job = cluster(msgspec.structs.replace(TERMS, measure_links=False)).start()
    job.links["s3"] = 0.1
    before = job.machine.view
    job.beats(30)
    assert job.machine.view == before


def test_under_all_reduce_a_shard_stays_where_it_is_because_its_state_is_on_workers() -> None:
    """No other server could be filled with it: a server that was asked for it failed, and the job with it."""
    job = cluster()
    job.job = replace(JOB, sync=AllReduce())
    job.start()
    job.beats(10)
    job.links["s3"], before = 0.1, job.load
    job.beats(30)
    assert not job.machine.view.backup
    assert job.moves == []
    assert job.load == before


def test_links_that_are_idle_most_of_the_time_move_nothing() -> None:
    job = cluster().start()
    job.links["s3"], job.busy = 0.1, 0.1
    job.beats(30)
    assert job.moves == []


@pytest.mark.slow
def test_a_link_that_comes_and_goes_moves_shards_ever_more_rarely() -> None:
    job = cluster().start()
    counts = []
    for _ in range(4):
        before = len(job.moves)
        for flip in range(30):
            job.links["s3"] = 0.4 if flip % 2 else 1.0
            job.beats(8)
        counts.append(len(job.moves) - before)
    assert sum(counts) <= 10
    assert counts[-1] <= 1


def test_a_coordinator_that_takes_over_keeps_what_was_measured() -> None:
    job = cluster().start()
    job.links["s3"] = 0.5
    job.beats(20)
    view = job.machine.view
    assert view.speeds["s3"] == 0.5
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(job.machine.state()), type=ClusterState)
    after = cluster(recovered=state)
    assert after.machine.view.speeds == view.speeds
    for member in (*view.servers, *view.workers):
        after.run(after.machine.handle(events.Joined(member, "server" if member in view.servers else "worker")))
    after.run(after.machine.handle(events.Tick(1000.0)))
    assert after.load == job.load


def test_what_is_told_counts_from_the_first_view_on() -> None:
    job = cluster().start(s0=100.0, s1=100.0, s2=100.0, s3=50.0)
    assert spread(job.load) == [20, 20, 20, 10]


def test_a_file_tells_of_hosts_by_name_and_by_address_and_a_members_own_word_counts_before_it() -> None:
    facts = HostFacts("left", 50.0)
    topology = Topology({"s3": facts, "10.0.0.7": facts})
    assert topology.told(Member("x", "s3")).near == "left"
    told = topology.told(Member("x", "else", "10.0.0.7:4700", near="right"))
    assert (told.near, told.link_mbit) == ("right", 50.0)
    job = cluster(msgspec.structs.replace(TERMS, topology=topology)).start(s0=100.0, s1=100.0, s2=100.0)
    assert spread(job.load) == [20, 20, 20, 10]


def test_backups_are_in_the_other_rack_that_a_file_tells_of() -> None:
    hosts = {server: HostFacts(rack="left" if server in ("s0", "s1") else "right") for server in SERVERS}
    job = cluster(msgspec.structs.replace(TERMS, topology=Topology(hosts), replication=2)).start()
    view = job.machine.view
    assert all(hosts[view.backup[shard]].rack != hosts[home].rack for shard, home in view.primary.items())


def test_a_server_that_comes_later_is_taken_for_the_median_one() -> None:
    job = cluster().start()
    job.links["s3"] = 0.5
    job.beats(20)
    job.run(job.machine.handle(events.Joined(Member("s4", "s4", "s4:1"), "server")))
    assert job.machine.view.speeds["s3"] == 0.5
    assert job.load["s4"] == pytest.approx(70 / 4.5, abs=2)


def test_what_was_measured_of_a_server_goes_with_it() -> None:
    job = cluster(msgspec.structs.replace(TERMS, replication=2)).start()
    job.links["s3"] = 0.5
    job.beats(20)
    job.run(job.machine.handle(events.Left("s3", "killed")))
    assert "s3" not in job.machine.view.speeds
    job.run(job.machine.handle(events.Joined(Member("s3", "s3", "s3:1"), "server")))
    assert job.machine.view.speeds.get("s3", 1.0) == 1.0
