"""What the environment of torchrun and mpirun means, and what rank 0 starts the coordinator with."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch.engines import supervision
from rallypoint.launch.engines.discovery import Place, place_of_mpirun, place_of_torchrun, servers_here, servers_in_all
from rallypoint.launch.engines.supervision import Upkeep, again, coordinator_arguments
from rallypoint.launch.folder import refuse_unwritable_snapshots

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "1935409153",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PLACE = Place(
    launcher="torchrun", rank=0, world=8, local_rank=0, nodes=2, attempt="job7/0/8", master="node1:29500",
    agent_store=True,
)  # fmt: skip


def test_torchruns_environment_is_a_place() -> None:
    assert place_of_torchrun(TORCHRUN) == Place(
        launcher="torchrun", rank=5, world=8, local_rank=1, nodes=2, attempt="job7/1/8", master="node1:29500",
        agent_store=True,
    )  # fmt: skip
    assert place_of_torchrun(OPEN_MPI) is None
    assert place_of_torchrun({}) is None


def test_an_address_of_ipv6_gets_brackets() -> None:
    place = place_of_torchrun({**TORCHRUN, "MASTER_ADDR": "::1"})
    assert (place.master, place.one_machine) == ("[::1]:29500", True)


def test_a_half_environment_of_torchrun_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"TORCHELASTIC_RUN_ID is set\), but LOCAL_RANK is missing"):
        place_of_torchrun({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"})


def test_each_new_start_of_everybody_has_a_name_of_its_own() -> None:
    """A node that joins changes the number of processes, but not torchrun's count of restarts."""
    changes: list[dict[str, str]] = [{}, {"TORCHELASTIC_RESTART_COUNT": "2"}, {"WORLD_SIZE": "12"}]
    changes.append({"TORCHELASTIC_RUN_ID": "job8"})
    places = [place_of_torchrun({**TORCHRUN, **change}) for change in changes]
    assert len({place.attempt for place in places if place is not None}) == 4


def test_open_mpis_environment_is_a_place() -> None:
    assert place_of_mpirun(OPEN_MPI, 77) == Place(
        launcher="mpirun", rank=3, world=4, local_rank=3, nodes=1, attempt="1935409153"
    )
    two = place_of_mpirun({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 77)
    assert (two.nodes, two.one_machine) == (2, False)


def test_mpichs_environment_is_a_place() -> None:
    place = place_of_mpirun(MPICH, 77)
    assert place == Place(launcher="mpirun", rank=1, world=4, local_rank=1, nodes=2, attempt="job")
    one = place_of_mpirun({**MPICH, "MPI_LOCALNRANKS": "4"}, 77)
    assert one.attempt == "parent-77"


@pytest.mark.parametrize("env", [{}, {"PMI_RANK": "0"}, {"SLURM_PROCID": "0"}])
def test_a_process_that_nobody_of_them_has_started_has_no_place(env: dict[str, str]) -> None:
    assert place_of_mpirun(env, 77) is None


@pytest.mark.parametrize(
    ("master", "nodes", "one"),
    [("127.0.0.1:29500", 2, True), ("localhost:29500", 2, True), ("node1:29500", 1, True), ("node1:29500", 2, False)],
)
def test_when_all_processes_are_on_one_machine(master: str, nodes: int, one: bool) -> None:
    assert replace(PLACE, master=master, nodes=nodes).one_machine is one


@pytest.mark.parametrize(
    ("wanted", "in_all", "beside"),
    [
        ("", 2, {0: ("server-0",), 4: ("server-4",)}),
        ("1", 1, {0: ("server0",)}),
        ("3", 3, {0: ("server0",), 2: ("server1",), 5: ("server2",)}),
        ("ranks=1,6,6", 3, {1: ("server0",), 6: ("server1", "server2")}),
    ],
)
def test_where_servers_run(wanted: str, in_all: int, beside: dict[int, tuple[str, ...]]) -> None:
    assert servers_in_all(PLACE, wanted) == in_all
    places = [replace(PLACE, rank=rank, local_rank=rank % 4) for rank in range(8)]
    assert {place.rank: here for place in places if (here := servers_here(place, wanted))} == beside


@pytest.mark.parametrize("wanted", ["0", "many", "ranks=", "ranks=8", "ranks=0,-1"])
def test_servers_that_make_no_sense_are_one_sentence(wanted: str) -> None:
    with pytest.raises(UsageError, match=rf"RALLYPOINT_SERVERS={wanted}: write a number of servers, or the ranks"):
        servers_here(PLACE, wanted)


LOCAL = replace(PLACE, nodes=1)


def options(place: Place, given: str) -> dict[str, str]:
    words = coordinator_arguments(place, 2, given, lambda: "/fresh")
    return dict(zip(words[::2], words[1::2], strict=True))


def test_on_one_machine_a_job_has_a_folder_and_snapshots_and_stays_on_loopback() -> None:
    assert options(LOCAL, "") == {
        "--workers": "8", "--servers": "2", "--folder": "/fresh", "--snapshots": "/fresh/snapshots",
        "--resume": "latest", "--bind": "127.0.0.1:0",
    }  # fmt: skip


def test_a_job_under_torchrun_has_the_threads_that_torchrun_sets_unless_the_user_says_others() -> None:
    words = coordinator_arguments(LOCAL, 2, "--threads 3", lambda: "/fresh", 2)
    assert [after for word, after in itertools.pairwise(words) if word == "--threads"] == ["2", "3"], "the last counts"
    assert "--threads" not in coordinator_arguments(LOCAL, 2, "", lambda: "/fresh", 0)


def test_on_several_machines_there_are_snapshots_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "own_address", lambda place: "10.0.0.7")
    assert options(PLACE, "") == {
        "--workers": "8", "--servers": "2", "--folder": "/fresh", "--snapshots": "none", "--bind": "[::]:0",
        "--advertise": "10.0.0.7",
    }  # fmt: skip
    assert options(PLACE, "--folder=/shared/run")["--snapshots"] == "/shared/run/snapshots"
    assert options(PLACE, "--snapshots s3://b/run")["--resume"] == "latest"
    assert "--advertise" not in options(PLACE, "--bind 10.0.0.9:4700")


