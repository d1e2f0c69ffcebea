"""A replay computes a step of a run again: the recorded bytes, the module that is not finite, the sample at fault."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

import rallypoint as rp
from rallypoint.config import record_of, resolve
from rallypoint.coordinator.fingerprints import FINGERPRINTS, FingerprintLog, KeptFingerprints
from rallypoint.coordinator.journal import JOURNAL, Journal, kept_state
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.decisions import Decided
from rallypoint.core.protocol import Contributed, Updated
from rallypoint.core.sums import dense_shards, pieces_of
from rallypoint.core.view import ViewNumber
from rallypoint.errors import DataError, UsageError
from rallypoint.launch.observing import replay as command
from rallypoint.launch.observing.replay import Looked, NotFinite, differs, first_spike, lines_of
from rallypoint.launch.plan import Launch, write_plan
from rallypoint.store.manifest import Manifest
from rallypoint.watch.follow import recorded_losses
from rallypoint.worker.tensors import ModelTensors
from support.beside import until
from support.programs import Program, run_program

ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "ignore"}
# Replica 1 waits at the gate; sample POISON has a label that is far off; layer BAD divides by zero at step 9
SCRIPT = """
import sys, time
from pathlib import Path
import torch, rallypoint as rp
torch.manual_seed(0)
POISON, BAD = int(sys.argv[1]), int(sys.argv[2])
x = torch.randn(60, 6)
y = x.sum(1, keepdim=True) * 0.1
if POISON >= 0:
    y[POISON] = 500.0
