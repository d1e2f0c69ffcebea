"""A memory goes where its replica goes: played on the two pure machines, with every interleaving that hypothesis finds.

In this play a memory is the list of the steps that are in it. A contribution to step t is exact if it was made from a
memory of all steps before t; it is *doubled* if it was made from one that other contributions have come after.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.core.placing.speeds import Speeds
from rallypoint.core.placing.view_change import following_assignments
from rallypoint.core.shard.relay import Relay, StateAnswer
from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.core.worker.handover import CodecStateCustody, Paths
from rallypoint.core.worker.slots import Effect, Give, Recall, ReleaseState

REPLICAS, SHARDS, ROUNDS, MOST_WORKERS = 3, 2, 12, 4
HOMES = {shard: f"server{shard}" for shard in range(SHARDS)}
Lineage = tuple[int, ...]


@dataclass
class Shard:
    """A primary of one shard: sums R contributions a round, whose memories it relays."""

    index: int
    view: View
    version: int = 0
    got: set[int] = field(default_factory=set)
    accepted: dict[tuple[int, int], Lineage] = field(default_factory=dict)  # (step, replica) -> what it was made from
    relay: Relay[Lineage] = field(init=False)

    def __post_init__(self) -> None:
        self.relay = Relay(HOMES[self.index])
        self.relay.adopt(self.view)

    def upcoming(self, replica: int) -> int:
        return self.version + (replica in self.got)

    def contribute(self, step: int, replica: int, worker: str, lineage: Lineage) -> None:
        self.relay.contributed(self.index, replica, step, worker, self.upcoming(replica))
        if step != self.version or replica in self.got:
            return
        self.accepted[step, replica] = lineage
        self.got.add(replica)
        if len(self.got) == REPLICAS:
            self.version, self.got = self.version + 1, set()


@dataclass
class Worker:
    name: str
    view: View
    step: int = 0
    leaving: bool = False
    handover: CodecStateCustody = field(default_factory=lambda: CodecStateCustody(tuple(range(SHARDS))))
    codec_states: dict[tuple[int, int], tuple[int, Lineage]] = field(default_factory=dict)
    given: dict[tuple[int, int], tuple[int, Lineage] | None] = field(default_factory=dict)
    delivered: set[tuple[int, int]] = field(default_factory=set)  # (shard, replica) of this step
    computing: tuple[int, list[int]] | None = None
    connections: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HOMES.values(), 0))
    up: dict[int, deque[Any]] = field(default_factory=lambda: {shard: deque() for shard in range(SHARDS)})
    down: dict[int, deque[Any]] = field(default_factory=lambda: {shard: deque() for shard in range(SHARDS)})

    @property
    def paths(self) -> Paths:
        return Paths(HOMES, self.connections)

    @property
    def gone(self) -> bool:
        idle = self.computing is None and not self.view.takes_part(self.name, self.step)
        return self.leaving and idle and self.handover.settled

    def send(self, shard: int, *frame: Any) -> None:
        self.up[shard].append((self.view.number, *frame))

    def hand_over(self, *, back: bool = False) -> None:
        own = () if back else self.view.replicas_of(self.name, self.step)
        keeps = {*own, *([self.computing[0]] if self.computing else [])}
        self.run(self.handover.keep_only(keeps, self.paths))

    def run(self, effects: list[Effect]) -> bool:
        """Run these effects; are there any?"""
        for effect in effects:
            match effect:
                case ReleaseState(shard=shard, replica=replica):
                    self.given[shard, replica] = self.codec_states.pop((shard, replica), None)
                case Give(shard=shard, replica=replica):
                    self.send(shard, "memory", replica, self.given[shard, replica])
                case Recall(shard=shard, replica=replica):
                    self.send(shard, "recall", replica)
        return bool(effects)

    def begin(self) -> bool:
        """Go on to the next replica, or ask for what is missing of it; is there anything new?"""
        for replica in self.view.replicas_of(self.name,
            self.step) if self.computing is None and self.step < ROUNDS else ():
            left = [shard for shard in range(SHARDS) if (shard, replica) not in self.delivered]
            if not left:
                continue
            news = self.run(self.handover.prepare(replica, self.paths))
            if not self.handover.ready(replica):
                return news
            self.computing = (replica, left)
            return True
        return False

    def push(self) -> bool:
        """One more shard of the replica that is being computed."""
        if self.computing is None:
            return False
        replica, left = self.computing
        shard = left.pop(0)
        last, lineage = self.codec_states.get((shard, replica), (-1, ()))
        if last < self.step:
            lineage = (*lineage, self.step)
            self.codec_states[shard, replica] = (self.step, lineage)
        self.delivered.add((shard, replica))
        self.send(shard, "push", replica, self.step, lineage)
        if not left:
            self.computing = None
            self.hand_over()
        return True

    def install(self, version: int) -> bool:
        if self.computing is not None or version <= self.step:
            return False
        self.step, self.delivered = version, set()
        self.hand_over()
        return True

    def turn(self, view: View) -> None:
        incarnations = [member.incarnation for known in (self.view,
            view) for member in known.workers if member.id == self.name]
        self.view = view
        self.hand_over(back=len(set(incarnations)) > 1)

    def receive(self, shard: int, what: str, replica: int, step: int, lineage: Lineage | None) -> None:
        if what == "taken":
            self.handover.taken(shard, replica)
            self.given.pop((shard, replica), None)
        elif self.handover.answered(shard, replica):
            self.codec_states.pop((shard, replica), None)
            if lineage is not None:
                self.codec_states[shard, replica] = (step, lineage)

    def relink(self, shard: int) -> None:
        """The link to a shard's server breaks, with all that is under way, and is made again."""
        self.up[shard].clear()
        self.down[shard].clear()
        self.connections[HOMES[shard]] += 1
        self.delivered = {key for key in self.delivered if key[0] != shard}
        self.hand_over()