def test_the_users_options_win() -> None:
    assert options(LOCAL, "--replication 2 --resume step-7 --workers 2:8")["--replication"] == "2"
    assert options(LOCAL, "--resume step-7")["--resume"] == "step-7"
    assert options(LOCAL, "--snapshots none").get("--resume") is None


def test_the_next_coordinator_listens_where_the_first_did_and_goes_on_with_the_journal() -> None:
    first = coordinator_arguments(LOCAL, 2, "--replication 2 --resume step-7", lambda: "/fresh")
    second = again(first, "127.0.0.1:4711")
    assert "--resume" not in second
    assert second[second.index("--bind") + 1] == "127.0.0.1:4711"
    assert second[second.index("--folder") + 1] == "/fresh"
    assert second[second.index("--replication") + 1] == "2"


def test_rank_0_says_the_address_that_the_others_can_connect_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervision.own_address(replace(PLACE, master="127.0.0.1:29500")) == "127.0.0.1"
    monkeypatch.setattr(supervision, "advertised", lambda bound, towards: "127.0.1.1:0")  # /etc/hosts of Debian
    assert supervision.own_address(PLACE) == "node1"


def test_what_dies_is_started_again_less_and_less_often_and_not_for_ever() -> None:
    upkeep = Upkeep(quick_deaths=5)
    assert [upkeep.died("worker", 1.0) for _ in range(6)] == [0.0, 0.2, 1.0, 3.0, 3.0, None]
    assert upkeep.died("server", 1.0) == 0.0
    upkeep = Upkeep(quick_deaths=5)
    assert [upkeep.died("worker", 60.0) for _ in range(20)] == [0.0] * 20


# ---- A place for snapshots that cannot be used is refused before anything starts ----


def test_a_place_where_no_snapshot_can_be_written_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written to .*/file/deep: Not a directory; choose another"):
        refuse_unwritable_snapshots(str(tmp_path / "file" / "deep"))


@pytest.mark.parametrize("place", ["", "new/deep"])
def test_a_place_where_snapshots_can_be_written_is_left_as_it_is(tmp_path: Path, place: str) -> None:
    refuse_unwritable_snapshots(str(tmp_path / place))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("elsewhere", ["", "memory://nobody/asks"])
def test_no_snapshots_and_those_of_other_filesystems_are_not_tried(elsewhere: str) -> None:
    refuse_unwritable_snapshots(elsewhere)
