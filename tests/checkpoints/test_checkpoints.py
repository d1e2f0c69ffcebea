"""Checkpoints in and out: plain training, then the job, then plain training again, is one training, byte for byte."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plain_training import (
    BATCH,
    BY_NAME,
    FIRST,
    OPTIMIZERS,
    STEPS,
    Net,
    build,
    data,
    going_on,
    half_way,
    loss_of,
    plain,
    same,
    settings,
    undisturbed,
)
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import rallypoint as rp
from rallypoint.config import record_of, resolve
from rallypoint.coordinator.service import JoinInfo
from rallypoint.core.cluster.state import Resumed
from rallypoint.data.identity import identity_of
from rallypoint.errors import ConfigError, DataError, RallypointError, SnapshotFailed
from rallypoint.launch.commands.importing import ImportTask
from rallypoint.launch.embedded import EmbeddedJob, ImportJob
from rallypoint.store import checkpoints
from rallypoint.store.checkpoints import Checkpoint, begin_from, read_checkpoint
from rallypoint.store.export import export_snapshot
from rallypoint.store.manifest import Manifest
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.worker.tensors import ModelTensors
from support.training import optimizer_state


def imported(found: Checkpoint, store: SnapshotStore, mine: dict[str, Any], step: int = FIRST) -> Manifest:
    config = resolve(mine)
    tensors = ModelTensors(build(), config)
    record = record_of(config, tensors.layout, data=identity_of(data()), tied=tensors.tied)
    return begin_from(found, step, record, config, store)


def trained(begin: Manifest, store: SnapshotStore, mine: dict[str, Any]) -> Net:
    """The job from its snapshot on, in this process."""
    model, seen = build(), []
    resume = Resumed(begin.job, begin.id, begin.version)
    with EmbeddedJob(resume=resume, about=JoinInfo(snapshots=store.url)) as job:
        for micro in job.train(model, data(), **mine):
            seen.append(micro.step)
            with micro:
                micro.backward(loss_of(model, micro.batch))
    assert seen == list(range(FIRST, STEPS))
    return model


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(str(tmp_path / "snapshots"))


@pytest.mark.parametrize(
    ("optimizer", "options", "sync"),
    [("adamw", BY_NAME, rp.Sync()), ("momentum", None, rp.Sync()), ("adamw", None, rp.AllReduce())],
    ids=["by name", "by group", "all-reduce"],
)
def test_a_job_goes_on_from_plain_training_with_its_bytes(
    optimizer: str, options: StateDictOptions | None, sync: Any, tmp_path: Path, store: SnapshotStore
) -> None:
    half_way(optimizer, tmp_path / "plain", options)
    mine = settings(optimizer, sync=sync)
    begin = imported(read_checkpoint(tmp_path / "plain"), store, mine)
    same(trained(begin, store, mine), undisturbed(optimizer))


def test_without_an_optimizers_state_it_begins_anew(tmp_path: Path, store: SnapshotStore) -> None:
    half_way("adamw", tmp_path / "plain")
    weights = read_checkpoint(tmp_path / "plain").model
    place = tmp_path / "model.safetensors"
    save_file({f"module.{name}": w.clone() for name, w in weights.items() if name != "again.weight"}, place)
    expected = build()
    expected.load_state_dict(weights)
    plain(expected, OPTIMIZERS["adamw"][1](expected.parameters()), range(FIRST, STEPS))
    begin = imported(read_checkpoint(place), store, settings("adamw"))
    same(trained(begin, store, settings("adamw")), expected)


def test_plain_training_goes_on_from_an_export(tmp_path: Path, store: SnapshotStore) -> None:
    half_way("adamw", tmp_path / "plain")
    imported(read_checkpoint(tmp_path / "plain"), store, settings("adamw"))
    out = tmp_path / "out"
    assert "wrote 10 tensors" in export_snapshot(store.url, out, format="dcp")
    same(going_on("adamw", out, range(FIRST, STEPS)), undisturbed("adamw"))
    assert read_checkpoint(out).step == FIRST
    with pytest.raises(SnapshotFailed, match="is there already"):
        export_snapshot(store.url, out, format="dcp")


# Every optimizer of the servers, as plain PyTorch has it.
EVERY: dict[str, tuple[Any, Callable[[Net], list[torch.optim.Optimizer]]]] = {
    "sgd": (rp.SGD(lr=0.1), lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)]),
    "adam": (rp.Adam(), lambda m: [torch.optim.Adam(m.parameters())]),
    "adagrad": (rp.Adagrad(), lambda m: [torch.optim.Adagrad(m.parameters())]),
    "nadam": (rp.NAdam(), lambda m: [torch.optim.NAdam(m.parameters())]),
    "radam": (rp.RAdam(), lambda m: [torch.optim.RAdam(m.parameters())]),
    "adamax": (rp.Adamax(), lambda m: [torch.optim.Adamax(m.parameters())]),
    "adadelta": (rp.Adadelta(), lambda m: [torch.optim.Adadelta(m.parameters())]),
    "rmsprop": (
        rp.RMSprop(momentum=0.9, centered=True),
        lambda m: [torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True)],
    ),
    "asgd": (rp.ASGD(), lambda m: [torch.optim.ASGD(m.parameters())]),
    "muon": (
        rp.Muon(),
        lambda m: [
            torch.optim.Muon([p for p in m.parameters() if p.dim() == 2]),
            torch.optim.AdamW([p for p in m.parameters() if p.dim() != 2]),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizers_state_goes_in_and_out_unchanged(name: str, tmp_path: Path, store: SnapshotStore) -> None:
    spec, of = EVERY[name]
    model = build()
    optimizers = of(model)
    for step in range(2):
        loss_of(model, data()[step * BATCH : (step + 1) * BATCH]).backward()
        for optimizer in optimizers:
            optimizer.step()
    weights, state = get_state_dict(model, optimizers, options=BY_NAME)
    kept = {
        key.removeprefix("state."): value for key, value in state.items()
        if key.startswith("state.") and isinstance(value, torch.Tensor)
    }  # fmt: skip
    torch.save({"model": weights, "optimizer": _nested(kept)}, tmp_path / "plain.pt")
    manifest = imported(read_checkpoint(tmp_path / "plain.pt"), store, settings("adamw", optimizer=spec))
    found = optimizer_state(store, manifest)
    flat = {f"{name}.{kind}": torch.as_tensor(value) for name, s in found.items() for kind, value in s.items()}
    assert flat.keys() == kept.keys()
    assert all(torch.equal(flat[key], kept[key].to(flat[key].dtype)) for key in kept)
    export_snapshot(store.url, tmp_path / "out", format="dcp")
    again = read_checkpoint(tmp_path / "out").optimizer
    assert all(torch.equal(again[key.rpartition(".")[0]][key.rpartition(".")[2]], kept[key]) for key in kept)


def _nested(flat: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in flat.items():
        states.setdefault(key.rpartition(".")[0], {})[key.rpartition(".")[2]] = value
    return states


def test_a_hugging_face_folder_has_each_tied_tensor_once(tmp_path: Path, store: SnapshotStore) -> None:
    imported(Checkpoint(build().state_dict()), store, settings("adamw"))
    folder = tmp_path / "hub"
    assert "config.json" in export_snapshot(store.url, folder, format="hf")
    expected = build().state_dict()
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys() - {"again.weight"}
    assert read_checkpoint(folder).model.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    (folder / "config.json").write_text("{}")
    assert "config.json" not in export_snapshot(store.url, folder, format="hf")


def test_an_optimizer_that_plain_training_does_not_have_is_left_out(tmp_path: Path, store: SnapshotStore) -> None:
    manifest = imported(Checkpoint(build().state_dict()), store, settings("adamw"))
    local = resolve(settings("adamw", sync=rp.LocalSteps(2)))
    record = msgspec.structs.replace(manifest.job, config=msgspec.to_builtins(local))
    store.commit(msgspec.structs.replace(manifest, record=msgspec.to_builtins(record)))
    assert "without the optimizer's state" in export_snapshot(store.url, tmp_path / "out", format="dcp")
    assert not read_checkpoint(tmp_path / "out").optimizer


def _state(**more: Any) -> dict[str, Any]:
    moments = {
        name: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p), "step": torch.tensor(3.0)}
        for name, p in build().named_parameters()
    }  # fmt: skip
    return moments | more


WEIGHTS = build().state_dict()
WHOLE = Checkpoint(WEIGHTS, _state())
WITH = dataclasses.replace


@pytest.mark.parametrize(
    ("found", "more", "said"),
    [
        (Checkpoint({"stem.weight": WEIGHTS["stem.weight"]}), {}, r"has no weights of back\S+: it has stem.weight$"),
        (Checkpoint(WEIGHTS | {"stem.bias": torch.zeros(3)}), {}, r"stem.bias is \(3,\) in the checkpoint and \(24,\)"),
        (Checkpoint(WEIGHTS | {"stem.bias": torch.full((24,), torch.nan)}), {}, "stem.bias has values that"),
        (
            WITH(WHOLE, optimizer=_state(**{"stem.bias": _state()["stem.bias"] | {"exp_avg": torch.ones(24) / 0}})),
            {}, "exp_avg of stem.bias has values that",
        ),
        (WITH(WHOLE, optimizer={"stem.bias": {}}), {}, "has no optimizer state of "),
        (WHOLE, {"optimizer": rp.SGD(momentum=0.9)}, "is exp_avg, exp_avg_sq, step, and rp.SGD keeps momentum_buffer"),
        (WITH(WHOLE, optimizer=_state(**{"stem.bias": _state()["back.bias"]})), {}, "does not have the weight's shape"),
        (
            WITH(WHOLE, optimizer=_state(**{"stem.bias": {**_state()["stem.bias"], "step": torch.tensor(4.0)}})),
            {"network.shard_bytes": 1 << 20}, "another step",
        ),
        (
            Checkpoint(WEIGHTS | {"again.weight": WEIGHTS["again.weight"] + 1}), {},
            "has other weights of again.weight than of stem.weight, which are one tensor",
        ),
        (
            WITH(WHOLE, optimizer=_state(**{"again.weight": {**_state()["stem.weight"], "step": torch.tensor(4.0)}})),
            {}, "has other optimizer state of again.weight than of stem.weight",
        ),
        (
            WHOLE, {"evaluation.plateau": rp.ReduceOnPlateau("loss")},
            "with evaluation.plateau cannot begin from a checkpoint of step 3"
        ),
        (WHOLE, {"steps": FIRST}, "of step 3, and the job has 3"),
        (WHOLE, {"average": rp.EMA(0.9)}, "cannot begin from a checkpoint: a checkpoint has no average"),
        (WHOLE, {"sync": rp.Async()}, "only jobs with"),
        (WHOLE, {"sync": rp.LocalSteps(2)}, "only jobs with"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_sentence(
    found: Checkpoint, more: dict[str, Any], said: str, store: SnapshotStore
) -> None:
    with pytest.raises(RallypointError, match=said) as raised:
        imported(found, store, settings("adamw", **more))
    assert isinstance(raised.value, DataError | ConfigError)
    assert not store.holds_any()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none", None, "there is no checkpoint"),
        ("list.pt", [torch.zeros(1)], "not a dict of tensors"),
        ("numbers.pt", {"model": WEIGHTS, "optimizer": {"state": {0: {"step": 1.0}}}}, "is by number"),
        ("usual.pt", {"state_dict": WEIGHTS, "epoch": 3}, r"no tensors by name \(state_dict, epoch\): save model"),
        ("bad.pt", b"no file of torch", "cannot be read"),
        ("bad.safetensors", b"no file of safetensors", "cannot be read"),
    ],
)
def test_what_is_no_checkpoint_is_named(name: str, content: Any, said: str, tmp_path: Path) -> None:
    place = tmp_path / name
    if isinstance(content, bytes):
        place.write_bytes(content)
    elif content is not None:
        torch.save(content, place)
    with pytest.raises(DataError, match=said):
        read_checkpoint(place)


class Partly(torch.nn.Module):
    """A model with a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 6)
        self.fixed = torch.nn.Parameter(torch.ones(6), requires_grad=False)