class Play:
    """The whole job; `kills` remembers whether anything was lost on purpose."""

    def __init__(self) -> None:
        self.born = 0
        self.active: list[str] = []
        self.members: dict[str, Member] = {}
        self.views: list[View] = []
        self.workers: dict[str, Worker] = {}
        self.killed = False
        self.views.append(View(ViewNumber(1, 0), ViewNumber(1, 0), (), (), (), HOMES))
        self.shards = [Shard(shard, self.views[0]) for shard in range(SHARDS)]
        self.join()
        self.join()

    @property
    def version(self) -> int:
        return min(shard.version for shard in self.shards)

    def publish(self) -> None:
        before = self.views[-1]
        furthest = max((w.step for w in self.workers.values()), default=0) - 1
        assigned = before.assigned(furthest + 1)
        assignments: tuple[Assignment, ...] = ()
        if self.active:
            assignments = following_assignments(assigned, self.active, REPLICAS, furthest, Speeds())
        number = ViewNumber(1, len(self.views))
        self.views.append(View(number, ViewNumber(1, 0), tuple(self.members.values()), (), assignments, HOMES))

    # ---- what may happen ----

    def join(self) -> None:
        if len(self.members) == MOST_WORKERS:
            return
        self.born += 1
        name = f"worker{self.born}"
        self.active.append(name)
        self.members[name] = Member(name, "here", incarnation=self.born)
        self.publish()
        self.workers[name] = Worker(name, self.views[-1], step=self.version)

    def leave(self, worker: Worker) -> None:
        if len(self.active) > 1 and worker.name in self.active:
            worker.leaving = True
            self.active.remove(worker.name)
            self.publish()

    def rest(self, worker: Worker) -> None:
        """It is to stand by (a resize), or to compute again."""
        if worker.leaving:
            return
        if worker.name not in self.active:
            self.active.append(worker.name)
        elif len(self.active) > 1:
            self.active.remove(worker.name)
        self.publish()

    def remove(self, worker: Worker) -> None:
        del self.workers[worker.name], self.members[worker.name]
        if worker.name in self.active:
            self.active.remove(worker.name)
        self.publish()

    def kill(self, worker: Worker) -> None:
        if len(self.active) > 1 or worker.name not in self.active:
            self.killed = True
            self.remove(worker)

    def given_up(self, worker: Worker) -> None:
        """It is given up for its silence, and back at once as somebody new; it may hear only of the latter."""
        if len(self.active) > 1 and worker.name in self.active:
            self.killed = True
            self.active.remove(worker.name)
            del self.members[worker.name]
            self.publish()
            self.born += 1
            self.active.append(worker.name)
            self.members[worker.name] = Member(worker.name, "here", incarnation=self.born)
            self.publish()

    def go(self, worker: Worker) -> bool:
        if worker.gone:
            self.remove(worker)
        return worker.gone

    def deliver_up(self, worker: Worker, shard: Shard) -> bool:
        if not worker.up[shard.index] or worker.up[shard.index][0][0] > shard.view.number:
            return False
        _, what, replica, *rest = worker.up[shard.index].popleft()
        match what:
            case "push":
                shard.contribute(rest[0], replica, worker.name, rest[1])
            case "memory":
                worker.down[shard.index].append(("taken", replica, 0, None))
                upcoming = shard.upcoming(replica)
                self.tell(shard.relay.given(shard.index, replica, worker.name, upcoming, rest[0]))
            case "recall":
                self.tell(shard.relay.recalled(shard.index, replica, worker.name, shard.upcoming(replica)))
        return True

    def tell(self, answers: list[StateAnswer[Lineage]]) -> None:
        for name, shard, replica, step, lineage in answers:
            if name in self.workers:
                self.workers[name].down[shard].append(("answer", replica, step, lineage))

    def deliver_down(self, worker: Worker, shard: int) -> bool:
        if not worker.down[shard]:
            return False
        worker.receive(shard, *worker.down[shard].popleft())
        return True

    def turn_worker(self, worker: Worker, hop: int) -> bool:
        """It hears of a later view, of the newest or of one in between."""
        known = worker.view.number.count
        if known + 1 >= len(self.views):
            return False
        worker.turn(self.views[min(len(self.views) - 1, known + hop)])
        return True

    def turn_shard(self, shard: Shard, hop: int) -> bool:
        known = shard.view.number.count
        if known + 1 >= len(self.views):
            return False
        shard.view = self.views[min(len(self.views) - 1, known + hop)]
        self.tell(shard.relay.adopt(shard.view))
        return True

    def play(self, action: str, who: int, where: int) -> None:
        workers = list(self.workers.values())
        worker, shard = workers[who % len(workers)], self.shards[where]
        match action:
            case "join":
                self.join()
            case "leave":
                self.leave(worker)
            case "rest":
                self.rest(worker)
            case "astray":
                self.given_up(worker)
            case "kill":
                self.kill(worker)
            case "break":
                worker.relink(where)
            case "begin":
                worker.begin()
            case "push":
                worker.push()
            case "install":
                worker.install(self.version)
            case "up":
                self.deliver_up(worker, shard)
            case "down":
                self.deliver_down(worker, where)
            case "turn worker":
                self.turn_worker(worker, 1 + where)
            case "turn shard":
                self.turn_shard(shard, 1 + who)

    def finish(self) -> None:
        """Let everything that is under way come to its end."""
        busy = True
        while busy:
            turned = [self.turn_shard(shard, 1) for shard in self.shards]
            busy = any(turned)
            for worker in list(self.workers.values()):
                for shard in self.shards:
                    busy |= self.deliver_up(worker, shard) | self.deliver_down(worker, shard.index)
                busy |= self.turn_worker(worker, 1) | worker.install(self.version) | worker.begin() | worker.push()
                busy |= self.go(worker)

    def check(self) -> None:
        assert [shard.version for shard in self.shards] == [ROUNDS] * SHARDS, "somebody waits for ever"
        for shard in self.shards:
            for replica in range(REPLICAS):
                for step in range(ROUNDS):
                    lineage = shard.accepted[step, replica]
                    if not self.killed:
                        assert lineage == tuple(range(step + 1)), "nothing is lost while its owner lives"
                    assert lineage[-1] == step
                    assert list(lineage) == list(range(lineage[0], step + 1)), "a memory has all since its beginning"
        assert all(not worker.handover._giving for worker in self.workers.values())


