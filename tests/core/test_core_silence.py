"""Silence is not death: a coordinator that hears nearly nobody gives nobody up, and takes back who returns (I12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from test_core_cluster import RECORD, _again, _begun, _Job, _of, _terms

from rallypoint.core.cluster import effects as fx
from rallypoint.core.cluster.effects import Admit, Effect, FindSnapshot, PublishView, Refuse
from rallypoint.core.cluster.events import From, Joined, Left, Tick, Unlinked
from rallypoint.core.cluster.reach import RETURN_S
from rallypoint.core.cluster.terms import LIVING_S
from rallypoint.core.protocol import Capture, Prepare, Propose, Say, SnapshotWanted
from rallypoint.core.view import Member

HEARTBEAT = 2.0
EVERYBODY = ("s0", "s1", "w0", "w1")


def _job(*members: str, **terms: Any) -> _Job:
    job = _begun(_terms(heartbeat=HEARTBEAT, **{"replication": 2, **terms}), members or EVERYBODY)
    job.tick(0.1)
    return job


def _silence(job: _Job, seconds: float, *, heard: Sequence[str] = ()) -> list[Effect]:
    """Ticks for so long, as the shell has them."""
    return [effect for _ in range(round(seconds / 0.25)) for effect in job.tick(0.25, alive=heard)]


def _back(job: _Job, *names: str) -> list[Effect]:
    return [effect for name in names for effect in job.join(name, incarnation=job.incarnations[name])]


def test_a_coordinator_that_hears_nobody_gives_nobody_up_and_takes_everybody_back() -> None:
    job = _job()
    view, incarnations = job.view, dict(job.incarnations)
    quiet = _silence(job, 3.0)
    job.play(*(Unlinked(name, "its connection ended") for name in EVERYBODY))
    quiet += _silence(job, 7.0)
    presumes = "the coordinator presumes that it is cut off itself, and gives nobody up"
    assert quiet == [Say(f"no sign of life from 4 of 4 members: {presumes}")]
    assert job.machine.waiting_for() == "members to be heard again (the coordinator presumes that it is cut off itself)"
    effects = _back(job, *EVERYBODY) + job.tick(0.1)
    assert [e for e in effects if isinstance(e, Admit)] == [Admit(n, incarnations[n]) for n in EVERYBODY]
    assert all(publish.view == view for publish in _of(PublishView, effects))
    assert _of(Say, effects) == [Say("4 of 4 members are heard again: the coordinator is no longer cut off")]
    assert job.view == view
    assert job.machine.waiting_for() is None


def test_with_all_but_a_few_silent_it_presumes_the_same_and_with_half_of_them_silent_it_does_not() -> None:
    job = _job()
    assert _of(Refuse, _silence(job, 10.0, heard=["w0"])) == []
    job = _job()
    refused = _of(Refuse, _silence(job, 2.5, heard=["w0", "s0"]))
    assert [refuse.member for refuse in refused] == ["w1", "s1"]


def test_silence_that_began_at_the_same_time_is_no_death_although_one_is_silent_a_little_longer() -> None:
    job = _job()
    job.tick(0.25, alive=["s0", "s1", "w1"])
    job.tick(0.25, alive=["s0", "s1"])
    job.tick(0.25, alive=["s0"])
    assert _of(Refuse, _silence(job, 5.0)) == []


def test_who_comes_back_last_has_time_to_come_back() -> None:
    job = _job()
    _silence(job, 10.0)
    _back(job, "s0", "w0")
    assert _of(Refuse, _silence(job, RETURN_S - 0.5, heard=["s0", "w0"])) == []
    _back(job, "s1")
    refused = _of(Refuse, _silence(job, 1.0, heard=["s0", "w0", "s1"]))
    assert [refuse.member for refuse in refused] == ["w1"]


@pytest.mark.parametrize("living", [LIVING_S, 600.0])
def test_nobody_is_waited_for_longer_than_members_live_without_a_coordinator(living: float) -> None:
    job = _job(living=living)
    assert _of(Refuse, _silence(job, living)) == []
    assert len(_of(Refuse, _silence(job, HEARTBEAT + 0.5))) == 4


def test_a_connection_that_times_out_is_no_departure() -> None:
    job = _job()
    view = job.view
    assert job.play(Unlinked("s0", "its connection ended")) == []
    assert job.play(Unlinked("w0", "its connection ended")) == []
    assert _silence(job, 1.5, heard=["s1", "w1"]) == []
    effects = _back(job, "s0", "w0")
    assert effects == [
        Admit("s0", job.incarnations["s0"]), fx.SendTo("s0", Prepare(RECORD)), PublishView(view, ("s0",)),
        Admit("w0", job.incarnations["w0"]), PublishView(view, ("w0",)),
    ]  # fmt: skip
    assert job.play(From("w0", Propose(RECORD))) == []
    assert job.view == view


def test_whoever_s_connection_timed_out_is_given_up_a_heartbeat_after_its_last_word() -> None:
    job = _job()
    job.play(Unlinked("w0", "its connection ended"))
    assert _of(Refuse, _silence(job, HEARTBEAT, heard=["s0", "s1", "w1"])) == []
    assert [r.member for r in _of(Refuse, _silence(job, 0.5, heard=["s0", "s1", "w1"]))] == ["w0"]
    assert "w0" not in {member.id for member in job.view.workers}


def test_a_process_that_closes_its_connection_is_replaced_at_once_even_while_the_coordinator_is_cut_off() -> None:
    job = _job()
    _silence(job, 5.0, heard=["w0"])
    job.play(Left("w0", "it closed its connection"))
    assert "w0" not in {member.id for member in job.view.workers}


@pytest.mark.parametrize("seconds", [0.25, 20.0])
def test_a_reset_is_a_death_however_long_ago_the_member_has_beaten(seconds: float) -> None:
    """With a heartbeat of 30 s members beat every 7.5 s. Their systems answer for them every second."""
    job = _Job(_terms(heartbeat=30.0))
    job.come(*EVERYBODY)
    job.tick(0.1)
    _silence(job, seconds, heard=["s0", "s1", "w1"])
    job.play(Unlinked("w0", "its connection ended", reset=True))
    effects = job.tick(0.25)
    assert Say("w0 is gone: its connection ended") in effects
    assert "w0" not in {member.id for member in job.view.workers}
    assert not job.machine.course.members.given_up  # the job's end does not wait for a dead process


def test_resets_from_all_but_a_few_at_once_are_no_deaths() -> None:
    job = _job()
    job.play(*(Unlinked(name, "its connection ended", reset=True) for name in ("s0", "s1", "w1")))
    assert _of(PublishView, job.tick(0.25)) == []
    assert _back(job, "s0", "s1", "w1")[0] == Admit("s0", job.incarnations["s0"])
    assert _silence(job, 5.0, heard=EVERYBODY) == []


def test_a_member_that_comes_back_before_the_tick_is_not_taken_for_dead() -> None:
    job = _job()
    job.play(Unlinked("w0", "its connection ended", reset=True))
    _back(job, "w0")
    assert job.tick(0.25) == []


def test_a_member_whose_old_connection_still_looks_open_is_the_same_member() -> None:
    job = _job()
    effects = job.play(Joined(Member("s1", "host", "s1:1", job.incarnations["s1"]), "server"))
    assert effects[0] == Admit("s1", job.incarnations["s1"])


def test_another_process_under_the_name_of_an_unlinked_member_replaces_it() -> None:
    job = _job()
    job.play(Unlinked("w0", "its connection ended"))
    assert Say("w0 is gone: another process came under its name") in job.come("w0")


def test_members_under_whose_names_others_wait_are_dead_and_not_out_of_reach() -> None:
    """All containers of a cluster are started again in place, each under the name that it had."""
    job = _job()
    job.play(*(Unlinked(name, "its connection ended") for name in EVERYBODY))
    effects = [e for _ in range(10) for e in job.tick(0.25, alive=(), replaced=EVERYBODY)]
    assert [refuse.member for refuse in _of(Refuse, effects)] == ["w0", "w1", "s0", "s1"]
    assert not [say for say in _of(Say, effects) if "cut off" in say.text]


def test_a_coordinator_that_presumes_itself_cut_off_learns_from_who_comes_in_their_place_that_it_is_not() -> None:
    job = _job()
    _silence(job, 5.0)
    effects = job.tick(0.25, alive=(), replaced=("s0",))
    assert effects == [], "one of four, where one of four members that is heard proves nothing either"
    effects = job.tick(0.25, alive=(), replaced=("s0", "w0"))
    assert _of(Say, effects)[0] == Say(
        "2 of 4 members have been replaced: the coordinator is no longer cut off"
    )
    assert [refuse.member for refuse in _of(Refuse, effects)] == ["w0", "s0"]
    effects = _silence(job, RETURN_S + 0.5)
    assert [refuse.member for refuse in _of(Refuse, effects)] == [], "the last two: it may be cut off from them"


def test_a_snapshot_is_taken_again_when_a_member_comes_back_that_may_have_missed_the_request() -> None:
    job = _begun(_terms(heartbeat=HEARTBEAT, snapshots=True))
    (first,) = _of(Capture, job.play(SnapshotWanted()))
    job.play(Unlinked("s0", "its connection ended"))
    _back(job, "s0")
    (again,) = _of(Capture, job.tick(0.1))
    assert again.snapshot != first.snapshot


def test_a_new_coordinator_that_hears_nobody_presumes_itself_cut_off_too() -> None:
    job = _again(_job())
    job.play(Tick(1000.0))
    effects = [effect for now in range(1001, 1010) for effect in job.play(Tick(float(now)))]
    assert _of(Refuse, effects) == []
    assert _of(FindSnapshot, effects) == []


def test_the_silence_of_one_says_nothing_about_the_coordinator() -> None:
    job = _Job(_terms(heartbeat=HEARTBEAT))
    job.come("w0")
    job.tick(0.1)
    assert [refuse.member for refuse in _of(Refuse, _silence(job, HEARTBEAT + 0.5))] == ["w0"]