@pytest.mark.parametrize(
    ("fixed", "step", "said"),
    [
        (2.0, 3, "has other values of fixed, which is frozen"),
        (1.0, -1, "does not say of which step it is"),
        (1.0, 3, ""),
    ],
)
def test_the_script_says_what_the_snapshot_is_of(fixed: float, step: int, said: str, tmp_path: Path) -> None:
    model, store, answer = Partly(), SnapshotStore(str(tmp_path / "snapshots")), tmp_path / "answer"
    save_file({**model.state_dict(), "fixed": torch.full((6,), fixed)}, tmp_path / "model.safetensors")
    task = ImportTask(str(tmp_path / "model.safetensors"), step, store.url, str(answer), "run")
    with ImportJob(task) as job:
        with pytest.raises(DataError if said else SystemExit, match=said or "0"):
            job.train(model, data(), **settings("adamw"))
        job.close()
    assert answer.exists() == store.holds_any() == (not said)


# ---- A checkpoint that is damaged, or made to run something, is refused with a sentence ----


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoints.write_dcp({"model": build().state_dict(), "step": 1000}, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("beside", ["model.safetensors", "model.safetensors.index.json", ""])
def test_a_list_of_tensors_that_runs_something_is_refused(beside: str, tmp_path: Path) -> None:
    folder, marker = tmp_path / "folder", tmp_path / "marker"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    if beside:
        save_file({"weight": torch.ones(1)}, folder / beside)
    with pytest.raises(DataError, match=f"has both .metadata and {beside}" if beside else "which no such list needs"):
        read_checkpoint(folder)
    assert not marker.exists()


def test_a_list_of_tensors_names_no_file_outside_of_its_folder(saved: Path) -> None:
    content = pickle.loads((saved / ".metadata").read_bytes())
    for about in content.storage_data.values():
        about.relative_path = f"../saved/{about.relative_path}"
    (saved / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match="outside of its folder"):
        read_checkpoint(saved)


def test_a_step_may_be_a_plain_number(saved: Path, tmp_path: Path) -> None:
    assert read_checkpoint(saved).step == 1000
    checkpoints.write_dcp({"model": build().state_dict(), "step": "1000"}, tmp_path / "text")
    with pytest.raises(DataError, match="its step is neither a tensor nor a whole number"):
        read_checkpoint(tmp_path / "text")


@pytest.mark.parametrize("left", [0, 100, -1])
def test_missing_and_truncated_files_are_named(left: int, saved: Path) -> None:
    [file] = saved.glob("*.distcp")
    os.truncate(file, left) if left >= 0 else file.unlink()
    with pytest.raises(DataError, match=r"saved (lacks a file|cannot be read)"):
        read_checkpoint(saved)


def test_a_failure_in_torch_comes_out_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    failures: list[BaseException] = [OSError(28, "No space left"), ValueError("bad"), KeyboardInterrupt()]
    for failure, expected in zip(failures, (OSError, RuntimeError, KeyboardInterrupt), strict=True):

        def fail(*args: object, error: BaseException = failure) -> None:
            raise error

        monkeypatch.setattr(FileSystemWriter, "write_data", fail)
        with pytest.raises(expected):
            checkpoints.write_dcp({"model": {"weight": torch.ones(1)}}, tmp_path / "out")


def test_an_old_index_beside_the_model_is_not_read(tmp_path: Path) -> None:
    """As a job that was exported to a folder that had a model in several files leaves it."""
    save_file({"weight": torch.zeros(2)}, tmp_path / "old.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "old.safetensors"}}')
    assert read_checkpoint(tmp_path).model["weight"].tolist() == [0.0, 0.0]
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path).model["weight"].tolist() == [1.0, 1.0]