WORK = ["begin", "push", "push", "push", "install", "up", "up", "up", "down", "down", "turn worker", "turn shard"]
GO_ON = settings(max_examples=300)


def played(seed: int, *faults: str) -> Play:
    """A play of random actions, in which something unusual happens more or less often, brought to its end."""
    random, play = Random(seed), Play()
    seldom = random.choice([0.01, 0.03, 0.1])
    lazy = random.sample(WORK, random.randrange(3))  # what goes slowly this time
    for _ in range(random.randrange(1500)):
        action = random.choice(faults if random.random() < seldom else WORK)
        if action not in lazy or random.random() < 0.2:
            play.play(action, random.randrange(MOST_WORKERS), random.randrange(SHARDS))
    play.finish()
    play.check()
    return play


@pytest.mark.slow
@GO_ON
@given(st.integers(0))
def test_whoever_comes_and_goes_each_contribution_is_made_from_all_before_it(seed: int) -> None:
    assert not played(seed, "join", "leave", "rest", "rest").killed


@pytest.mark.slow
@GO_ON
@given(st.integers(0))
def test_links_that_break_lose_no_codec_state(seed: int) -> None:
    assert not played(seed, "join", "leave", "rest", "rest", "break").killed


@pytest.mark.slow
@GO_ON
@given(st.integers(0))
def test_with_its_owner_killed_a_replica_begins_from_nothing_and_nobody_waits_for_ever(seed: int) -> None:
    played(seed, "join", "join", "leave", "rest", "break", "kill", "astray")
