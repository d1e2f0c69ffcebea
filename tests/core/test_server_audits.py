"""What the coordinator does when a server's memory has changed, and when a primary and its backup differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from test_core_cluster import RECORD, _begun, _Job, _of, _terms

from rallypoint.core.audits.rest import AtRest
from rallypoint.core.cluster.effects import Abort, Effect, FindSnapshot, Publish, Refuse, ServerMismatch
from rallypoint.core.cluster.events import Disproved, Found, Joined, StateChanged
from rallypoint.core.cluster.state import Phase
from rallypoint.core.job import JobRecord
from rallypoint.core.view import Member, ViewNumber


def audited(action: str = "drain", every: int = 100) -> JobRecord:
    return msgspec.structs.replace(RECORD, config={**RECORD.config, "audit_servers": every, "audit_action": action})


def begun(record: JobRecord, servers: int = 3, **terms: Any) -> _Job:
    names = [*(f"s{i}" for i in range(servers)), "w0", "w1"]
    return _begun(_terms(servers=servers, replication=2, snapshots=True, **terms), names, record)


def differ(job: _Job, a: str, b: str) -> list[Effect]:
    """These two differ, in a shard that they share."""
    view = job.view
    shard = next(s for s in view.backup if {view.primary[s], view.backup[s]} == {a, b})
    return job.play(Disproved(view.primary[shard], shard, 4, view.paired[shard]))


def go_back(job: _Job) -> None:
    """The last snapshot is found, and every server has its shards again."""
    job.play(Found("step-00000000-1", 0))
    settle(job)


def settle(job: _Job) -> None:
    """Every shard has a backup that has caught up."""
    while job.machine.exposed:
        job.all_caught_up()


def words(effects: Sequence[Effect]) -> str:
    (found,) = _of(ServerMismatch, effects)
    return str(found.text)


def test_a_digest_is_kept_only_while_its_version_is_there() -> None:
    rest = AtRest(3)
    assert [rest.audited(0, version) for version in range(5)] == [True, False, False, True, False]
    rest.also(0, 4)
    assert rest.audited(0, 4)
    assert not rest.audited(1, 4)
    rest.keep(0, 4, b"digest")
    assert rest.kept(0) == (4, b"digest")
    rest.moved(0)
    assert rest.kept(0) is None
    off = AtRest(0)
    off.also(0, 4)
    assert not off.audited(0, 0)
    assert not off.audited(0, 4)


def test_a_server_whose_memory_has_changed_is_given_up_and_comes_back() -> None:
    job = begun(audited())
    generation = job.view.generation
    assert job.play(StateChanged("s1", 3, 5, ViewNumber(9, 9))) == [], "of a generation that is over"
    assert job.play(StateChanged("w1", 3, 5, generation)) == [], "no server"
    effects = job.play(StateChanged("s1", 3, 5, generation))
    assert "shard 3 at version 5 has changed in the memory of s1 on host-of-s1" in words(effects)
    (refused,) = _of(Refuse, effects)
    assert (refused.member, refused.final) == ("s1", False)
    assert job.view.generation == generation, "its backups go on, nothing goes back"
    assert "s1" not in {*job.view.primary.values(), *job.view.backup.values()}
    job.join("s1")
    assert "s1" in job.view.backup.values()
    settle(job)
    effects = job.play(StateChanged("s1", 3, 9, generation))
    assert "the second time" in _of(Refuse, effects)[0].reason
    job.join("s1")
    assert "s1" not in {*job.view.primary.values(), *job.view.backup.values()}


def test_servers_that_differ_go_back_and_the_one_that_differs_from_two_others_is_the_odd_one() -> None:
    job = begun(audited())
    effects = differ(job, "s0", "s1")
    assert "s0 on host-of-s0" in words(effects)
    assert "s1 on host-of-s1" in words(effects)
    assert _of(FindSnapshot, effects)
    assert job.machine.phase is Phase.RECOVERING
    go_back(job)
    effects = differ(job, "s1", "s2")
    assert [refused.member for refused in _of(Refuse, effects)] == ["s1"]
    assert not _of(FindSnapshot, effects), "s0 and s2 agree: nothing goes back"
    assert "s1" not in {*job.view.primary.values(), *job.view.backup.values()}


def test_the_same_two_that_differ_again_end_the_job() -> None:
    job = begun(audited(), servers=2)
    differ(job, "s0", "s1")
    go_back(job)
    (ended,) = _of(Abort, differ(job, "s0", "s1"))
    assert "for the second time: one of the two machines computes wrong" in ended.reason


def test_without_snapshots_a_difference_ends_the_job() -> None:
    job = _begun(_terms(servers=2, replication=2), ("s0", "s1", "w0", "w1"), audited())
    (ended,) = _of(Abort, differ(job, "s0", "s1"))
    assert "no snapshots to go back to" in ended.reason


@pytest.mark.parametrize("action", ["tell", "stop"])
def test_by_audit_action_a_difference_is_told_or_ends_the_job(action: str) -> None:
    job = begun(audited(action), servers=2)
    effects = differ(job, "s0", "s1")
    assert words(effects)
    if action == "stop":
        assert "audit_action is 'stop'" in _of(Abort, effects)[0].reason
    else:
        assert not _of(Abort, effects)
        assert len(_of(Refuse, effects)) == 1, "the primary's word counts"
        assert _of(Publish, effects)


def test_by_audit_action_stop_a_change_ends_the_job() -> None:
    job = begun(audited("stop"))
    (ended,) = _of(Abort, job.play(StateChanged("s1", 3, 5, job.view.generation)))
    assert "has changed in the memory of s1" in ended.reason


def test_a_word_of_a_pair_that_is_no_more_counts_for_nothing() -> None:
    job = begun(audited())
    shard, backup = next(iter(job.view.backup.items()))
    primary, paired = job.view.primary[shard], job.view.paired[shard]
    assert job.play(Disproved(backup, shard, 4, paired)) == []
    assert job.play(Disproved(primary, shard, 4, ViewNumber(9, 9))) == []
    job.play(Joined(Member("s9", "here", "s9:1"), "server"))
    assert job.machine.phase is Phase.RUNNING
