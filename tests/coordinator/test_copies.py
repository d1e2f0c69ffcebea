"""On how many servers each shard is where nobody has said it; what is said of it, and of going back to a snapshot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_shell import Play

from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.state import ClusterState, Origin, Resumed
from rallypoint.core.cluster.terms import Terms, copies_of
from rallypoint.core.protocol import Propose, Say
from rallypoint.launch.options import RunOptions
from rallypoint.launch.plan import Launch, resized, terms_of
from rallypoint.net.transport import InprocTransport

DOUBLED = "every shard is on two servers"
AT_ONCE = {"type": "async", "fold": 4}


def begun(servers: int, settings: dict[str, Any] | None = None, **terms: Any) -> Play:
    play = Play(settings=settings, servers=servers, snapshots=True, **terms)
    play.join(*(f"s{n}" for n in range(servers)), "w0")
    play.say("w0", Propose(play.record))
    return play


def said(play: Play) -> list[str]:
    return [say.text for say in play.logged(Say)]


@pytest.mark.parametrize(("wanted", "servers", "copies"), [(0, 1, 1), (0, 2, 2), (0, 5, 2), (1, 2, 1), (2, 3, 2)])
def test_shards_are_on_two_servers_where_there_are_two_unless_told_otherwise(
    wanted: int, servers: int, copies: int
) -> None:
    play = begun(servers, replication=wanted)
    assert copies_of(wanted, servers) == copies
    assert bool(play.view.backup) == (copies == 2)
    assert any(DOUBLED in text for text in said(play)) == (copies == 2 and not wanted)


@pytest.mark.parametrize("wanted", [0, 2])
def test_a_coordinator_that_takes_over_keeps_two_copies_though_the_job_was_made_smaller_meanwhile(wanted: int) -> None:
    """To one server, which has no backup. With two again, every shard is on both."""
    play = begun(2, replication=wanted)
    state = msgspec.json.decode(msgspec.json.encode(play.shell.machine.state()), type=ClusterState)
    terms = terms_of(resized(Launch(worker=("train",), servers=2, replication=wanted), 0, 1))
    later = Play(recovered=state, servers=terms.servers, replication=terms.replication, snapshots=True)
    assert (terms.servers, later.shell.machine.course.views.replication) == (1, 2)


def test_a_job_that_began_with_one_server_has_one_copy_also_when_there_are_two() -> None:
    later = Play(recovered=begun(1, replication=0).shell.machine.state(), servers=2, replication=0, snapshots=True)
    assert later.shell.machine.course.views.replication == 1


@pytest.mark.parametrize("settings", [{"sync": {"type": "all-reduce"}}, {"sync": AT_ONCE}], ids=["all-reduce", "fold"])
def test_a_mode_without_backups_gets_none_and_is_not_refused(settings: dict[str, Any]) -> None:
    play = begun(2, settings, replication=0)
    assert not play.view.backup
    assert not any(DOUBLED in text for text in said(play))


def test_every_command_leaves_it_to_the_coordinator() -> None:
    assert terms_of(RunOptions(servers=2).plan([], folder="x")).replication == 0
    assert terms_of(RunOptions(servers=2, replication=1).plan([], folder="x")).replication == 1


def test_going_back_says_how_many_steps_are_lost_and_what_would_spare_them() -> None:
    play = begun(1)
    play.store()
    play.steps(0, 5)
    play.lose_the_server()
    (wanted,) = [text for text in said(play) if "going back" in text]
    assert wanted == "parameters are lost with their servers: going back to the last snapshot"
    play.take(Origin("step-0", 0))
    assert said(play)[-1] == (
        "going on from snapshot step-0: version 0; 5 steps are computed again. With two servers and --replication 2 a "
        "server's death costs none"
    )


# ---- What makes a run's bytes comparable with another's is said when it begins: its first weights, its threads ----


ONE, OTHER = b"1" * 16, b"2" * 16


def propose(play: Play, worker: str, first: bytes = ONE, threads: int = 1) -> None:
    play.join(worker)
    play.say(worker, Propose(msgspec.structs.replace(play.record, threads=threads), b"", first))


def test_the_hash_of_the_first_weights_is_in_the_event_log() -> None:
    play = Play()
    play.join("s0")
    propose(play, "w0")
    assert said(play) == [f"version 0, the first weights, has the hash {ONE.hex()}"]


def test_a_worker_with_other_first_weights_is_named_once() -> None:
    play = Play(workers_start=2, workers_max=3)
    play.join("s0")
    propose(play, "w0")
    propose(play, "w1", OTHER)
    assert play.view.uploader == "w0"
    assert [text.partition(" made other first weights")[0] for text in said(play)[1:]] == ["w1"]
    assert "torch.manual_seed(0)" in said(play)[1]
    propose(play, "w2", OTHER)  # it comes later
    assert [text.partition(" made other first weights")[0] for text in said(play)[2:] if " made " in text] == ["w2"]


def test_workers_with_the_same_first_weights_and_ranks_that_have_none_are_not_named() -> None:
    play = Play(workers_start=2)
    play.join("s0")
    propose(play, "w0")
    propose(play, "w1")
    assert len(said(play)) == 1
    play = Play(workers_start=2)
    play.join("s0")
    propose(play, "w0", b"")
    propose(play, "w1", b"")
    assert said(play) == []


def test_another_coordinator_says_nothing_of_them_again() -> None:
    play = Play(workers_start=2)
    play.join("s0")
    propose(play, "w0")
    propose(play, "w1", OTHER)
    again = Play(play.shell.machine.state(), workers_start=2)
    again.incarnations, again.known = play.incarnations, play.known
    again.join("s0")
    propose(again, "w0")
    propose(again, "w1", OTHER)
    assert not [text for text in said(again) if "weights" in text]


def test_a_number_of_threads_that_is_not_the_usual_one_is_said_and_a_worker_with_another_is_named() -> None:
    play = Play(workers_start=2)
    play.join("s0")
    propose(play, "w0", threads=4)
    propose(play, "w1", threads=2)
    threads, _, other = said(play)
    assert threads.startswith("4 intra-op threads: the weights differ in the last digits")
    assert other.startswith("w1 computes with 2 intra-op threads, the job with 4")


@pytest.mark.parametrize(("wanted", "had", "threads"), [(0, None, 1), (3, None, 3), (0, 4, 4), (3, 4, 3), (0, 0, 1)])
def test_the_coordinator_decides_with_how_many_threads_all_compute(wanted: int, had: int | None, threads: int) -> None:
    """What the command says counts, else what the job that goes on has had, else 1."""
    record = msgspec.structs.replace(Play().record, threads=had or 0)
    going_on: dict[str, Any] = {} if had is None else {"resume": Resumed(record, "step-4", 4)}
    service = CoordinatorService(
        terms=Terms(), bind="coordinator:0", transport=InprocTransport(), join_info=JoinInfo(threads=wanted), **going_on
    )
    service.start()
    try:
        assert service._welcome().threads == threads
    finally:
        service.close()
