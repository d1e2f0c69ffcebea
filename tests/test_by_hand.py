"""A cluster whose processes are started one by one, with the commands of docs/by-hand.md."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rallypoint.coordinator.journal import Journal
from rallypoint.coordinator.service import JoinInfo
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.cluster.terms import LIVING_S, Terms
from rallypoint.core.protocol import Finished
from rallypoint.errors import ConfigError, UsageError
from rallypoint.launch import environment
from rallypoint.launch.commands import by_hand
from rallypoint.launch.commands.by_hand import _argv_of, check_reachable, decoded, described
from rallypoint.launch.options import RunOptions
from rallypoint.net.handshake import role_token
from rallypoint.store.snapshots import SnapshotStore
from support.beside import until
from support.members import PATIENCE_S, Members, members_in, script
from support.programs import run_program

pytestmark = pytest.mark.programs

DOCUMENT = Path(__file__).parent.parent / "docs" / "by-hand.md"
JOB = "the job's own token"
ENV = {**os.environ, "RALLYPOINT_TOKEN": "a token for this test", "COLUMNS": "200"}


def documented() -> list[list[str]]:
    """The arguments of each command in the section's first block."""
    section = DOCUMENT.read_text().partition("\n## A cluster by hand\n")[2]
    block = section.partition("```bash\n")[2].partition("```")[0]
    return [shlex.split(line)[1:] for line in block.splitlines() if line.startswith("rallypoint ")]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    (tmp_path / "train.py").write_text(script(6))
    with members_in(tmp_path, ENV) as made:
        yield made


def begun(members: Members, *options: str) -> str:
    """Start a coordinator with these options, and a server at its address, which is returned."""
    members.start("coordinator", "coordinator", *options)
    address = members.until("coordinator", r"^the coordinator listens at (\S+)\n")
    members.start("server", "server", "--coordinator", address)
    return address


@pytest.mark.slow
def test_the_documented_commands_make_a_cluster_that_says_how_it_gets_on(members: Members) -> None:
    token, coordinator, *others = documented()
    assert token[0] == "token"
    assert [arguments[0] for arguments in (coordinator, *others)] == ["coordinator", *["server"] * 2, *["worker"] * 2]
    local = {"10.0.0.7:4700": "127.0.0.1:0", "/shared/run": str(members.folder / "snapshots")}
    members.start("coordinator", *[local.get(word, word) for word in coordinator])
    address = members.until("coordinator", r"^the coordinator listens at (\S+)\n")
    members.until("coordinator", r"\n(waiting for 2 servers and 2 workers)\n")
    for number, arguments in enumerate(others):
        place = {"10.0.0.7:4700": address, "10.0.0.8:0": "127.0.0.1:0", "10.0.0.9:0": "127.0.0.1:0"}
        members.start(f"{arguments[0]}-{number}", *[place.get(word, word) for word in arguments])
    for name, program in members.started.items():
        assert program.wait(PATIENCE_S) == 0, f"{name}: {members.said(name)}"
    assert "done: 6 steps, 48 samples in " in members.said("coordinator")
    assert "a token for this test" not in members.said("coordinator")
    for name in ("server-0", "server-1"):
        joined, over = members.said(name).splitlines()
        assert re.fullmatch(rf"{name} listens at 127.0.0.1:\d+ and has joined the job at {address}; it .*", joined)
        assert over == f"{name}: the job is over"
    hashes = []
    for name in ("worker-2", "worker-3"):
        lines = members.said(name).splitlines()
        hashes += [lines.pop(2)] if len(lines) > 3 else []
        assert lines == [
            f"{name} runs train.py for the job at {address}",
            f"{name} has joined the job at {address}; it waits for the other members",
            f"{name}: the job is over",
        ]
    (found,) = hashes  # the worker that leads says it
    assert found.startswith("weights sha256 ")
    assert (members.folder / "run" / "events.jsonl").exists()
    assert list((members.folder / "snapshots").glob("step-00000006-*"))


