"""A snapshot becomes the model that it was taken of: same names, shapes, dtypes and bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from samples import take

from rallypoint.config import JobConfig, record_of
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Entry, Layout, TensorSpec, build_layout
from rallypoint.core.modes import Feature
from rallypoint.errors import ConfigError, DamagedSnapshot, SnapshotError, SnapshotFailed
from rallypoint.store.export import export_snapshot, model_state
from rallypoint.store.files import Files
from rallypoint.store.manifest import Manifest, snapshot_id
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.worker.tensors import ModelTensors
from support.training import optimizer_state

VERSION = 3


class Net(torch.nn.Module):
    """Two optimizer groups, a half-precision parameter, a 0-d one, an empty one, buffers of many dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(7, 13)
        self.norm = torch.nn.BatchNorm1d(13)
        self.head = torch.nn.Linear(13, 5).to(torch.bfloat16)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, 1e-40], dtype=torch.float64))
        for dtype in (torch.complex64, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.arange(3.0).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.stem(x)) * self.scale + self.nothing.sum()
        return self.head(hidden.to(torch.bfloat16)).float()


class Trained:
    """A trained model, torch's own optimizer over fp32 masters, and what servers would hold of both."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Net()
        names = dict(self.model.named_parameters())
        self.masters = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in names.items()}
        decayed = [p for p in self.masters.values() if p.dim() >= 2]
        others = [p for p in self.masters.values() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        for _ in range(VERSION):
            self._step(names)
        specs = [TensorSpec(n, tuple(p.shape), dtype_of(p), 0 if p.dim() >= 2 else 1) for n, p in names.items()]
        specs += [TensorSpec(n, tuple(b.shape), dtype_of(b), -1) for n, b in self.model.named_buffers()]
        self.layout = build_layout(specs, 256)

    def _step(self, names: dict[str, torch.nn.Parameter]) -> None:
        self.model.zero_grad()
        self.model(torch.randn(8, 7)).square().mean().backward()
        for name, master in self.masters.items():
            gradient = names[name].grad
            master.grad = gradient.float()
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in names.items():
                parameter.copy_(self.masters[name])

    def records(self) -> Iterator[ShardRecord]:
        vectors = {"master": self._vector(lambda name: self.masters[name].detach())}
        for kind in ("exp_avg", "exp_avg_sq"):
            vectors[kind] = self._vector(lambda name, kind=kind: self.optimizer.state[self.masters[name]][kind])
        for shard in self.layout.shards:
            kinds = list(vectors) if shard.group >= 0 else ["master"]
            arrays = {kind: vectors[kind][shard.start : shard.stop].copy() for kind in kinds}
            arrays["elsewhere"] = np.zeros(1, np.int64)  # not one value per word: not to be cut
            yield ShardRecord(shard.index, VERSION, arrays, {"step": float(VERSION)} if shard.group >= 0 else {})

    def _vector(self, of: Any) -> np.ndarray:
        raw = np.zeros(self.layout.words * 4, np.uint8)
        buffers = dict(self.model.named_buffers())
        for entry in self.layout.entries:
            tensor = of(entry.spec.name) if entry.spec.group >= 0 else buffers[entry.spec.name]
            data = np.frombuffer(raw_bytes(tensor), np.uint8)
            raw[entry.start * 4 : entry.start * 4 + data.size] = data
        return raw.view(np.float32)


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


def save(store: SnapshotStore, layout: Layout, shards: list[ShardRecord], frozen: dict[str, str]) -> Manifest:
    name = snapshot_id(VERSION, 1)
    part = store.write_part(name, "a", shards, "zstd-planes")
    record = msgspec.to_builtins(JobRecord({}, layout, 100, frozen))
    manifest = Manifest(name, VERSION, record, 0.0, {}, "zstd-planes", part.shards, part.files)
    store.commit(manifest)
    return manifest


@pytest.fixture
def run(tmp_path: Path, trained: Trained) -> Path:
    """A run's folder with one snapshot in it."""
    folder = tmp_path / "run"
    save(SnapshotStore(str(folder / "snapshots")), trained.layout, list(trained.records()), {})
    return folder


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw_bytes(found[name]) == raw_bytes(tensor), name


def test_the_model_and_its_optimizer_come_back(run: Path, trained: Trained) -> None:
    store = SnapshotStore(str(run / "snapshots"))
    manifest = store.load(snapshot_id(VERSION, 1))
    assert_same(model_state(store, manifest), trained.model.state_dict())
    state = optimizer_state(store, manifest)
    assert state.keys() == trained.masters.keys()
    for name, master in trained.masters.items():
        if master.numel() == 0:
            assert state[name] == {}
            continue
        own = trained.optimizer.state[master]
        assert state[name].pop("step") == float(own["step"]) == VERSION
        assert_same(state[name], {kind: own[kind] for kind in ("exp_avg", "exp_avg_sq")})  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["", "/", "/snapshots", "/snapshots/step-00000003-1", "/snapshots/step-00000003-1/"])
