"""What the machines of a whole cluster were told and answered can be replayed, in any process; stories of shards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Sync
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.testing.simulation.policies import Played, word_for
from rallypoint.testing.simulation.run import SimulationFailed, simulate
from support import replay as replaying
from support.replay import RecordingError, recordings, replay, story, told

POLICIES = (Sync(), Sync(quorum=2), BoundedStaleness(1), Async(fold=3), LocalSteps(2, fragments=2), AllReduce())


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, replaying.__file__, *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)


@pytest.mark.some("quorum:2")
@pytest.mark.parametrize("policy", POLICIES, ids=word_for)
def test_every_machine_of_a_simulated_run_replays_to_the_same_effects(
    policy: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_RECORD", str(tmp_path))
    simulate(17, policy)
    files = recordings([tmp_path])
    replayed = [replay(path) for path in files]
    roles = {machine.name.rstrip("0123456789") for machine in replayed}
    assert roles - {"aggregator"} == {"coordinator", "server", "worker"}
    for machine in replayed:
        machine.check()


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recordings of a simulated run."""
    monkeypatch.setenv("RALLYPOINT_RECORD", str(tmp_path))
    simulate(17, Sync())
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
def test_the_command_replays_in_another_process_and_tells_a_shard_s_story(tmp_path: Path) -> None:
    again = _command(str(tmp_path))
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("the same answers to") == len(recordings([tmp_path]))
    told_of_shard = _command("--story", "0", *map(str, recordings([tmp_path])))
    assert told_of_shard.returncode == 0, told_of_shard.stderr
    assert "Contribute(step=0" in told_of_shard.stdout
    assert "-> Publish(version=1)" in told_of_shard.stdout


def test_the_command_says_what_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "what").write_text("nothing")
    result = _command(str(tmp_path / "what"))
    assert result.returncode == 1
    assert "is no recording of a machine" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_field_failure_becomes_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a defect is recorded; once it is mended, the replay shows where it answers in another way."""
    monkeypatch.setenv("RALLYPOINT_RECORD", str(tmp_path))
    with monkeypatch.context() as defect:
        defect.setattr(Sync, "complete", lambda self, ledger: ledger.added == ledger.expected - 1)
        with pytest.raises(SimulationFailed):
            simulate(17, Sync())
    servers = [replay(path) for path in recordings([tmp_path]) if path.name.startswith("server")]
    differences = [server.difference for server in servers if server.difference is not None]
    assert differences
    assert all("Contribute" in difference.call or "Initialise" in difference.call for difference in differences)


def _for_ever(*_: object) -> Any:
    while True:
        pass


# The first signal may come inside a callback of the garbage collector, which drops it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("role", "owner", "name"), [
    ("server", Sync, "complete"), ("worker", WorkerMachine, "_installed"),
])  # fmt: skip
def test_a_machine_that_loops_for_ever_is_stopped(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, role: str, owner: type, name: str
) -> None:
    """A damaged number can make a machine count for ever."""
    path = next(path for path in recordings([recorded]) if path.name.startswith(role))
    monkeypatch.setattr(owner, name, _for_ever)
    monkeypatch.setattr(replaying, "CALL_S", 0.1)
    with pytest.raises(RecordingError, match=r"has not ended after 0\.1 s of processor time: the recording is damaged"):
        replay(path)


def test_a_story_has_only_what_concerned_the_shard(recorded: Path) -> None:
    workers = [path for path in recordings([recorded]) if path.name.startswith("worker")]
    lines = [line for path in workers for line in story(told(path), 0)]
    assert any("Filled(shard=0" in line for line in lines)
    assert any("primary server" in line for line in lines)
    assert not any("shard=1" in line for line in lines)


def test_a_number_that_is_no_shard_is_not_taken_for_one(recorded: Path) -> None:
    """Servers tell each other measures of a step: step 0 is not shard 0."""
    servers = [path for path in recordings([recorded]) if path.name.startswith("server")]
    measures = [line for path in servers for line in story(told(path), 0) if " told(0, " in line]
    assert measures
    assert all("shard=0," in line for line in measures)


def test_a_broken_rule_fails_the_simulation_with_the_machine_s_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(self: ServerMachine) -> None:
        for index in self.held:
            machine = self.machine(index)
            assert isinstance(machine, ShardMachine)
            assert machine.version < 2, f"shard {index} has come to version 2"

    monkeypatch.setattr(ServerMachine, "validate", validate, raising=False)
    with pytest.raises(SimulationFailed, match=r"the machine of server\d broke a rule in .*: shard \d has come to"):
        simulate(17, Sync())