@pytest.mark.slow
def test_a_worker_by_hand_that_is_told_to_go_says_that_it_has_left(members: Members) -> None:
    (members.folder / "train.py").write_text(script())
    members.start("coordinator", "coordinator", "--workers", "2")  # it begins when both are here
    address = members.until("coordinator", r"listens at (\S+)\n")
    members.start("server0", "server", "--coordinator", address)
    for name in ("w0", "w1"):
        members.start(name, "worker", "--coordinator", address, "train.py")
    members.until("coordinator", r"(step \d+/)")
    members.started["w1"].send_signal(signal.SIGTERM)
    assert members.started["w1"].wait(PATIENCE_S) == 0
    assert members.said("w1").splitlines()[-1] == "w1 has left the job"


def test_a_worker_is_a_script_for_this_python_or_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, mode in (("train.py", 0o755), ("train", 0o644), ("train.sh", 0o755)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    assert _argv_of(["train.py", "--x"]) == [sys.executable, "train.py", "--x"]
    assert _argv_of(["train"]) == [sys.executable, "train"]
    assert _argv_of(["./train.sh", "3"]) == ["./train.sh", "3"]
    assert _argv_of([sys.executable, "train.py"]) == [sys.executable, "train.py"]
    assert _argv_of(["sh", "-c", "true"]) == [shutil.which("sh"), "-c", "true"]
    for missing, why in (("nothing.py", "there is no script nothing.py"), ("nothing", "and no program of that name")):
        with pytest.raises(UsageError, match=why):
            _argv_of([missing])


@pytest.mark.slow
def test_a_program_gets_where_the_coordinator_may_be_and_its_role_s_token_alone(tmp_path: Path) -> None:
    (tmp_path / "job.token").write_text(JOB)
    show = "import os; print(*(os.environ.get(name) for name in os.environ['SHOWN'].split()))"
    names = "RALLYPOINT_COORDINATOR RALLYPOINT_ID RALLYPOINT_TOKEN RALLYPOINT_TOKEN_FILE OMP_NUM_THREADS"
    env = {**ENV, "RALLYPOINT_TOKEN_FILE": "job.token", "RALLYPOINT_TOKEN": "", "SHOWN": names, "OMP_NUM_THREADS": "3"}
    options = ["--coordinator", "a:1,b:2", "--id", "w7"]
    status, said = run_program(
        ["-m", "rallypoint.cli", "worker", *options, "--", sys.executable, "-c", show], tmp_path / "output", env=env,
        cwd=tmp_path,
    )  # fmt: skip
    assert status == 0, said
    assert said.splitlines() == [
        f"w7 runs {sys.executable} for the job at a:1,b:2",
        f"a:1,b:2 w7 {role_token(JOB, 'worker')} None 3",
    ]


def test_a_server_on_loopback_is_refused_if_its_coordinator_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_the_way(bind: str, towards: str) -> str:
        return "127.0.0.1:0" if towards.startswith("127.") else "10.0.0.8:0"

    monkeypatch.setattr(by_hand, "advertised", on_the_way)
    for fine in (("127.0.0.1:0", "", "127.0.0.1:4700"), ("10.0.0.8:0", "", "10.0.0.7:4700"),
                 ("127.0.0.1:0", "node8", "10.0.0.7:4700"), ("127.0.0.1:0", "", "file:/nothing/there")):  # fmt: skip
        check_reachable("server", *fine)
    for places in ("10.0.0.7:4700", "127.0.0.1:4700,head:4700"):
        with pytest.raises(UsageError, match=r"a server at 127\.0\.0\.1:0.*others reach too: add --bind 10\.0"):
            check_reachable("server", "127.0.0.1:0", "", places)


def test_members_without_a_name_have_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two containers, the process ids and the hosts' names may be equal."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    names = {environment.own_name("worker") for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"worker-1-[0-9a-f]{8}", name) for name in names)
    monkeypatch.setenv(environment.ID, "w7")
    assert environment.own_name("worker") == "w7"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"wrokers_max": 2}', "--terms: there is no wrokers_max: did you mean workers_max?"),
        ('{"servers": "two"}', "--terms cannot be read: Expected `int`, got `str` - at `$.servers`"),
        ("{", "--terms cannot be read: Input data was truncated"),
        ("[]", "--terms cannot be read: Expected `object`, got `array`"),
    ],
)
def test_terms_that_make_no_sense_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        decoded(text, Terms, "--terms")
    assert str(error.value) == sentence


