"""The worker's machine of a job of sums, event by event: each shard goes on by itself."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rallypoint.core.view import Assignment, Member, View, ViewNumber
from rallypoint.core.worker import slots
from rallypoint.core.worker.rolling import RollingMachine
from rallypoint.core.worker.slots import Arriving, DropArriving, Effect, LinkLost, LinkUp, Send, Viewed

V1 = ViewNumber(1, 1)


def _view(
    count: int = 1, *, generation: int = 1, workers: Mapping[str, int] | None = None, homes: str = "0101",
    uploader: str = "other",
) -> View:  # fmt: skip
    born = {"me": 4, "other": 5} if workers is None else workers
    return View(
        number=ViewNumber(1, count), generation=ViewNumber(1, generation),
        workers=tuple(Member(id, "h", incarnation=n) for id, n in born.items()),
        servers=tuple(Member(f"s{n}", "h", f"s{n}:1", n + 1) for n in range(2)),
        assignments=(Assignment(0, {"me": (0,), "other": (1,)}),),
        primary={shard: f"s{home}" for shard, home in enumerate(homes)}, uploader=uploader,
        contributors={"me": (0,), "other": (1,)},
    )  # fmt: skip


class _Bench:
    """A machine of worker number 1; after each event its invariants hold."""

    def __init__(self, *, begun: bool = True, uploader: str = "other") -> None:
        self.machine = RollingMachine("me", 4, frozenset(), 1000)
        self.machine.number = 1
        self.say(Viewed(_view(uploader=uploader)))
        for server in ("s0", "s1"):
            assert self.say(LinkUp(server)) == [slots.Follow(server)]
        for shard in range(4) if begun else ():
            self.arrives(shard, 0)
            self.machine.taken(shard)

    def say(self, event: slots.Event) -> list[Effect]:
        effects = self.machine.handle(event)
        self.machine.validate()
        return effects

    def push(self, shard: int) -> Send:
        assert self.machine.may_fill(shard)
        self.machine.fill(shard)
        (send,) = self.say(slots.Filled(shard))
        assert isinstance(send, Send)
        return send

    def sent(self, send: Send) -> list[Effect]:
        return self.say(slots.SlotSent(send.shard, send.serial))

    def arrives(self, shard: int, version: int) -> None:
        assert self.say(Arriving(shard, version, V1)) == [slots.Land(shard)]
        self.say(slots.Landed(shard))


def test_a_shard_s_version_is_the_answer_to_its_own_contribution_whatever_the_others_do() -> None:
    bench = _Bench()
    for version in range(3):
        send = bench.push(2)
        assert (send.step, send.replica, send.server) == (version, 1, "s0")
        bench.sent(send)
        assert not bench.machine.may_fill(2)
        bench.arrives(2, version + 1)
        assert bench.machine.landed_shards == [2]
        bench.machine.taken(2)
    assert bench.machine.at == [0, 0, 3, 0]


def test_nothing_is_sent_before_the_first_version_of_the_shard_is_here() -> None:
    bench = _Bench(begun=False)
    assert not bench.machine.may_fill(0)
    bench.arrives(0, 0)
    assert not bench.machine.may_fill(0)  # it is in the slot
    bench.machine.taken(0)
    assert bench.machine.may_fill(0)
    assert not bench.machine.may_fill(1)


def test_what_a_lost_link_may_have_taken_with_it_is_sent_again() -> None:
    bench = _Bench()
    queued, waiting = bench.push(1), bench.push(3)
    bench.sent(waiting)
    kept = bench.push(0)
    bench.say(LinkLost("s1"))
    assert not bench.machine.may_fill(1)
    bench.say(LinkUp("s1"))
    again = [bench.push(shard) for shard in (1, 3)]
    assert [send.step for send in again] == [0, 0]
    assert bench.sent(queued) == []  # of the lost link: the slot holds something newer
    assert bench.machine.slots[1] is slots.Slot.QUEUED
    assert bench.machine.slots[0] is slots.Slot.QUEUED
    bench.sent(kept)
    assert not bench.machine.may_fill(0)


def test_what_a_replaced_server_had_is_sent_to_the_one_in_its_place() -> None:
    bench = _Bench()
    bench.sent(bench.push(1))
    bench.say(LinkLost("s1"))
    bench.say(Viewed(_view(2, homes="0000")))
    assert bench.push(1).server == "s0"


def test_a_version_that_comes_while_its_contribution_waits_to_be_sent_again_is_fetched_afterwards() -> None:
    bench = _Bench()
    bench.sent(bench.push(1))
    bench.say(LinkLost("s1"))
    bench.say(LinkUp("s1"))
    again = bench.push(1)  # the round is over there: its version is on its way
    assert bench.say(Arriving(1, 1, V1)) == [DropArriving(1)]
    assert bench.sent(again) == [slots.Fetch(1, 1, "s1")]
    bench.arrives(1, 1)
    bench.machine.taken(1)
    assert bench.machine.at[1] == 1
    assert bench.machine.may_fill(1)


def test_a_version_that_lands_is_not_overwritten_and_one_that_is_known_is_waited_for() -> None:
    bench = _Bench()
    bench.sent(bench.push(0))
    bench.arrives(0, 1)
    assert bench.say(Arriving(0, 1, V1)) == [DropArriving(0)]  # once more, after a link came back
    assert not bench.machine.may_fill(0)


@pytest.mark.parametrize("workers", [{"me": 4}, {"me": 4, "other": 6}], ids=["gone", "gone and come back"])
def test_when_a_worker_is_gone_nothing_goes_on_and_the_sentence_names_it(workers: dict[str, int]) -> None:
    bench = _Bench()
    bench.say(Viewed(_view(2, workers=workers)))
    assert bench.machine.broken == "other is gone"
    assert not bench.machine.may_fill(0)


def test_when_servers_have_lost_sums_nothing_goes_on() -> None:
    bench = _Bench()
    bench.say(Viewed(_view(2, generation=2)))
    assert "lost sums" in bench.machine.broken


def test_a_worker_that_comes_after_the_first_sums_says_so() -> None:
    bench = _Bench(begun=False)
    assert bench.say(Arriving(0, 3, V1))[0] == DropArriving(0)
    assert "too late" in bench.machine.broken


def test_what_belongs_to_an_older_generation_is_dropped() -> None:
    bench = _Bench()
    assert bench.say(Arriving(0, 1, ViewNumber(0, 1))) == [DropArriving(0)]
