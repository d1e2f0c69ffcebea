"""A member that has the token can say only what it can know: else it is refused, or ignored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_shell import STEPS, Play

from rallypoint.coordinator import acts, inbox
from rallypoint.coordinator.claims import Claims, Early
from rallypoint.core.protocol import (
    Accounted,
    Applied,
    Capture,
    CaughtUp,
    Contributed,
    Done,
    Evaluated,
    Message,
    Metrics,
    NotStored,
    Propose,
    Report,
    Resize,
    Say,
    Skipped,
    StepDone,
    Stored,
    Updated,
    decode,
    encode,
)
from rallypoint.core.shard.clip import Measure
from rallypoint.core.view import Assignment, Lease, StandingOrders, View, ViewNumber
from rallypoint.errors import ProtocolError

BIG, NOW = 1 << 63, ViewNumber(1, 4)


@pytest.mark.parametrize("message", [
    Report(0, 0, 0.0, 1.0, BIG), Report(0, 0, 0.0, 1.0, -1), Report(1 << 32, 0, 0.0, 1.0, 1),
    Report(-1, 0, 0.0, 1.0, 1), Report(0, -1, 0.0, 1.0, 1), Report(0, 1 << 32, 0.0, 1.0, 1),
    Report(0, 0, 0.0, 0.0, 1), Report(0, 0, 0.0, float("inf"), 1), Report(0, 0, 0.0, float("nan"), 1),
    Report(0, 0, 0.0, 1.0, 1, -1.0), Report(0, 0, 0.0, 1.0, 1, float("nan")),
    Report(0, 0, 0.0, 1.0, 1, 0.0, ViewNumber(1, 1 << 32)), Done(ViewNumber(1 << 32, 0)), Done(ViewNumber(-1, 0)),
    Applied(BIG, 1, 0.0), Applied(0, BIG, 0.0), Applied(0, 1, float("inf")), Applied(0, 1, 0.0, {"w": float("nan")}),
    Applied(0, 1, 0.0, {f"w{n}": 0.0 for n in range(10_001)}), Applied(0, 1, 0.0, {"w" * 201: 0.0}),
    Accounted(BIG, 0, 0, 0), Accounted(0, 0, 0, -1), Accounted(0, 0, 0, 0, {-1: 1}), Accounted(0, 0, 0, 0, {1: BIG}),
    CaughtUp({-1: NOW}), CaughtUp({0: ViewNumber(-1, 0)}), Stored("s", {"f": -1}, {}), Stored("s", {"f": BIG}, {}),
    Stored("s", {}, {-1: ("f", 0, 0, "")}), Stored("s", {}, {0: ("f", -1, 0, "")}), NotStored("s", "why", BIG),
    NotStored("s", "why", -2), Evaluated(BIG, NOW, {}), Evaluated(-1, NOW, {}), Metrics(0, {"v" * 201: 1.0}),
    Evaluated(0, NOW, {f"v{n}": 0.0 for n in range(1001)}), Skipped(BIG, ()), Skipped(0, (-1,)),
    Skipped(0, (0,) * 65_537),
    Resize(BIG), Resize(-1), Resize(1, BIG),
], ids=lambda message: str(message)[:60])  # fmt: skip
def test_a_value_that_no_honest_member_sends_is_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match="a control message that cannot be read"):
        decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("fields", [
    (-1, 1.0), (0, 1.0, (-1,)), (0, 1.0, (), (1 << 32,)), (0, 1.0, (), (), -2), (1 << 32, 1.0)
])  # fmt: skip
def test_a_measure_that_no_server_takes_is_refused(fields: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Measure)


@pytest.mark.parametrize("message", [
    Report(7, 1, float("nan"), 2.5, 1 << 40, 3.0, NOW), Applied(0, 0, 1.8e9, {"w0": 0.5}), NotStored("s", "why"),
    Accounted(1, 2, 3, 4, {0: 5}), Metrics(0, {"loss": float("inf")}), Skipped(3, (), NOW, (2,), "head.weight"),
])  # fmt: skip
def test_what_honest_members_send_is_read(message: Message) -> None:
    assert str(decode(encode(message))) == str(message)


def view(may: dict[str, tuple[int, ...]], number: int = 4, generation: ViewNumber = NOW) -> View:
    return View(ViewNumber(1, number), generation, (), (), (), {0: "s0"}, contributors=may)


def report(replica: int, generation: ViewNumber = NOW) -> Report:
    return Report(5, replica, 1.0, 1.0, 1, 0.1, generation)


def test_only_replicas_that_a_worker_was_assigned_may_be_reported_by_it() -> None:
    claims, now = Claims(), view({"w0": (0, 1), "standby": (1,), "w1": (0, 1)})
    assert claims.may_report("w0", report(1), now)
    assert claims.may_report("standby", report(1), now), "a backup task"
    assert not claims.may_report("standby", report(0), now)
    assert not claims.may_report("w0", report(2), now)
    assert not claims.may_report("stranger", report(0), now)
    assert not claims.may_report("w1", report(1, ViewNumber(1 << 31, 0)), now), "a generation that does not exist"
    rolled_back = view({"w1": (0,)}, 6, ViewNumber(1, 6))
    assert not claims.may_report("w0", report(1, ViewNumber(1, 6)), rolled_back)
    assert claims.may_report("w0", report(1), rolled_back), "stale: who counts it decides"
    assert not claims.may_report("w0", report(1), None)


def test_only_who_was_asked_may_answer_about_a_snapshot() -> None:
    claims, part = Claims(), Stored("step-3-1", {}, {})
    assert not claims.may_answer("s0", part)
    claims.asked(Capture("step-3-1", 3, ("s0",)))
    assert claims.may_answer("s0", part)
    assert not claims.may_answer("w0", part)
    assert not claims.may_answer("s0", NotStored("step-9-1", "why"))


def test_who_has_held_an_evaluation_lease_is_heard_when_another_one_has_it() -> None:
    claims, result = Claims(), Evaluated(4, NOW, {"loss": 1.0})
    for number, holder in enumerate(("w2", "w3"), 4):
        orders = StandingOrders(lease=Lease(4, holder, 8))
        claims.published(msgspec.structs.replace(view({"w0": (0,)}, number), orders=orders))
    now = msgspec.structs.replace(view({"w0": (0,)}, 6), orders=StandingOrders(lease=Lease(8, "w3", 12)))
    assert claims.may_evaluate("w2", result, now), "its result came just after its lease had moved"
    assert not claims.may_evaluate("w1", result, now)
    assert claims.may_evaluate("w2", Evaluated(4, NOW, None), now)
    assert claims.may_evaluate("w3", Evaluated(8, NOW, None), now)
    assert not claims.may_evaluate("w2", Evaluated(8, NOW, None), now), "it never had that lease"
    assert not claims.may_evaluate("w0", Evaluated(8, NOW, None), now)


def test_who_was_the_lead_is_heard_when_views_have_forgotten_what_it_was_assigned() -> None:
    """Its evaluation took longer than the steps for which views say that."""
    claims, result = Claims(), Evaluated(4, NOW, {"loss": 1.0})
    led = msgspec.structs.replace(view({"w2": (0,)}), assignments=(Assignment(0, {"w2": (0,), "w3": (1,)}),))
    claims.published(led)
    assert claims.may_evaluate("w2", result, view({"w0": (0,)}, 6))
    assert not claims.may_evaluate("w3", result, view({"w0": (0,)}, 6))
    later = ViewNumber(1, 9)
    stale = msgspec.structs.replace(result, generation=later)
    assert not claims.may_evaluate("w2", stale, view({"w0": (0,)}, 9, later)), "of a generation that is over"


# ---- what a member of a running job may make the coordinator believe ----


def test_a_standby_s_report_of_a_step_far_ahead_changes_nothing() -> None:
    play = Play(workers_max=1).begin("w0", "w1").steps(0, 3)
    play.report(STEPS - 1, 0, "w1")
    assert play.shell.machine.course.furthest == 2
    assert play.shell.announcer.tally.missing() == (3, [0, 1])


def test_a_report_proves_at_most_one_step_after_what_servers_have_applied() -> None:
    play = Play().begin().steps(0, 3)
    course = play.shell.machine.course
    play.report(STEPS - 1, 0)
    assert course.furthest == 3, "one more than was known"
    play.say("s0", Applied(9, 2, 0.0, generation=play.view.generation))
    play.report(STEPS - 1, 0)
    assert course.furthest == 10
    play.say("s0", Applied(1 << 30, 2, 0.0, generation=ViewNumber(0, 1)))
    play.report(STEPS - 1, 0)
    assert course.furthest == 10, "what was applied in another generation proves nothing"


def test_reports_of_steps_that_are_not_reached_do_not_name_a_step_that_nobody_computes() -> None:
    play = Play().begin("w0").steps(0, 3)
    tally = play.shell.announcer.tally
    assert tally is not None
    for far in (10**9, STEPS, STEPS - 1):
        play.report(far, 0)
    play.report(3, 1)
    assert tally.missing() == (3, [0])
    play.say("s0", Applied(STEPS - 2, 2, 0.0, generation=play.view.generation))
    assert tally.missing() == (STEPS - 1, [1]), "it was kept: an honest one may overtake the servers' words"


def test_early_reports_complete_their_steps_when_these_are_known() -> None:
    play = Play().begin()
    play.say("s0", Applied(0, 2, 0.0, generation=play.view.generation))
    play.steps(0, 5)
    assert [done.step for done in play.logged(StepDone)] == [0, 1]
    play.say("s0", Applied(4, 2, 0.0, generation=play.view.generation))
    assert [done.step for done in play.logged(StepDone)] == [0, 1, 2, 3, 4]


def test_of_early_claims_those_furthest_ahead_are_dropped_first() -> None:
    early = Early[str](most=2)
    for step in (7, 9, 5, 8):
        early.keep(step, f"step {step}", limit=1)
        early.keep(step, "a repeat", limit=1)
    assert early.due(4) == []
    assert early.due(100) == ["step 5", "step 7"]
    assert early.due(100) == []


def test_figures_count_from_who_computes_replica_0_of_versions_that_are_reached() -> None:
    play = Play(workers_start=2).begin("w0", "w1").steps(0, 3)
    now, evaluations = play.view.generation, play.shell.evaluations
    lead = play.view.lead(3)
    other = {"w0": "w1", "w1": "w0"}[lead]
    assert play.say(other, Evaluated(2, now, {"loss": 0.0})) == []
    assert play.say(lead, Evaluated(9, now, {"loss": 9.0})) == []
    play.say(lead, Evaluated(2, now, {"loss": 2.0}))
    assert (evaluations.of(2), evaluations.of(9)) == ({"loss": 2.0}, {})
    play.say("s0", Applied(8, 2, 0.0, generation=now))
    assert evaluations.of(9) == {"loss": 9.0}, "it was early: a server's word came later"


def test_a_server_that_claims_all_shards_stores_only_its_own() -> None:
    play = Play(snapshots=True, servers=2)
    play.join("s0", "s1", "w0")
    play.say("w0", Propose(play.record))
    asked = play.sent(Capture)[-1].snapshot
    own, others = play.view.shards_of("s0"), play.view.shards_of("s1")
    entries = {**dict.fromkeys(own, ("a", 0, 1, "")), **dict.fromkeys(others, ("b", 0, 1, ""))}
    lie = Stored(asked, {"a": 1, "b": 2}, entries)
    (part,) = [act.part for act in play.say("s0", lie) if isinstance(act, acts.AddPart)]
    assert part == Stored(asked, {"a": 1}, dict.fromkeys(own, ("a", 0, 1, "")))
    honest = play.say("s1", Stored(asked, {"b": 3}, dict.fromkeys(others, ("b", 0, 3, ""))))
    assert any(isinstance(act, acts.CommitSnapshot) for act in honest)


def test_a_snapshot_s_parts_and_failures_count_only_from_who_was_asked() -> None:
    play = Play(snapshots=True, snapshot_steps=0, snapshot_seconds=0.0).begin("w0", "w1")
    (asked,) = {
        a.message.snapshot for a in play.done if isinstance(a, acts.SendMessage) and isinstance(a.message, Capture)
    }
    before = play.shell.machine.course.furthest
    assert play.say("w1", Stored(asked, {}, {0: ("", 0, 0, ""), 1: ("", 0, 0, "")})) == []
    assert play.say("w1", NotStored(asked, "a lie", STEPS)) == []
    assert play.shell.machine.course.furthest == before
    assert play.store()


def test_a_huge_generation_does_not_switch_the_comparison_of_settings_off() -> None:
    play = Play(workers_start=2).begin("w0", "w1")
    now = play.view.generation
    own = {worker: replicas[0] for worker, replicas in play.view.assigned(0).items()}
    play.say("w1", Report(0, own["w1"], 1.0, 1.0, 4, 0.1, ViewNumber((1 << 32) - 1, 0), "liar"))
    play.say("w0", Report(0, own["w0"], 1.0, 1.0, 4, 0.1, now, "one"))
    play.say("w1", Report(0, own["w1"], 1.0, 1.0, 4, 0.1, now, "other"))
    assert play.shell.last_word is not None
    assert "do not have the same settings" in str(play.shell.last_word)


# ---- how much a member may say ----


def test_a_member_that_never_stops_talking_fills_no_log() -> None:
    """12 MB of sentences a second came into events.jsonl."""
    play = Play(workers_max=1).begin("w0", "w1")
    for _ in range(1000):
        play.say("w1", Say("x" * 3000))
        play.say("w1", Accounted(0, 0, 0, 0))
        play.say("w1", Skipped(0, (), ViewNumber(1, 1), (), "", False))
    assert len(play.logged(Say)) + len(play.logged(Accounted)) + len(play.logged(Skipped)) < 150
    play.say("w0", Say("w0 waits"))
    assert play.logged(Say)[-1] == Say("w0 waits"), "the others are heard"


def test_when_it_may_speak_again_it_is_said_how_much_was_left_out() -> None:
    play = Play(workers_max=1).begin("w0", "w1")
    for _ in range(1000):
        play.say("w1", Say("x"))
    heard = play.logged(Say).count(Say("x"))
    play.take(inbox.Ticked(), 100.0)
    play.say("w1", Say("y"))
    assert play.logged(Say)[-2:] == [
        Say(f"{1000 - heard} sentences of members were left out: w1 says too much"), Say("y")
    ]


def test_members_without_a_part_in_the_job_share_what_they_may_say() -> None:
    play = Play(workers_max=1).begin("w0", *(f"w{n}" for n in range(1, 40)))
    for n in range(1, 40):
        for _ in range(50):
            play.say(f"w{n}", Say("x"))
    assert play.logged(Say).count(Say("x")) <= 100


def test_a_primary_may_say_of_every_step_that_it_was_skipped() -> None:
    play = Play().begin()
    for step in range(30):
        for replica in range(20):
            play.say("s0", Skipped(step, (replica,), play.view.generation))
    assert len(play.logged(Skipped)) == 600


# ---- digests (`fingerprints=`) ----


def digests_of(play: Play, step: int, replica: int = 0) -> Contributed:
    return Contributed(step, replica, 1.0, bytes(32), play.view.generation)


def held(play: Play, version: int, shard: int = 0) -> Updated:
    return Updated(version, shard, bytes(16), play.view.generation)


def recorded(play: Play) -> list[Any]:
    return [act.claim for act in play.done if isinstance(act, acts.Record)]


def test_digests_count_only_of_the_steps_that_the_job_records() -> None:
    play = Play(settings={"audit.fingerprints": 2}).begin().steps(0, 5)
    claims: list[tuple[str, Message]] = [
        ("w0", digests_of(play, 2)), ("w0", digests_of(play, 3)), ("s0", held(play, 4)), ("s0", held(play, 1)),
        ("w0", digests_of(play, 4, 2)), ("s0", held(play, 4, 2)),
    ]  # fmt: skip
    for who, claim in claims:
        play.say(who, claim)
    assert recorded(play) == [claims[0][1], claims[2][1]]


def test_a_job_that_records_no_digests_takes_none() -> None:
    play = Play().begin().steps(0, 5)
    play.say("w0", digests_of(play, 0))
    play.say("s0", held(play, 2))
    assert recorded(play) == []


def test_digests_of_steps_that_are_not_reached_wait_for_these_and_few_of_them_do() -> None:
    play = Play(settings={"audit.fingerprints": 1}).begin().steps(0, 3)
    for step in reversed(range(STEPS)):
        play.say("w0", digests_of(play, step))
        play.say("s0", held(play, step + 1))
    known = play.shell.machine.course.known
    assert {claim.step for claim in recorded(play) if isinstance(claim, Contributed)} == set(range(known + 2))
    assert {claim.version for claim in recorded(play) if isinstance(claim, Updated)} == set(range(1, known + 2))
    play.say("s0", Applied(STEPS - 1, 2, 0.0, generation=play.view.generation))
    steps = [claim.step for claim in recorded(play) if isinstance(claim, Contributed)]
    assert known + 2 in steps, "it was kept: an honest one may overtake the servers' words"
    assert STEPS - 1 not in steps
    assert len(steps) == len(set(steps))