def test_the_options_of_a_coordinator_by_hand_are_those_of_a_run() -> None:
    options = RunOptions(workers="2:8", servers=3, snapshots="memory://x", sets=["steps=5"])
    terms, about = described(options.plan([], folder=""))
    assert (terms.workers_start, terms.workers_min, terms.workers_max, terms.servers) == (2, 2, 8, 3)
    assert about == JoinInfo(overrides={"steps": 5}, snapshots="memory://x")


def test_a_coordinator_is_told_for_how_long_members_go_on_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RunOptions().plan([], folder="")
    assert described(plan)[0].living == LIVING_S
    monkeypatch.setenv(environment.LIVING, "600")
    assert described(plan)[0].living == 600.0
    for text in ("ten", "0", "-5", "nan", "inf"):
        monkeypatch.setenv(environment.LIVING, text)
        with pytest.raises(UsageError, match=f"RALLYPOINT_LIVING={text}: give the seconds"):
            described(plan)


def test_the_commands_are_in_the_help(tmp_path: Path) -> None:
    status, text = run_program(["-m", "rallypoint.cli", "--help"], tmp_path / "output", env=ENV)
    assert status == 0
    group = text.partition("A cluster by hand")[2]
    assert all(f"│ {name} " in group for name in ("coordinator", "server", "worker"))


@pytest.mark.parametrize("arguments", [["server"], ["worker", "x.py"]])
def test_without_an_address_it_says_how_to_give_one(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    status, text = run_program(["-m", "rallypoint.cli", *arguments], tmp_path / "output", env=ENV, cwd=tmp_path)
    assert status == 1
    assert text == "error: which job? give --coordinator host:port or set RALLYPOINT_COORDINATOR\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_coordinator_without_a_folder_ends_the_job_for_all(
    members: Members, number: signal.Signals
) -> None:
    begun(members, "--bind", "127.0.0.1:0")
    members.until("server", r"(has joined the job)")
    members.started["coordinator"].send_signal(number)
    assert members.started["coordinator"].wait(40.0) == 130, members.said("coordinator")
    assert members.started["server"].wait(40.0) == 3, members.said("server")  # it would go on for 60 s without a word
    assert "server: the job failed: the coordinator was interrupted" in members.said("server")
    assert "failed: the coordinator was interrupted" in members.said("coordinator")


@pytest.mark.slow
def test_snapshots_that_the_coordinator_does_not_see_end_the_job_before_its_first_step(members: Members) -> None:
    """Each process has a memory of its own, as each host has a disk of its own."""
    address = begun(members, "--snapshots", "memory://each-its-own")
    members.start("worker", "worker", "--coordinator", address, "train.py")
    assert members.started["coordinator"].wait(PATIENCE_S) == 3, members.said("coordinator")
    said = members.said("coordinator")
    assert "does not see in memory://each-its-own what members have stored there: server on " in said
    assert "(server-0.shards). Let --snapshots (or --folder) be a folder that all hosts share" in said
    assert "step 1/" not in said


@pytest.mark.slow
def test_ctrl_c_at_a_coordinator_by_hand_takes_a_last_snapshot(members: Members) -> None:
    (members.folder / "train.py").write_text(script())
    address = begun(members, "--snapshots", str(members.folder / "kept"))
    members.start("worker", "worker", "--coordinator", address, "train.py")
    step = int(members.until("coordinator", r"step (\d+)/"))
    members.started["coordinator"].send_signal(signal.SIGINT)
    assert members.started["coordinator"].wait(40.0) == 130, members.said("coordinator")
    stored = [manifest.version for manifest in SnapshotStore(str(members.folder / "kept")).manifests()]
    assert stored[0] == 0
    assert stored[-1] >= step