def test_safetensors_from_any_way_to_name_a_snapshot(run: Path, trained: Trained, tmp_path: Path, place: str) -> None:
    to = tmp_path / "new" / "model.safetensors"
    summary = export_snapshot(f"{run}{place}", to)
    assert summary == f"wrote 18 tensors (0.9 kB) of step-00000003-1 to {to}"
    assert_same(load_file(to), trained.model.state_dict())
    with safe_open(to, "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "3", "fingerprint": trained.layout.fingerprint}
    assert [path.name for path in to.parent.iterdir()] == [to.name]


def test_pt_loads_without_unpickling_code(run: Path, trained: Trained, tmp_path: Path) -> None:
    export_snapshot(str(run), tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded.keys() == {"model", "optimizer", "step"}
    assert loaded["step"] == VERSION
    Net().load_state_dict(loaded["model"], strict=True)
    assert_same(loaded["model"], trained.model.state_dict())
    assert loaded["optimizer"]["stem.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_one_snapshot_exported_again_and_again_is_the_same_bytes(run: Path, tmp_path: Path, name: str) -> None:
    def exported(folder: str) -> bytes:
        export_snapshot(str(run), tmp_path / folder / name)
        return (tmp_path / folder / name).read_bytes()

    assert len({exported(str(n)) for n in range(20)}) == 1


def test_frozen_parameters_are_named(tmp_path: Path, trained: Trained) -> None:
    frozen = dict.fromkeys(("e.w", "a.w", "b.w", "d.w", "c.w"), "0")
    save(SnapshotStore(str(tmp_path / "s")), trained.layout, list(trained.records()), frozen)
    summary = export_snapshot(str(tmp_path / "s"), tmp_path / "m.safetensors")
    assert summary.endswith("; frozen parameters are not part of a snapshot (a.w, b.w, c.w and 2 more)")


def test_a_file_without_the_scripts_own_optimizer_says_so(tmp_path: Path, trained: Trained) -> None:
    store = SnapshotStore(str(tmp_path / "s"))
    kept = save(store, trained.layout, list(trained.records()), {})
    record = {**kept.record, "features": [Feature.OWN_OPTIMIZER.value]}
    store.amend(msgspec.structs.replace(kept, record=record))
    said = export_snapshot(str(tmp_path / "s"), tmp_path / "m.pt")
    assert "; without an optimizer's state: the script's own" in said
    assert "optimizer" not in export_snapshot(str(tmp_path / "s"), tmp_path / "m.safetensors")


@pytest.mark.parametrize(("best_is", "version"), [("min", 2), ("max", 1)])
def test_the_best_snapshot_is_the_first_with_the_best_figure(tmp_path: Path, best_is: str, version: int) -> None:
    store = SnapshotStore(str(tmp_path))
    for at, loss in ((1, 3.0), (2, 1.0), (3, 1.0), (4, 2.0)):
        found = take(store, at, metrics={"loss": loss})
        config = {**found.record["config"], "evaluation": {"keep_best": "loss", "best_is": best_is}}
        store.amend(msgspec.structs.replace(found, record={**found.record, "config": config}))
    said = export_snapshot(str(tmp_path), tmp_path / "best.safetensors", best=True)
    assert f"of {snapshot_id(version, 1)} to" in said
    assert f"is the {'lowest' if best_is == 'min' else 'highest'} of 4 snapshots that are kept" in said


def test_a_store_that_does_not_answer_is_not_asked_for_the_second_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = SnapshotStore(str(tmp_path)), Files.get
    for at, loss in ((1, 1.0), (2, 2.0)):
        found = take(store, at, metrics={"loss": loss})
        config = {**found.record["config"], "evaluation": {"keep_best": "loss", "best_is": "min"}}
        store.amend(msgspec.structs.replace(found, record={**found.record, "config": config}))

    def fails(at: Files, path: str, *span: int) -> bytes:
        if path.startswith(snapshot_id(1, 1)):
            raise TimeoutError("timed out")
        return read(at, path, *span)

    monkeypatch.setattr(Files, "get", fails)
    with pytest.raises(SnapshotError, match=r"step-00000001-1/manifest\.json cannot be read: timed out"):
        export_snapshot(str(tmp_path), tmp_path / "best.safetensors", best=True)


def test_a_job_that_keeps_no_best_snapshot_is_told_how(tmp_path: Path) -> None:
    take(SnapshotStore(str(tmp_path)), 3)
    with pytest.raises(SnapshotError, match=r"train it with --set evaluation\.keep_best=val_loss"):
        export_snapshot(str(tmp_path), tmp_path / "best.safetensors", best=True)


def test_what_was_passed_over_is_in_the_summary(tmp_path: Path) -> None:
    store = SnapshotStore(str(tmp_path / "s"))
    take(store, 1)
    newer = take(store, 2)
    (tmp_path / "s" / newer.id / "manifest.json").write_bytes(b"")
    summary = export_snapshot(store.url, tmp_path / "m.safetensors")
    assert "of step-00000001-1 to" in summary
    assert "; snapshot step-00000002-1 is damaged: file manifest.json" in summary
    with pytest.raises(DamagedSnapshot, match="step-00000002-1 is damaged"):
        export_snapshot(f"{store.url}/{newer.id}", tmp_path / "n.safetensors")


def without(entry: Entry, shards: list[ShardRecord], layout: Layout, **changes: Any) -> list[ShardRecord]:
    """The records, with the last one that `entry` touches changed."""
    last = layout.shards_touching(entry.start, entry.stop)[-1]
    old = shards[last]
    fields = {"arrays": old.arrays, "scalars": old.scalars, **changes}
    return [*shards[:last], ShardRecord(last, old.version, **fields), *shards[last + 1 :]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arrays": {}}, r"shard \d has no master weights"),
        ({"arrays": {"master": np.zeros(2, np.float32)}}, r"shard \d has no master weights"),
        ({"scalars": {"step": 2.0}}, r"shards \d and \d disagree on the optimizer state of stem.weight"),
    ],
)
def test_shards_that_do_not_fit_together_are_named(
    tmp_path: Path, trained: Trained, changes: dict[str, Any], sentence: str
) -> None:
    entry = next(entry for entry in trained.layout.entries if entry.spec.name == "stem.weight")
    assert len(trained.layout.shards_touching(entry.start, entry.stop)) > 1
    store = SnapshotStore(str(tmp_path / "s"))
    manifest = save(store, trained.layout, without(entry, list(trained.records()), trained.layout, **changes), {})
    with pytest.raises(DamagedSnapshot, match=f"snapshot step-00000003-1 is damaged: {sentence}"):
        optimizer_state(store, manifest)


def test_an_unknown_ending_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.bin has no known ending: .safetensors holds"):
        export_snapshot("nowhere://x", tmp_path / "model.bin")


def test_a_place_without_snapshots_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="holds no usable snapshot: give a snapshot's folder or that of a run"):
        export_snapshot(str(tmp_path), tmp_path / "m.pt")


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_place_that_cannot_be_written_is_named(run: Path, tmp_path: Path, ending: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotFailed, match=f"m.{ending} cannot be written"):
        export_snapshot(str(run), tmp_path / "file" / f"m.{ending}")
    assert not list(run.rglob("*.partial"))


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_power_cut_leaves_the_file_before_or_the_whole_new_one(
    run: Path, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are on the disk before it gets its name, and its name before anybody is told of it."""
    to, told = tmp_path / f"m.{ending}", list[tuple[str, Path, int]]()
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        told.append(("on the disk", Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor).st_size))

    def renamed(old: Path, new: Path) -> None:
        told.append(("renamed", Path(old), os.stat(old).st_size))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    export_snapshot(str(run), to)
    (_, partial, size), *_ = told
    assert [what for what, _, _ in told] == ["on the disk", "renamed", "on the disk"]
    assert told[1] == ("renamed", partial, size)
    assert size == to.stat().st_size
    assert told[2][1] == tmp_path


class Tied(torch.nn.Module):
    """An embedding that is the output layer too, and a buffer under two names, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.norm = torch.nn.Module()
        self.norm.register_buffer("scale", self.scale)


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_a_tied_tensor_is_exported_under_each_of_its_names(ending: str, tmp_path: Path) -> None:
    model = Tied()
    tensors = ModelTensors(model, JobConfig())
    records = [
        ShardRecord(s.index, VERSION, {"master": tensors.part(s.start, s.stop).numpy()}, {})
        for s in tensors.layout.shards
    ]
    store = SnapshotStore(str(tmp_path / "snapshots"))
    part = store.write_part(name := snapshot_id(VERSION, 1), "a", records, "zstd-planes")
    record = msgspec.to_builtins(record_of(JobConfig(), tensors.layout, tied=tensors.tied))
    store.commit(Manifest(name, VERSION, record, 0.0, {}, "zstd-planes", part.shards, part.files))

    export_snapshot(str(tmp_path), to := tmp_path / f"model{ending}")
    state = load_file(to) if ending == ".safetensors" else torch.load(to, weights_only=True)["model"]
    fresh = Tied()
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(fresh.head.weight, model.embed.weight)
    assert fresh.head.weight is fresh.embed.weight