class Block(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.inner = number, torch.nn.Linear(6, 6)
    def forward(self, x):
        out = torch.tanh(self.inner(x))
        return out / 0.0 if self.number == BAD and run.step == 9 else out
model = torch.nn.Sequential(Block(0), torch.nn.BatchNorm1d(6), Block(1), Block(2), torch.nn.Linear(6, 1))
gate = Path(__file__).parent / "gate"
with rp.join() as job:
    run = job.train(
        model, torch.utils.data.TensorDataset(x, y), replicas=4, batch=4, steps=16, network=rp.Network(shard_bytes=128),
        audit=rp.Audit(fingerprints=2),
        optimizer=rp.AdamW(lr=rp.cosine(1e-2, warmup=3)), clip=1.0,
    )
    @run.every(5)
    def evaluated(step):
        return {"steps": float(step)}
    for micro in run:
        with micro:
            while micro.replica == 1 and micro.step >= int(gate.read_text()):
                time.sleep(0.005)
                model[-1](model[0](micro.batch[0]))  # a roll-back ends it here
            x, y = micro.batch
            micro.backward((model(x) - y).square().mean(), weight=1.0 + micro.replica)
print("after the loop", file=sys.stderr)
"""


def run_of(home: Path, poison: int, bad: int, *, gate: int = 99, script: str = SCRIPT) -> Program:
    """A run that begins, with snapshots of every fifth step."""
    (home / "script.py").write_text(script)
    (home / "gate").write_text(str(gate))
    options = ["--workers", "1:3", "--servers", "2", "--replication", "2", "--snapshot-steps", "5"]
    options += ["--keep-last", "100", "--folder", str(home / "run")]
    arguments = ["-m", "rallypoint.cli", "run", *options, str(home / "script.py"), str(poison), str(bad)]
    return Program(arguments, home / "said", ENVIRONMENT)


def replayed(run: Path, *options: str, status: int = 0) -> dict[str, Any]:
    arguments = ["-m", "rallypoint.cli", "replay", str(run), *options, "--json"]
    before = contents(run)
    ended, said = run_program(arguments, run.parent / "replayed", env=ENVIRONMENT)
    assert ended == status, said
    assert "after the loop" not in said
    assert contents(run) == before, "a replay writes nothing into the run's folder"
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.programs
def test_a_replay_of_a_run_that_had_kills_has_the_recorded_bytes_and_finds_a_poisoned_sample(tmp_path: Path) -> None:
    """Up to three workers and two servers then, of which one each were killed; one process now."""
    run = tmp_path / "run"
    program = run_of(tmp_path, 42, -1, gate=6)
    try:
        until(lambda: (run / "events.jsonl").exists() and len(recorded_losses(run)) >= 6, "six steps are made")
        members = {child.name(): child for child in psutil.Process(program.pid).children(recursive=True)}
        for name in ("worker0", "server0"):
            members[name].kill()
        (tmp_path / "gate").write_text("99")
        assert program.wait(60) == 0, (tmp_path / "said").read_text()
    finally:
        program.kill()
        program.wait()
    with KeptFingerprints(run) as kept:
        assert kept.versions() == [2, 4, 6, 8, 10, 12, 14, 16]
        assert all(len(kept.contributions(step)) == 4 for step in (4, 8, 14))
    result = replayed(run, "--step", "8")  # from the snapshot of step 5: the step of the kills is computed again too
    assert [one["compared"]["differ"] for one in result["replicas"]] == [{}, {}, {}, {}]
    assert all(one["compared"]["equal"] > 1 and not one["compared"]["unknown"] for one in result["replicas"])
    assert result["loss"] == result["recorded_loss"] != ""
    assert result["departs"] == ""
    result = replayed(run, "--step", "15", "--replica", "2")
    assert [one["seen"]["replica"] for one in result["replicas"]] == [2]
    assert result["version"]["version"] == 16
    assert result["version"]["equal"] > 1
    assert not result["version"]["differ"]

    spike = first_spike(recorded_losses(run))
    assert spike is not None, recorded_losses(run)
    result = replayed(run, "--find-spike")
    assert result["step"] == spike.step
    (replica,) = result["replicas"]
    assert 42 in replica["seen"]["samples"]
    assert float(replica["loss"]) == max(map(float, result["losses"]))
    assert len(result["losses"]) == 4
    assert replica["compared"]["differ"] == {}

    script = run / "code" / "script.py"
    script.write_text(SCRIPT.replace("torch.tanh", "torch.sin"))  # another computation
    result = replayed(run, "--step", "13", status=1)
    assert "replica 0 at step 1" in result["departs"] or "the loss of step 13" in result["departs"]  # by the snapshot
    assert result["version"]["differ"]
    script.unlink()
    with pytest.raises(UsageError, match=r"has not kept the code of .*script\.py .*--current-code"):
        command.replay(run, lambda text: None, step=13)


@pytest.mark.slow
@pytest.mark.programs
def test_a_layer_that_makes_a_nan_is_named(tmp_path: Path) -> None:
    run, program = tmp_path / "run", run_of(tmp_path, -1, 1)
    try:
        assert program.wait(60) == 1, (tmp_path / "said").read_text()
    finally:
        program.kill()
        program.wait()
    result = replayed(run, "--find-spike")
    assert result["step"] == 9
    (replica,) = result["replicas"]
    assert replica["seen"]["not_finite"] == {"module": "2", "kind": "Block", "inputs": True, "parameters": True}
    assert replica["loss"] == "nan"


# Each evaluation but the first one reduces the rate
DECIDES = SCRIPT.replace(
    "clip=1.0,", 'clip=1.0, evaluation=rp.Evaluation('
    'plateau=rp.ReduceOnPlateau("steps", patience=0, factor=0.5), keep_best="steps"),'
).replace("run.every(5)", "run.every(3)").replace(
    "    for micro in run:", '    run.stop_when("steps", above=1e9, patience=9)\n    for micro in run:'
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.programs
def test_a_replay_has_the_rates_that_evaluations_have_reduced(tmp_path: Path) -> None:
    program = run_of(tmp_path, -1, -1, script=DECIDES)
    try:
        assert program.wait(60) == 0, (tmp_path / "said").read_text()
    finally:
        program.kill()
        program.wait()
    run = tmp_path / "run"
    state = kept_state(run)
    assert state is not None
    assert len([version for version in state.decided.reductions if 9 < version <= 15]) == 2, state.decided
    for snapshot in (run / "snapshots").glob("step-000000*"):
        if int(snapshot.name.split("-")[1]) > 9:
            shutil.rmtree(snapshot)
    result = replayed(run, "--step", "15")
    assert result["snapshot"].startswith("step-00000009")
    assert [one["compared"]["differ"] for one in result["replicas"]] == [{}, {}, {}, {}]
    assert (result["departs"], result["loss"]) == ("", result["recorded_loss"])
    assert result["version"]["equal"] > 1
    assert not result["version"]["differ"]


# ---- without a run ----


def events(folder: Path, *lines: str) -> None:
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_the_losses_of_a_log_are_those_of_the_last_time(tmp_path: Path) -> None:
    events(
        tmp_path, '{"t":1,"type":"StepDone","step":0,"loss":2.0,"items":1}',
        '{"t":2,"type":"StepDone","step":1,"loss":3.0,"items":1}',
        '{"t":3,"type":"StepDone","step":0,"loss":1.5,"items":1}',
        '{"t":5,"type":"StepDone","step":2,"loss":null,"items":1}', '{"t":6,"type":"StepDone","st',
        '{"t":7,"type":"Aborted","reason":"worker0: the loss of replica 2 at step 3 is inf: nothing of that step"}',
    )  # fmt: skip
    found = recorded_losses(tmp_path)
    assert list(found) == [0, 1, 2, 3]
    assert (found[0], found[1], found[3]) == (1.5, 3.0, math.inf)
    assert math.isnan(found[2])
    with pytest.raises(DataError, match=r"events\.jsonl cannot be read"):
        recorded_losses(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.0, 1.9, 2.1, 1.8, 1.9, 2.0, 1.9, 8.0, 9.0], 7),
        ([2.0, 1.9, 2.1, 1.8, 1.9, 2.0, 2.2, 2.1], None),
        ([9.0, 5.0, 3.0, 2.0, 1.5, 1.2, 1.1, 1.0], None),
        ([1.0, math.nan, 1.0], 1),
        ([1.0, 1.0, 50.0], None),  # nothing says yet what is usual
        ([1.0] * 40 + [1.2, 1.3], 41),  # without any deviation a quarter above counts
    ],
)
def test_a_spike_is_far_above_what_was_usual(losses: list[float], step: int | None) -> None:
    found = first_spike(dict(enumerate(losses)))
    assert (None if found is None else found.step) == step


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(6, 30), torch.nn.Linear(30, 3))


CONFIG = resolve({"replicas": 2, "network.shard_bytes": 128})
LAYOUT = ModelTensors(Net(), CONFIG).layout


def fingerprints(folder: Path, *, flipped: bool = False) -> KeptFingerprints:
    """A run that has recorded replica 1 of step 4, and version 5. With `flipped` something else."""
    folder.mkdir()
    log = FingerprintLog(str(folder), lambda text: None)
    replay = bytearray(b"".join(bytes([shard + 1]) * 16 for shard in dense_shards(LAYOUT)))
    replay[16] ^= flipped
    log.add("worker3", Contributed(4, 1, 0.5, bytes(replay), ViewNumber(1)))
    for shard, pieces in enumerate(pieces_of(LAYOUT)):
        held = bytearray(range(16)) * len(pieces)
        held[0] ^= flipped and shard == 2
        log.add("server0", Updated(5, shard, bytes(held), ViewNumber(1)))
    for thread, _ in log.stop():
        thread.join()
    return KeptFingerprints(folder)


def test_shards_and_tensors_that_differ_are_named(tmp_path: Path) -> None:
    with (
        fingerprints(tmp_path / "one") as one, fingerprints(tmp_path / "same") as same,
        fingerprints(tmp_path / "other", flipped=True) as other,
    ):  # fmt: skip
        compared = command.compared_contribution(LAYOUT, one, same, 4, 1)
        assert (compared.worker, compared.equal, compared.unknown) == ("worker3", len(dense_shards(LAYOUT)), 0)
        assert command.compared_version(LAYOUT, one, same, 5).differ == ()
        assert command.first_difference(LAYOUT, one, same, range(9)) == ""
        second = dense_shards(LAYOUT)[1]
        names = tuple(piece.name for piece in pieces_of(LAYOUT)[second])
        assert command.compared_contribution(LAYOUT, one, other, 4, 1).differ == {second: names}
        assert command.compared_version(LAYOUT, one, other, 5).differ == (pieces_of(LAYOUT)[2][0].name,)
        found = command.first_difference(LAYOUT, one, other, range(9))
        assert found == f"replica 1 at step 4 (then on worker3), first in {', '.join(names)}"
        nothing = command.compared_contribution(LAYOUT, one, other, 4, 0)
        assert (nothing.worker, nothing.equal, nothing.unknown) == ("", 0, len(dense_shards(LAYOUT)))


def test_a_result_in_words() -> None:
    seen = Looked(1, (7, 9), NotFinite("blocks.2", "Block", True, True))
    compared = command.ComparedDigests("worker0", {0: "00", 1: "01"}, 1, 0, {1: ("0.weight",)})
    result = command.Replayed(
        4, "step-00000003-1", 1, "cpu", "nan", "", (command.Replica(seen, "nan", compared),),
        command.Version(5, 0, ("0.weight",)), "replica 1 at step 4", "inf", "2.0", ("0.5", "nan"),
    )  # fmt: skip
    assert list(lines_of(result)) == [
        "step 4 stands out: its recorded loss is inf, usually 2", "  losses of its replicas 0 to 1: 0.5, nan",
        "step 4: loss nan, none is recorded; on cpu", "replica 1: loss nan, samples 7, 9 of the data set",
        "  first output that is not finite: blocks.2 (Block); its inputs are finite",
        "  contribution: 1 of 2 shards differ from what worker0 computed then; the first is shard 1 (0.weight)",
        "version 5, after the step: 0.weight differ", "differs from what is recorded: replica 1 at step 4",
    ]
    strange = msgspec.structs.replace(result, departs="\x1b[2J", version=command.Version(5, 0, ("\x1b]0;x\x07",)))
    assert all(line.isprintable() for line in lines_of(strange))
    assert differs(result)
    assert not differs(msgspec.structs.replace(result, replicas=(), departs="", version=command.Version(5, 0, ())))


def test_what_cannot_be_replayed_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not the folder of a run"):
        command.replay(tmp_path, lambda text: None, step=3)
    write_plan(Launch(worker=("true",), folder=str(tmp_path)))
    with pytest.raises(UsageError, match="--snapshots none"):
        command.replay(tmp_path, lambda text: None, step=3)
    with pytest.raises(UsageError, match=r"a replay is not supported under rp\.Async.*: what a version has"):
        command._check(record_of(resolve({"sync": {"type": "async"}}), LAYOUT), 3, -1)
    job = record_of(CONFIG, LAYOUT)
    with pytest.raises(UsageError, match="the last one is step 99"):
        command._check(job, 100, -1)
    with pytest.raises(UsageError, match="2 replicas, 0 to 1"):
        command._check(job, 3, 2)


# ---- comparing two runs ----


def journaled(folder: Path, *, killed: bool = True, flipped: bool = False) -> Path:
    """The folder of a run that has recorded what `fingerprints` says; if it was killed, its journal's log is there."""
    fingerprints(folder, flipped=flipped).__exit__()
    journal = Journal(str(folder))
    journal.save(ClusterState(record_of(CONFIG, LAYOUT), None, (), 3, 1, True, 5, 2))
    left = {path: path.read_bytes() for path in folder.glob(f"{JOURNAL}*")}
    journal.close()
    if killed:
        for path, content in left.items():
            path.write_bytes(content)
    return folder


def test_two_runs_are_only_read(tmp_path: Path) -> None:
    one, other = journaled(tmp_path / "one"), journaled(tmp_path / "other", killed=False)
    assert (one / f"{JOURNAL}-wal").stat().st_size > 0
    for path in (*one.iterdir(), *other.iterdir()):
        path.chmod(0o640)
    before = contents(one) | contents(other)
    found = command.diff(one, other)
    assert command.words_of(found) == "equal: all 1 versions that both have recorded, up to version 5"
    after = contents(one) | contents(other)
    assert before.keys() == after.keys()
    assert [name for name in after if after[name] != before[name]] in ([], [str(one / f"{JOURNAL}-shm")])  # its index
    assert {oct(Path(name).stat().st_mode & 0o777) for name in after} == {"0o640"}


@pytest.mark.parametrize("name", [JOURNAL, FINGERPRINTS])
def test_a_link_in_a_run_s_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    one, other = journaled(tmp_path / "one"), journaled(tmp_path / "other")
    (other / name).unlink()
    (other / name).symlink_to(one / name)
    with pytest.raises(DataError, match=rf"{name} is not a regular file"):
        command.diff(one, other)


@pytest.mark.parametrize("change", [
    "update versions set digests = 'text'", "update versions set digests = 3",
    "update versions set shard = 'a' where shard = 2",
    "update versions set digests = x'00'", "update contributions set worker = x'ff'",
    "update contributions set loss = 'much'", "update contributions set digests = null",
    "update contributions set replica = 'first'",
])  # fmt: skip
def test_digests_of_another_type_or_length_are_a_sentence(tmp_path: Path, change: str) -> None:
    one, other = journaled(tmp_path / "one"), journaled(tmp_path / "other", flipped=True)
    assert command.diff(one, other).contribution
    with contextlib.closing(sqlite3.connect(other / FINGERPRINTS)) as kept, kept:
        kept.execute(change)
    with pytest.raises(DataError, match="digests"):
        command.diff(one, other)


def test_a_file_of_digests_that_is_too_large_without_any_step_ends_no_thread(tmp_path: Path) -> None:
    said = list[str]()
    log = FingerprintLog(str(tmp_path), said.append, most=0)
    for step in range(600):
        log.add("worker0", Contributed(step, 0, 0.5, bytes(16), ViewNumber(1)))
    for thread, _ in log.stop():
        thread.join()
    with KeptFingerprints(tmp_path) as kept:
        assert len(kept.contributions(599)) == 1  # the thread was there to the end


def test_a_difference_is_printable() -> None:
    found = command.Difference(3, 1, 4, ("a\x1b[2J",), "replica 1 (then on \x1b]0;x\x07)")
    assert command.words_of(found).isprintable()


def test_reductions_of_the_rates_after_the_snapshot_are_in_the_journal(tmp_path: Path) -> None:
    config = resolve({"replicas": 2, "network.shard_bytes": 128, "evaluation.plateau": rp.ReduceOnPlateau("loss")})
    job = record_of(config, LAYOUT)
    record = msgspec.to_builtins(job, str_keys=True)
    decided = Decided(9, reductions=(3, 6, 12))
    manifest = Manifest("step-00000010-1", 10, record, 0.0, {}, "none", {}, {}, decided=decided)
    with pytest.raises(UsageError, match=rf"has no {JOURNAL}, which says at which steps the rates were reduced"):
        command._reductions(manifest, tmp_path, kept_state(tmp_path))
    journal = Journal(str(tmp_path))
    journal.save(ClusterState(job, None, (), 3, 1, True, 5, 2, decided=Decided(15, reductions=(3, 6, 12, 15))))
    journal.close()
    assert command._reductions(manifest, tmp_path, kept_state(tmp_path)) == (3, 6, 12, 15)


# As on a busy machine: what servers say of the last steps comes when the replay has computed them already.
LATE = """
import os, threading
if os.environ.get("RALLYPOINT_REPLAY"):
    from rallypoint.coordinator.inbox import Owner
    from rallypoint.core.protocol import Applied
    put = Owner.put
    def late(owner, event):
        message = getattr(event, "message", None)
        if isinstance(message, Applied) and message.step > 10:
            threading.Timer(0.5, put, (owner, event)).start()
        else:
            put(owner, event)
    Owner.put = late
"""


@pytest.mark.slow
@pytest.mark.programs
def test_a_replay_ends_when_the_loss_of_its_step_is_known(tmp_path: Path) -> None:
    program = run_of(tmp_path, -1, -1, script=LATE + SCRIPT)
    assert program.wait(240) == 0, (tmp_path / "said").read_text()
    result = replayed(tmp_path / "run", "--step", "12")
    assert result["loss"] == result["recorded_loss"] != ""
