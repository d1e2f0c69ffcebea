"""The client's machine of a store against the servers' real one: links break, primaries die, each push counts once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from rallypoint.core.keys import NEWEST, OWN, Effect, KeyMachine, SendInitial, SendPull, SendPush, SendWant
from rallypoint.core.policy import Async, BoundedStaleness, ServerPolicy, Sync
from rallypoint.core.shard import effects as fx
from rallypoint.core.shard import events as ev
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.view import Assignment, Member, View, ViewNumber

STEPS, CONTRIBUTORS = 4, 3
POLICIES = [Sync(), Async(), BoundedStaleness(1)]


def view(
    count: int, home: str, assigned: dict[str, tuple[int, ...]], *, generation: int = 1, moved: int = 1,
    origin: str = "",
) -> View:  # fmt: skip
    number = ViewNumber(1, count)
    return View(
        number=number, generation=ViewNumber(1, generation), workers=tuple(Member(w, "", "", 1) for w in assigned),
        servers=(Member(home, "", "", 1),), assignments=(Assignment(0, assigned),), primary={0: home},
        homed={0: ViewNumber(1, moved)}, contributors=assigned, origin=origin,
    )  # fmt: skip


def linked(machine: KeyMachine) -> list[Effect]:
    return [*machine.adopt(view(1, "s", {"w": (0, 1)})), *machine.link_up("s")]


def test_a_first_value_is_sent_again_until_a_version_is_there() -> None:
    machine = KeyMachine("w", 1)
    linked(machine)
    assert machine.begin(0) == [SendInitial(0, "s"), SendPull(0, OWN, NEWEST, "s")]
    machine.link_lost("s")
    assert machine.link_up("s") == [SendInitial(0, "s"), SendPull(0, OWN, NEWEST, "s")]
    machine.answered(0, OWN, 0)
    machine.link_lost("s")
    assert machine.link_up("s") == []


def test_a_push_waits_for_a_first_value_and_counts_when_its_round_is_published() -> None:
    machine = KeyMachine("w", 1)
    linked(machine)
    assert machine.push(0, 1, 0) == [SendPull(0, OWN, NEWEST, "s")]
    _, effects = machine.answered(0, OWN, 0)
    assert effects == [SendPush(0, 1, 0, "s"), SendPull(0, OWN, 1, "s")]
    assert machine.lines[0].pushes
    machine.answered(0, OWN, 1)
    assert not machine.lines[0].pushes
    assert machine.push(0, 1, 0) == [], "it counts already"


def test_a_streaming_push_whose_contribution_was_lost_is_sent_again() -> None:
    machine = KeyMachine("w", 1, by_clocks=True)
    linked(machine)
    machine.replied(0, 0, 0, 0)
    assert machine.push(0, 0, 0) == [SendPush(0, 0, 0, "s")], "a push asks by itself"
    assert machine.replied(0, 0, 0, 0) == [SendPush(0, 0, 0, "s")]
    assert machine.replied(0, 0, 1, 1) == []
    assert not machine.lines[0].pushes


def test_a_contributor_that_has_to_wait_does_not_keep_others_from_being_heard_of() -> None:
    machine = KeyMachine("w", 1, by_clocks=True)
    linked(machine)
    machine.replied(0, 0, 0, 0)
    machine.push(0, 0, 0)
    machine.push(0, 1, 1)  # the server keeps this question only, and makes contributor 1 wait
    assert machine.to_wait(1) == [SendWant(0, 0, "s")]
    assert machine.replied(0, 0, 1, 1) == [SendWant(0, 1, "s")]
    assert machine.to_wait(1) == [], "nobody else to ask for: no ping-pong"


def test_a_newest_value_is_never_older_than_the_question() -> None:
    machine = KeyMachine("w", 1)
    linked(machine)
    machine.need(0, 7, NEWEST)
    assert machine.answered(0, 6, 3) == ([], [])
    assert machine.answered(0, 7, 3)[0] == [7]


def test_a_version_that_is_not_kept_any_more_is_replaced_by_the_newest() -> None:
    machine = KeyMachine("w", 1)
    linked(machine)
    machine.need(0, 7, 2)
    done, effects = machine.answered(0, 7, 2, kept=False)
    assert (done, effects) == ([], [SendPull(0, 7, NEWEST, "s")])


def test_under_rounds_a_pull_of_a_version_gets_that_version_as_long_as_it_is_kept() -> None:
    """Else who makes a dead worker's push again would read what comes after it, and push something else."""
    machine = KeyMachine("w", 1)
    linked(machine)
    machine.need(0, 1, NEWEST)
    machine.answered(0, 1, 5)
    machine.push(0, 1, 5)  # asks for version 6
    assert machine.need(0, 2, 5) == [SendPull(0, 2, 5, "s")]
    assert machine.answered(0, OWN, 6)[0] == []
    assert machine.answered(0, 2, 5)[0] == [2]
    streaming = KeyMachine("w", 1, by_clocks=True)
    linked(streaming)
    streaming.need(0, 1, 5)
    streaming.need(0, 2, 6)
    assert streaming.answered(0, 2, 6)[0] == [1, 2]


