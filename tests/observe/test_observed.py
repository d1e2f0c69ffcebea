"""Machines that are recorded and checked; one that is neither is left as it is."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest

from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.policy import Sync
from rallypoint.core.shard.events import Contribute, Fold, Initialise, Unfollowed
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.streaming import StreamMachine
from rallypoint.observe.observed import QUESTIONS, changing_methods, observed, watched
from rallypoint.observe.recording import SUFFIX, Beginning, Recorder
from support.replay import RecordingError, read, replay


@pytest.fixture(autouse=True)
def _neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLYPOINT_RECORD", raising=False)
    monkeypatch.delenv("RALLYPOINT_CHECK", raising=False)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _play(machine: ShardMachine, steps: int) -> None:
    machine.handle(Initialise(1))
    for step in range(steps):
        for replica in range(machine.expected):
            machine.handle(Contribute(step, replica, 1.0, 10 * step + replica))


def test_without_either_variable_a_machine_is_left_as_it_is() -> None:
    machine = ShardMachine(Sync(), 2)
    assert observed(machine, "server0") is machine
    assert type(machine) is ShardMachine


def test_a_recorded_machine_is_of_its_class_and_answers_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_RECORD", str(tmp_path))
    plain, machine = ShardMachine(Sync(), 2), observed(ShardMachine(Sync(), 2), "server0")
    assert isinstance(machine, ShardMachine)
    for event in (Initialise(1), Contribute(0, 1, 1.0, 2), Contribute(0, 0, 1.0, 3)):
        assert machine.handle(event) == plain.handle(event)
    [path] = _files(tmp_path)
    assert path.name.startswith("server0-")
    assert replay(path).calls == 3
    replay(path).check()


def test_every_public_method_is_recorded_but_those_that_only_answer() -> None:
    assert set(changing_methods(ServerMachine)) >= {"handle", "adopt", "capture", "told", "measured", "decided"}
    for kind in (WorkerMachine, StreamMachine):
        assert set(changing_methods(kind)) >= {"handle", "take", "fill"}
    assert "handle" in changing_methods(ClusterMachine)
    for kind in (ServerMachine, WorkerMachine, StreamMachine, ClusterMachine):
        assert not QUESTIONS & set(changing_methods(kind))


def test_a_call_that_a_machine_makes_of_itself_is_part_of_the_outer_call(tmp_path: Path) -> None:
    class Twice(ShardMachine):
        __slots__ = ()

        def twice(self) -> None:
            self.handle(Fold())
            self.handle(Fold())

    recorder = Recorder(tmp_path, "twice")
    machine = watched(Twice(Sync(), 1), "twice")
    machine.twice()
    machine = watched(ShardMachine(Sync(), 1), "twice", recorder)
    machine.handle(Fold())
    _, calls = read(recorder.path)
    assert [call.method for call in calls] == ["handle"]


def test_a_killed_process_loses_at_most_the_last_call(tmp_path: Path) -> None:
    """Nothing is kept back in the process; a last record that is not whole is left out."""
    recorder = Recorder(tmp_path, "server0")
    machine = watched(ShardMachine(Sync(), 2), "server0", recorder)
    _play(machine, steps=3)
    assert replay(recorder.path).calls == 7
    whole = recorder.path.read_bytes()
    recorder.path.write_bytes(whole[:-1])
    assert replay(recorder.path).calls == 6
    replay(recorder.path).check()


def test_a_recording_takes_a_bounded_place_and_its_end_replays(tmp_path: Path) -> None:
    limit = 20_000
    recorder = Recorder(tmp_path, "server0", limit)
    machine = watched(ShardMachine(Sync(), 2), "server0", recorder)
    _play(machine, steps=300)
    files = _files(tmp_path)
    assert len(files) == 2
    assert sum(path.stat().st_size for path in files) < 1.2 * limit
    for path in files:
        replay(path).check()
    assert replay(recorder.path).machine.version == machine.version == 300


def test_two_machines_of_one_name_have_a_file_each(tmp_path: Path) -> None:
    for _ in range(2):
        watched(ShardMachine(Sync(), 2), "server0", Recorder(tmp_path, "server0"))
    assert len(_files(tmp_path)) == 2


def test_another_answer_is_found_with_the_event_and_both_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, "server0")
    _play(watched(ShardMachine(Sync(), 2), "server0", recorder), steps=2)
    monkeypatch.setattr(ShardMachine, "_publish", lambda self, *_: [])
    difference = replay(recorder.path).difference
    assert difference.number == 1
    assert "Initialise(ticket=1" in difference.call
    assert "Publish(version=0)" in difference.expected
    assert "Publish" not in difference.got
    with pytest.raises(AssertionError, match="server0: call 1"):
        replay(recorder.path).check()


def test_a_failure_of_the_machine_is_recorded_and_replayed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "server0")
    machine = ShardMachine(Sync(), 1)
    machine.policy = None  # type: ignore[assignment]
    machine = watched(machine, "server0", recorder)
    machine.handle(Initialise(1))
    with pytest.raises(AttributeError):
        machine.handle(Contribute(0, 0, 1.0, 1))
    replayed = replay(recorder.path)
    replayed.check()
    assert replayed.calls == 2


def test_what_cannot_be_recorded_ends_the_recording_and_not_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path, "server0")
    machine = watched(ShardMachine(Sync(), 2), "server0", recorder)
    machine.handle(Initialise(1))
    machine.handle(Unfollowed(object()))  # type: ignore[arg-type]
    machine.handle(Contribute(0, 0, 1.0, 1))
    said = capsys.readouterr().err
    assert said.startswith("RALLYPOINT_RECORD: the recording of server0 ends here: a builtins.object cannot be ")
    assert said.count("\n") == 1
    assert replay(recorder.path).calls == 1


def test_a_folder_that_cannot_be_written_ends_the_recording_and_not_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    machine = watched(ShardMachine(Sync(), 2), "server0", Recorder(tmp_path / "file" / "folder", "server0"))
    assert machine.handle(Initialise(1))
    assert "the recording of server0 ends here" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\0", b"\5\0\0\0hello", b"\xff" * 40])
def test_a_file_that_is_no_recording_is_refused_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "what").write_bytes(content)
    with pytest.raises(RecordingError, match="is no recording of a machine"):
        replay(path)


def test_a_recording_of_another_format_is_refused_with_the_version_that_reads_it(tmp_path: Path) -> None:
    record = msgspec.msgpack.encode(Beginning(1, "0.0.9", "server0", 1, ["l"]))
    (path := tmp_path / "old").write_bytes(struct.pack("<I", len(record)) + record)
    with pytest.raises(RecordingError, match=r"is of format 1, not 3: use Rallypoint 0\.0\.9"):
        replay(path)


@pytest.mark.parametrize("record", [
    *map(msgspec.msgpack.encode, (
        [0.0, "handle", 1.5, {}, None], [0.0, "handle", [], True, None],
        [0.0, "handle", [["core.shard.clip:Rule", *[["-"]] * 5]], {}, 1],
    )),
    b"\x95\x00\xa1\xff", b"\x95\x00" + b"\x91" * 100_000,
], ids=["arguments", "names", "a message", "no text", "too deep"])  # fmt: skip
def test_a_damaged_call_is_refused_with_a_sentence(tmp_path: Path, record: bytes) -> None:
    recorder = Recorder(tmp_path, "server0")
    watched(ShardMachine(Sync(), 2), "server0", recorder)
    with recorder.path.open("ab") as file:
        file.write(struct.pack("<I", len(record)) + record)
    with pytest.raises(RecordingError, match="damaged: call 1" if b"Rule" in record else "record 1 is damaged"):
        replay(recorder.path)


class _Wrong(ShardMachine):
    __slots__ = ()

    def validate(self) -> None:
        assert self.version < 1, "version 1 is too much"


def test_a_machine_is_checked_after_every_call_and_what_is_wrong_is_a_sentence() -> None:
    said: list[str] = []
    machine = watched(_Wrong(Sync(), 1), "server0", broken=said.append)
    machine.handle(Initialise(1))
    assert not said
    machine.handle(Contribute(0, 0, 1.0, 2))
    assert len(said) == 1
    assert said[0].startswith("the machine of server0 broke a rule in handle(Contribute(step=0, replica=0")
    assert said[0].endswith("version 1 is too much")


def test_a_machine_that_breaks_a_rule_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr("rallypoint.observe.observed.end_process", ended.append)
    monkeypatch.setenv("RALLYPOINT_CHECK", "1")
    machine = observed(_Wrong(Sync(), 1), "server0")
    machine.handle(Initialise(1))
    machine.handle(Contribute(0, 0, 1.0, 2))
    assert len(ended) == 1
