"""On how many servers each shard is where nobody has said it; what is said of it, and of going back to a snapshot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_shell import Play

from rallypoint.core.cluster.events import SnapshotFound
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.cluster.terms import copies_of
from rallypoint.core.protocol import Propose, Say
from rallypoint.launch.options import RunOptions
from rallypoint.launch.plan import Launch, resized, terms_of

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
    play.take(SnapshotFound("step-0", 0))
    assert said(play)[-1] == (
        "going on from snapshot step-0: version 0; 5 steps are computed again. With two servers and --replication 2 a "
        "server's death costs none"
    )