def test_a_new_generation_forgets_what_was_wanted() -> None:
    machine = KeyMachine("w", 1)
    linked(machine)
    machine.answered(0, OWN, 5)
    machine.push(0, 0, 5)
    machine.need(0, 7, NEWEST)
    machine.link_lost("s")
    machine.adopt(view(2, "s", {"w": (0, 1)}, generation=2))
    assert machine.link_up("s") == []
    assert machine.next_step(0, 0) is None


class Play:
    """Two workers, one shard. Frames travel in order on each link; a break loses those that are on their way."""

    def __init__(self, policy: ServerPolicy, seed: int) -> None:
        self.random, self.policy = random.Random(seed), policy
        self.workers = {w: KeyMachine(w, 1, by_clocks=policy.streaming) for w in ("a", "b")}
        self.views = 0
        self.up: dict[str, list[Effect]] = {w: [] for w in self.workers}
        self.down: dict[str, list[Callable[[KeyMachine], list[Effect]]]] = {w: [] for w in self.workers}
        self.pulls: dict[str, tuple[int, int]] = {}
        self.tickets: dict[int, tuple[int, int]] = {}
        self.pending: list[int] = []
        self.counted: Counter[tuple[int, int]] = Counter()
        self.shard = ShardMachine(policy, CONTRIBUTORS, rounds=STEPS)
        self.fail_over({"a": (0, 1), "b": (2,)})
        for worker, machine in self.workers.items():
            self.take(worker, machine.begin(0))

    def fail_over(self, assigned: dict[str, tuple[int, ...]]) -> None:
        """The primary dies. The backup holds what was published, and nothing of the sum in progress (I4)."""
        before, self.shard = self.shard, ShardMachine(self.policy, CONTRIBUTORS, rounds=STEPS)
        if before.version >= 0:
            self.shard.handle(ev.Loaded(before.version, tuple(before.clocks)))
        self.pending.clear()
        self.pulls.clear()
        self.views += 1
        for worker, machine in self.workers.items():
            self.break_link(worker, machine)
            machine.adopt(view(self.views, f"s{self.views}", assigned, moved=self.views))
            self.take(worker, machine.link_up(f"s{self.views}"))

    def break_link(self, worker: str, machine: KeyMachine) -> None:
        self.up[worker].clear()
        self.down[worker].clear()
        self.pulls.pop(worker, None)
        self.shard.handle(ev.Unfollowed(worker))
        machine.link_lost(f"s{machine.view.number.count}" if machine.view else "")

    def take(self, worker: str, effects: list[Effect]) -> None:
        self.workers[worker].validate()
        self.up[worker] += effects

    def serve(self, worker: str, frame: Effect) -> None:
        match frame:
            case SendInitial():
                self.run(self.shard.handle(ev.Initialise(-1)))
            case SendPush(contributor=contributor, step=step):
                ticket = len(self.tickets)
                self.tickets[ticket] = (step, contributor)
                self.run(self.shard.handle(ev.Contribute(step, contributor, 1.0, ticket)))
                if self.policy.streaming:
                    self.run(self.shard.handle(ev.Want(worker, contributor)))
            case SendWant(contributor=contributor):
                self.run(self.shard.handle(ev.Want(worker, contributor)))
            case SendPull(number=number, version=version):
                self.pulls[worker] = (number, version)
        self.shard.validate()
        self.answer()

    def run(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Take(ticket=ticket) | fx.Add(ticket=ticket):
                    self.pending.append(ticket)
                case fx.Apply():
                    self.counted.update(self.tickets[ticket] for ticket in self.pending)
                    self.pending.clear()
                case fx.Gather():
                    self.run(self.shard.handle(ev.Fold()))
                case fx.Reply(follower=w, replica=c, clock=clock, version=v):
                    self.down[w].append(lambda m, c=c, clock=clock, v=v: m.replied(0, c, clock, v))
                case fx.TellWait(follower=w, replica=c):
                    self.down[w].append(lambda m, c=c: m.to_wait(c))

    def answer(self) -> None:
        for worker, (number, version) in list(self.pulls.items()):
            if (at := self.shard.published) >= max(version, 0):
                del self.pulls[worker]
                kept, told = version == NEWEST or at - version < 2, at if version == NEWEST else version
                self.down[worker].append(lambda m, n=number, v=told, k=kept: m.answered(0, n, v, kept=k)[1])

    def push_what_is_due(self, worker: str, machine: KeyMachine) -> None:
        self.take(worker, machine.watch([0], range(CONTRIBUTORS)))
        for contributor in machine.contributors:
            step = machine.next_step(0, contributor)
            if step is not None and step < STEPS and contributor not in machine.lines[0].pushes:
                self.take(worker, machine.push(0, contributor, step))

    def go_on(self, *, quiet: bool) -> None:
        worker = self.random.choice(["a", "b"])
        machine, chance = self.workers[worker], self.random.random()
        if not quiet and chance < 0.03:
            self.break_link(worker, machine)
            self.take(worker, machine.link_up(f"s{self.views}"))
        elif not quiet and chance < 0.05:
            self.fail_over(self.random.choice([{"a": (0, 1), "b": (2,)}, {"a": (), "b": (0, 1, 2)}]))
        elif chance < 0.4 and self.up[worker]:
            self.serve(worker, self.up[worker].pop(0))
        elif chance < 0.7 and self.down[worker]:
            self.take(worker, self.down[worker].pop(0)(machine))
        else:
            self.push_what_is_due(worker, machine)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.some("?-*")
@pytest.mark.parametrize("seed", range(60))
def test_every_push_counts_once_whatever_breaks(policy: ServerPolicy, seed: int) -> None:
    play = Play(policy, seed)
    for _ in range(300):
        play.go_on(quiet=False)
    for _ in range(3000):
        play.go_on(quiet=True)
    wanted = {(step, contributor) for step in range(STEPS) for contributor in range(CONTRIBUTORS)}
    assert play.counted == Counter(wanted)
    assert all(not machine.lines[0].pushes for machine in play.workers.values())


def test_a_worker_that_was_given_up_and_came_back_sends_its_push_again() -> None:
    """Servers dropped what came while the view did not have it."""
    machine = KeyMachine("w", 1)
    linked(machine)
    machine.answered(0, OWN, 0)
    assert SendPush(0, 1, 0, "s") in machine.push(0, 1, 0)
    back = msgspec.structs.replace(view(3, "s", {"w": (0, 1)}), workers=(Member("w", "", "", 2),))
    assert machine.adopt(back) == [SendPush(0, 1, 0, "s")]


def test_a_push_of_another_workers_contributor_is_not_sent_again_and_again() -> None:
    machine = KeyMachine("w", 1, by_clocks=True)
    linked(machine)
    machine.replied(0, 2, 0, 0)
    assert machine.push(0, 2, 0) == []
    assert machine.watch([0], [2]) == [SendWant(0, 2, "s")], "it asks how far that contributor is"
    assert machine.replied(0, 2, 0, 0) == [], "it does not ask again by itself"
    machine.replied(0, 2, 1, 1)
    assert machine.counts([0], 2)


def test_who_joins_while_servers_read_the_snapshot_says_no_first_value() -> None:
    machine = KeyMachine("w", 1)
    machine.adopt(view(1, "s", {"w": (0, 1)}, origin="snapshot"))
    machine.link_up("s")
    assert machine.begin(0) == [SendPull(0, OWN, NEWEST, "s")]


def test_an_older_push_counts_while_the_next_one_is_on_its_way() -> None:
    machine = KeyMachine("w", 1)
    linked(machine)
    machine.answered(0, OWN, 1)
    machine.push(0, 0, 1)
    assert machine.counts([0], 0, step=0)
    assert not machine.counts([0], 0, step=1)


def test_rows_of_a_table_answer_no_other_pull() -> None:
    machine = KeyMachine("w", 1, tables=frozenset({0}))
    linked(machine)
    machine.need(0, 7, 1)
    machine.need(0, 8, 1)
    done, effects = machine.answered(0, 7, 1)
    assert (done, effects) == ([7], [SendPull(0, 8, 1, "s")])


def test_how_far_a_contributor_is_is_asked_anew_when_it_becomes_this_workers() -> None:
    """Another worker has pushed for it since: `store.step` would name a push that counts already."""
    machine = KeyMachine("w", 1, by_clocks=True)
    linked(machine)
    machine.watch([0], [2])
    machine.replied(0, 2, 3, 9)
    assert machine.adopt(view(2, "s", {"w": (0, 1, 2)})) == [SendWant(0, 2, "s")]
    assert machine.next_step(0, 2) is None
    machine.replied(0, 2, 7, 20)
    assert machine.next_step(0, 2) == 7


def test_a_first_value_that_is_given_twice_is_said_again_in_a_generation_that_begins_from_no_snapshot() -> None:
    machine = KeyMachine("w", 1)
    linked(machine)
    machine.begin(0)
    machine.answered(0, OWN, 0)
    machine.begin(0)
    machine.link_lost("s")
    machine.adopt(view(2, "s", {"w": (0, 1)}, generation=2))
    assert machine.link_up("s") == [SendInitial(0, "s"), SendPull(0, OWN, NEWEST, "s")]


def test_threads_that_pull_the_newest_rows_again_and_again_keep_nobody_waiting_for_a_version_that_exists() -> None:
    machine = KeyMachine("w", 1, tables=frozenset({0}))
    linked(machine)
    machine.answered(0, OWN, 5)
    machine.need(0, 1, NEWEST)
    machine.need(0, 2, 4)
    machine.need(0, 3, NEWEST)
    assert machine.answered(0, 1, 5) == ([1], [SendPull(0, 2, 4, "s")])


def test_only_pushes_that_servers_take_from_this_worker_are_waited_for_before_it_leaves() -> None:
    machine = KeyMachine("w", 1)
    linked(machine)
    machine.answered(0, OWN, 0)
    machine.push(0, 1, 0)
    assert machine.unfinished() == [(0, 1, 0)]
    machine.push(0, 2, 0)  # another worker's
    machine.adopt(view(2, "s", {"w": (0,), "v": (1, 2)}))
    assert machine.unfinished() == []