@pytest.mark.slow
def test_when_the_last_server_by_hand_dies_it_says_to_start_one_and_then_goes_on(members: Members) -> None:
    gate = members.folder / "gate"
    waits = f"while micro.step > 2 and not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    (members.folder / "train.py").write_text(script(6, before=waits))
    address = begun(members, "--snapshots", str(members.folder / "kept"))
    members.start("worker", "worker", "--coordinator", address, "train.py")
    members.until("coordinator", r"(step \d+/)")
    members.started["server"].kill()
    members.until("coordinator", r"(waiting for a server: none is left; start one \(rallypoint server --coordinator)")
    gate.touch()
    members.start("next", "server", "--coordinator", address)
    for name in ("coordinator", "worker", "next"):
        assert members.started[name].wait(PATIENCE_S) == 0, members.said(name)


@pytest.mark.slow
def test_a_worker_that_is_refused_is_told_so_and_why_and_the_job_goes_on(members: Members) -> None:
    (members.folder / "train.py").write_text(script())
    (members.folder / "other.py").write_text(script(7))
    address = begun(members)
    members.start("w0", "worker", "--coordinator", address, "train.py")
    members.until("coordinator", r"(step \d+/)")
    members.start("w1", "worker", "--coordinator", address, "other.py")
    assert members.started["w1"].wait(PATIENCE_S) == 1, members.said("w1")
    assert "w1: the coordinator has refused this member, and the job goes on without it: w1 on " in members.said("w1")
    assert "the job failed" not in members.said("w1")
    assert members.started["w0"].poll() is None


@pytest.mark.slow
def test_sigterm_ends_a_coordinator_with_a_folder_alone_and_another_goes_on_with_its_job(members: Members) -> None:
    folder = ["--folder", str(members.folder / "run")]
    address = begun(members, *folder)
    members.until("server", r"(has joined the job)")
    members.started["coordinator"].send_signal(signal.SIGTERM)
    assert members.started["coordinator"].wait(40.0) == 143, members.said("coordinator")
    assert "told to go: another coordinator with --folder" in members.said("coordinator")
    members.start("next", "coordinator", *folder, "--bind", address)
    members.until("next", r"(the coordinator listens at)")
    members.start("worker", "worker", "--coordinator", address, "train.py")
    assert members.started["next"].wait(PATIENCE_S) == 0, members.said("next")
    assert members.started["server"].wait(40.0) == 0, members.said("server")


def test_a_folder_whose_job_has_ended_says_so_to_who_starts_it_again(members: Members) -> None:
    """A JobSet of the same name on the same volume, or the same commands a second time."""
    folder = members.folder / "run"
    folder.mkdir()
    journal = Journal(str(folder))
    journal.save(ClusterState(None, None, (), 0, 1, False, -1, 1, Finished("worker0")))
    journal.close()
    members.start("coordinator", "coordinator", "--folder", str(folder), "--heartbeat", "60")
    address = members.until("coordinator", r"^the coordinator listens at (\S+)\n")
    members.until("coordinator", r"\n(nothing is trained: the job in \S+/run has finished\. .* name another --folder)")
    members.start("server", "server", "--coordinator", address)
    assert members.started["server"].wait(PATIENCE_S) == 0, members.said("server")
    assert members.said("server").endswith("server: the job was over before this server took part in it\n")


@pytest.mark.slow
def test_a_worker_that_gives_up_ends_though_its_coordinator_is_stopped(members: Members) -> None:
    """It says why, but nobody reads that: it must not wait until somebody does."""
    gate = members.folder / "gate"
    (members.folder / "train.py").write_text(
        "import pathlib, time, rallypoint as rp\n"
        "with rp.join() as job:\n"
        f"    while not pathlib.Path({str(gate)!r}).exists():\n"
        "        time.sleep(0.01)\n"
        "    raise ValueError('the data is gone')\n"
    )
    members.start("coordinator", "coordinator")
    address = members.until("coordinator", r"listens at (\S+)\n")
    members.start("w0", "worker", "--coordinator", address, "train.py")
    members.until("w0", r"(has joined the job)")
    coordinator = members.started["coordinator"]
    coordinator.send_signal(signal.SIGSTOP)
    stopped = lambda: psutil.Process(coordinator.pid).status() == psutil.STATUS_STOPPED  # noqa: E731
    until(stopped, lambda: "the coordinator is not stopped")
    gate.touch()
    assert members.started["w0"].wait(100.0) == 1, members.said("w0")
    assert stopped()
    assert "ValueError: the data is gone" in members.said("w0")
