"""Checkpoints that other libraries write and read: torch.distributed.checkpoint, safetensors, torch.save.

`read_checkpoint` reads weights by name, the optimizer's state by parameter name, and the step; `WRITERS` has a writer
for each format. `begin_from` makes a snapshot: what the job's servers would hold after as many steps.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from rallypoint.config import JobConfig, settings_of
from rallypoint.config.resolve import parse
from rallypoint.config.tree import rate_of, steps_plainly
from rallypoint.core.decisions import reductions_at
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Entry, Layout, Shard
from rallypoint.core.modes import Feature
from rallypoint.core.optimizer import of_shard
from rallypoint.core.schedule import peak_of
from rallypoint.core.typed import named
from rallypoint.errors import ConfigError, DataError, SnapshotFailed
from rallypoint.optim import ShardOptimizer, build_optimizer, state_names
from rallypoint.store.files import sync_to_disk
from rallypoint.store.manifest import Manifest, snapshot_id
from rallypoint.store.record import MASTER, ShardRecord
from rallypoint.store.snapshots import MODEL_FILE, Format, SnapshotStore

_INDEX = f"{MODEL_FILE}.index.json"  # of a Hugging Face folder with several files
_OF_DDP = "module."
_STATE = "state."
_RIGHT = (
    "write it by parameter name, as torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns it"
)
_BY_NUMBER = f"its optimizer's state is by number, as optimizer.state_dict() has it: {_RIGHT}"
_NO_STATES = f"its optimizer's state is not one of each parameter: {_RIGHT}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        model: parameters and buffers by name, without the prefix of DistributedDataParallel.
        optimizer: parameter name -> tensors and numbers by name; empty if the checkpoint has none.
        step: the steps of training in it; -1 if it does not say.
        unread: what else a ``.pt`` file has.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    step: int = -1
    unread: tuple[str, ...] = ()

    def named_as(self, names: Collection[str]) -> Checkpoint:
        """The checkpoint with DistributedDataParallel's prefix again, if it lacks it and all of `names` have it."""
        if not names or not all(name.startswith(_OF_DDP) for name in names) or not self.model.keys().isdisjoint(names):
            return self
        model = {f"{_OF_DDP}{name}": tensor for name, tensor in self.model.items()}
        return replace(self, model=model, optimizer={f"{_OF_DDP}{name}": of for name, of in self.optimizer.items()})


def read_checkpoint(place: Path) -> Checkpoint:
    """Return the checkpoint in a ``.safetensors`` or ``.pt`` file, a Hugging Face folder, or a folder of DCP.

    A ``.pt`` file is read with weights_only=True; of a DCP folder its list of tensors is a pickle, of which only the
    format's own classes are read. Raises DataError for anything else.
    """
    try:
        if place.is_dir():
            return _of_directory(place)
        if place.suffix == ".safetensors":
            return Checkpoint(_plain(load_file(place)))
        if place.is_file():
            return _of_torch(torch.load(place, map_location="cpu", weights_only=True))
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{place} lacks a file: {error.filename or error}") from None
    except Exception as error:  # torch and safetensors report a damaged file by many types
        raise DataError(f"{place} cannot be read as a checkpoint: {error}") from None
    raise DataError(
        f"there is no checkpoint {place}: give a .safetensors or .pt file, a folder with {MODEL_FILE}, or one of "
        "torch.distributed.checkpoint"
    )


def _of_directory(folder: Path) -> Checkpoint:
    if not (folder / METADATA).exists():
        return Checkpoint(_of_folder(folder))
    for name in (MODEL_FILE, _INDEX):
        if (folder / name).exists():
            raise DataError(f"{folder} has both {METADATA} and {name}: which of them is the checkpoint? Move one away")
    return _of_keys(read_dcp(folder))


def _of_folder(folder: Path) -> dict[str, torch.Tensor]:
    files = [MODEL_FILE]
    if not (folder / MODEL_FILE).is_file() and (folder / _INDEX).is_file():  # an index beside it is of an older model
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        if any("/" in name for name in files):
            raise DataError(f"{folder / _INDEX} names files outside of its folder")
    found: dict[str, torch.Tensor] = {}
    for name in files:
        found |= load_file(folder / name)
    return _plain(found)


def _of_keys(tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """A checkpoint of DCP: see `checkpoints.dcp` for its keys. One without "model." is a model's state alone."""
    step = int(tensors["step"]) if "step" in tensors else -1
    weights = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    if not any(key.startswith("optimizer.") for key in tensors) and len(weights) < len(tensors) - ("step" in tensors):
        return Checkpoint(_plain({key: value for key, value in tensors.items() if key != "step"}), step=step)
    flat = {key.removeprefix("optimizer."): value for key, value in tensors.items() if key.startswith("optimizer.")}
    return Checkpoint(_plain(weights), _by_name(_nested(flat), weights), step)


def _of_torch(content: Any) -> Checkpoint:
    if not isinstance(content, dict):
        raise DataError(f"it holds a {type(content).__name__}, not a dict of tensors")
    if not isinstance(content.get("model"), Mapping):
        if not (weights := _plain(content)):
            raise DataError(f"it has no tensors by name ({named([*map(str, content)], 3)}): save model.state_dict()")
        return Checkpoint(weights)
    whole = content.get("optimizer") or {}
    states = whole.get("state", whole) if isinstance(whole, Mapping) else whole
    if isinstance(states, Mapping) and any(str(key).startswith(_STATE) for key in states):
        states = _nested(states)
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise DataError(_NO_STATES)
    optimizer = {
        str(name): {kind: _tensor(value) for kind, value in state.items() if value is not None}
        for name, state in states.items()
    }
    by_name, step = _by_name(optimizer, content["model"]), int(content.get("step", -1))
    unread = tuple(sorted(map(str, content.keys() - {"model", "optimizer", "step"})))
    return Checkpoint(_plain(content["model"]), by_name, step, unread)


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32, device="cpu")


def _nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The states in ``state.NAME.KIND``: parameter name -> kind -> value. Settings (``param_groups.``) are left out."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(_STATE):
            name, _, kind = key.removeprefix(_STATE).rpartition(".")
            states.setdefault(name, {})[kind] = value
    return states


def _by_name(
    optimizer: dict[str, dict[str, torch.Tensor]], weights: Mapping[str, object]
) -> dict[str, dict[str, torch.Tensor]]:
    """The states that have something; without DistributedDataParallel's prefix, if all have it and the weights not."""
    known = set(_plain(weights))
    if any(name.isdecimal() and name not in known for name in optimizer):
        raise DataError(_BY_NUMBER)
    if all(name.startswith(_OF_DDP) for name in optimizer) and not known.issuperset(optimizer):
        optimizer = {name.removeprefix(_OF_DDP): state for name, state in optimizer.items()}
    return {name: state for name, state in optimizer.items() if state}


def _plain(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Only the tensors; without DistributedDataParallel's prefix, if all have it."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if tensors and all(name.startswith(_OF_DDP) for name in tensors):
        return {name.removeprefix(_OF_DDP): value for name, value in tensors.items()}
    return tensors


METADATA = ".metadata"  # the file in the folder of every checkpoint of this kind

_OF_THIS_PROCESS = {"foreach": None}  # how a kernel is run: torch's default again


def write_dcp(content: Mapping[str, Any], folder: Path) -> None:
    """Write a nested dict as a checkpoint into `folder`, which does not exist yet. Raises OSError or RuntimeError.

        model.NAME                                   a parameter or buffer
        optimizer.state.NAME.KIND                    ("exp_avg", "step", ...)
        optimizer.param_groups.NAME.SETTING          ("lr", "betas", ...)
        step                                         the steps of training in the model

    These are the keys of ``get_state_dict(model, optimizer)`` from `torch.distributed.checkpoint.state_dict` with
    ``StateDictOptions(flatten_optimizer_state_dict=True)``. Without that option it writes the same keys, but for
    `param_groups`, which are then by number.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    with _alone():
        save(dict(content), checkpoint_id=folder, no_dist=True)


def read_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors under their whole keys; what is not a tensor is left out.

    A step that is a Python int is among them, as a tensor. The format keeps its list of tensors (``.metadata``) as a
    pickle: see `checkpoints.restricted`.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from rallypoint.store.checkpoints import MetadataReader

    reader = MetadataReader(folder)
    metadata = reader.read_metadata()
    tensors = {
        key: torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
        for key, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    with _alone():
        load(tensors, storage_reader=reader, no_dist=True)
    if isinstance(metadata.state_dict_metadata.get("step"), BytesStorageMetadata):
        tensors["step"] = torch.tensor(reader.whole_number(metadata, "step"), dtype=torch.int64, device="cpu")
    return tensors


def optimizer_content(
    states: Mapping[str, Mapping[str, torch.Tensor | float]], config: JobConfig, layout: Layout, version: int,
    reductions: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the optimizer's part of a checkpoint: `states` by parameter name, and each parameter's settings.

    A rate is that of the next update, after so many `reductions` (``plateau=``). The version of the job is `version`.
    Its base rate is there too, as torch's schedulers look for it (`initial_lr`).
    """
    content: dict[str, Any] = {
        f"state.{name}.{kind}": (
            torch.tensor(value, dtype=torch.float32, device="cpu") if isinstance(value, float) else value
        )
        for name, state in states.items() for kind, value in state.items()
    }  # fmt: skip
    for entry in layout.entries:
        touched = layout.shards_touching(entry.start, entry.stop)
        if entry.spec.group < 0 or not touched:
            continue
        rate = rate_of(config, min(version, config.rounds - 1), reductions)
        base = peak_of(config.applied_schedule)
        spec = of_shard(config.applied, layout.shards[touched[0]].columns)
        settings = settings_of(config, entry.spec.group)
        like = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))  # two dimensions, as Muon asks
        [group] = build_optimizer(spec, [([like], settings)]).param_groups
        group |= {"lr": rate * settings.lr_scale, "initial_lr": base * settings.lr_scale} | _OF_THIS_PROCESS
        content |= {f"param_groups.{entry.spec.name}.{key}": group[key] for key in group if key != "params"}
    return content


@contextmanager
def _alone() -> Iterator[None]:
    """In the body, torch does not warn that no process group is there: none is meant to be.

    torch's own exception, which is no Exception, becomes the first failure in it: OSError, or RuntimeError for others.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            if isinstance(first, Exception) and not isinstance(first, OSError):
                raise RuntimeError(f"{type(first).__name__}: {first}") from None
            raise first from None


OptimizerState = dict[str, dict[str, torch.Tensor | float]]


@dataclass(frozen=True, slots=True)
class Content:
    """What is written.

    Attributes:
        manifest: of the snapshot.
        model: parameters and buffers by name; the names of one tied tensor share its memory.
        optimizer: each trained parameter's state; None if the writer does not take it.
        average: True if the parameters are their average.
    """

    manifest: Manifest
    model: dict[str, torch.Tensor]
    optimizer: OptimizerState | None
    average: bool

    @property
    def steps(self) -> int:
        return self.manifest.job.steps_at(self.manifest.version)


def _torch_file(content: Content, to: Path) -> list[str]:
    """A file with {"model", "optimizer", "step"}, which torch.load reads with weights_only=True."""
    whole: dict[str, object] = {"model": content.model, "optimizer": content.optimizer, "step": content.steps}
    _write(to, lambda path: _save_all(whole, path))
    return []


def _safetensors(content: Content, to: Path) -> list[str]:
    """A file with the model, and with its version and fingerprint as metadata. Each tied tensor under all its names."""
    names = content.manifest.job.tied.keys() & content.model
    apart = {name: content.model[name].clone() for name in names}  # safetensors accepts no shared memory
    _write(to, lambda path: _save_model(content.model | apart, path, _about(content)))
    return []


def _hugging_face(content: Content, to: Path) -> list[str]:
    """``model.safetensors`` in a folder, with each tied tensor once. Other files there are left alone."""
    tied = content.manifest.job.tied
    once = {name: tensor for name, tensor in content.model.items() if name not in tied}
    _write(to / MODEL_FILE, lambda path: _save_model(once, path, _about(content)))
    remark = f"it has no config.json yet, which model.config.save_pretrained({str(to)!r}) writes"
    return [] if (to / "config.json").exists() else [remark]


def _dcp(content: Content, to: Path) -> list[str]:
    """A new folder, a checkpoint of torch.distributed.checkpoint: see `checkpoints.dcp`."""
    step = torch.tensor(content.steps, dtype=torch.int64, device="cpu")
    manifest, whole = content.manifest, {"model": content.model, "step": step}
    remarks = ["without the optimizer's state, which is not one of plain training"]
    if content.optimizer is not None:
        remarks, job, at = [], manifest.job, manifest.version
        reductions = reductions_at(manifest.decided.reductions, at)
        whole["optimizer"] = optimizer_content(content.optimizer, parse(job.config), job.layout, at, reductions)
    _write(to, lambda path: write_dcp(whole, path))
    return remarks


# Each writes one format, as a whole or not at all, and returns remarks for the user. They raise SnapshotFailed
WRITERS: Mapping[Format, Callable[[Content, Path], list[str]]] = {
    "pt": _torch_file, "safetensors": _safetensors, "hf": _hugging_face, "dcp": _dcp,
}  # fmt: skip


def _about(content: Content) -> dict[str, str]:
    job = content.manifest.job
    about = {"format": "pt", "version": str(content.manifest.version), "fingerprint": job.layout.fingerprint}
    return about | ({"average": str(job.config["average"]["type"])} if content.average else {})


def _save_all(content: dict[str, object], path: Path) -> None:
    """Write a torch file, the same bytes every time: given a path, torch writes its name into the file."""
    with open(path, "wb") as file:
        torch.save(content, file)


def _save_model(model: dict[str, torch.Tensor], path: Path, about: dict[str, str]) -> None:
    """Write a safetensors file, the same bytes every time.

    The library writes metadata in any order. So this function sorts it, in the header: 8 bytes with its length, then
    JSON, which spaces may fill up. Raises SnapshotFailed for a type that the format has not.
    """
    for name, tensor in model.items():
        if tensor.dtype in (torch.complex128, torch.complex32):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise SnapshotFailed(f"{name} is {kind}, which safetensors cannot hold: export to a file model.pt")
    save_file(model, path, metadata=about)
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(about.items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def _write(to: Path, write: Callable[[Path], None]) -> None:
    """Write `to` as a whole, also across a power cut: under another name first, then renamed."""
    partial = to.with_name(f".{to.name}.{uuid.uuid4().hex}.partial")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        sync_to_disk(str(partial))
        os.replace(partial, to)
        sync_to_disk(str(to.parent))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as RuntimeError
        raise SnapshotFailed(f"{to} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            partial.unlink()


_T = TypeVar("_T")
_REFUSED = {
    Feature.AVERAGE: "a checkpoint has no average of the job's own",
    Feature.CODEC_STATE: "a checkpoint has no codec states",
    Feature.FP16: "a checkpoint has no loss scale by step",
    Feature.OWN_OPTIMIZER: "let the script load its own optimizer's state",
    Feature.TABLES: "tables have no values in a checkpoint of plain training",
}


def begin_from(
    checkpoint: Checkpoint, step: int, record: JobRecord, config: JobConfig, store: SnapshotStore
) -> Manifest:
    """Write a snapshot of version `step` for the job of `record`, and return its manifest.

    The job goes on from it with the data, the rate and the random numbers of that step. Without an optimizer's state in
    the checkpoint, the optimizer begins anew.

    Raises ConfigError for a job that cannot begin from a checkpoint, DataError where the checkpoint does not fit it.
    """
    _refuse(record, config, step)
    states = _States(checkpoint, record)
    name = snapshot_id(step, 1)
    part = store.write_part(name, "checkpoint", states.records(step, record, config), "none")
    manifest = Manifest(name, step, msgspec.to_builtins(record), time.time(), {}, "none", part.shards, part.files)
    store.commit(manifest)
    return store.load(name)


def _refuse(record: JobRecord, config: JobConfig, step: int) -> None:
    for feature, why in _REFUSED.items():
        if feature in record.features:
            raise ConfigError(f"a job with {feature.value} cannot begin from a checkpoint: {why}")
    if not steps_plainly(config):
        raise ConfigError("only jobs with sync=rp.Sync() or rp.AllReduce(), without a quorum, begin from a checkpoint")
    if config.evaluation.plateau is not None and step > 0:
        raise ConfigError(
            f"a job with evaluation.plateau cannot begin from a checkpoint of step {step}: nothing says how often the "
            "rate was reduced before. Begin at step 0 (--step 0), or leave it out"
        )
    if not 0 <= step < config.rounds:
        raise DataError(f"the checkpoint is of step {step}, and the job has {config.rounds}: give it more steps")


class _States:
    """A checkpoint's tensors under the names of the job's layout, and cut into its shards."""

    def __init__(self, checkpoint: Checkpoint, record: JobRecord) -> None:
        self._layout, self._others = record.layout, record.tied
        self._model, self._optimizer = checkpoint.model, checkpoint.optimizer
        entries = self._layout.entries
        self._weights = {e.spec.name: self._of(self._model, e, "weights") for e in entries}
        trained = [entry for entry in entries if entry.spec.group >= 0]
        kept = self._optimizer
        self._moments = {e.spec.name: self._of(kept, e, "optimizer state") for e in trained} if kept else {}
        for entry in entries:
            name, found, shape = entry.spec.name, tuple(self._weights[entry.spec.name].shape), tuple(entry.spec.shape)
            if found != shape:
                raise DataError(f"{name} is {found} in the checkpoint and {shape} in the model")
        for entry in trained:
            _check_finite(self._weights[entry.spec.name], entry.spec.name)

    def records(self, step: int, record: JobRecord, config: JobConfig) -> Iterator[ShardRecord]:
        """Yield the state of each shard at the job's version `step`."""
        for shard in self._layout.shards:
            version = record.version_at(shard.index, step)
            assert version is not None, "only jobs in which all replicas begin a step together begin from a checkpoint"
            master = _cut(self._layout, shard, self._weights)
            if shard.role == "buffers":
                yield ShardRecord(shard.index, version, {MASTER: master.numpy()}, {})
                continue
            optimizer = ShardOptimizer(config, shard.group, shard.words, shard.columns)
            if self._moments:
                optimizer.load(*self._moments_of(shard, config))
            arrays, scalars = optimizer.state()
            plain = {MASTER: master.numpy()} | {name: values.numpy() for name, values in arrays.items()}
            yield ShardRecord(shard.index, version, plain, scalars)

    def _moments_of(self, shard: Shard, config: JobConfig) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        inside = [e for e in self._layout.entries if e.start < shard.stop and shard.start < e.stop]
        spec = of_shard(config.applied, shard.columns)
        first = self._moments[inside[0].spec.name]
        for tensors, numbers in reversed(state_names(spec)):
            if set(first) == tensors | numbers:
                break
        else:
            kept = " or ".join(", ".join(sorted(t | n)) or "nothing" for t, n in reversed(state_names(spec)))
            raise DataError(
                f"the checkpoint's optimizer state of {inside[0].spec.name} is {', '.join(sorted(first))}, and "
                f"rp.{type(spec).__name__} keeps {kept}: train with the same optimizer, or leave its state out"
            )
        for entry in inside:
            for name in tensors:
                found = self._moments[entry.spec.name].get(name)
                if found is None or tuple(found.shape) != tuple(entry.spec.shape):
                    raise DataError(f"the checkpoint's {name} of {entry.spec.name} does not have the weight's shape")
                _check_finite(found, f"{name} of {entry.spec.name}")
        scalars: dict[str, float] = {}
        for name in sorted(numbers):
            values = {float(self._moments[entry.spec.name].get(name, torch.nan)) for entry in inside}
            if len(values) > 1:
                raise DataError(
                    f"the checkpoint's optimizer has another {name} for {inside[0].spec.name} than for others of its "
                    "group, and servers keep one: leave the optimizer's state out"
                )
            scalars[name] = values.pop()
        arrays = {
            name: _cut(self._layout, shard, {e.spec.name: self._moments[e.spec.name][name] for e in inside})
            for name in tensors
        }
        return arrays, scalars

    def _of(self, by_name: Mapping[str, _T], entry: Entry, what: str) -> _T:
        """What the checkpoint has for a tensor, under its name or that of one tied to it. All must be equal."""
        name = entry.spec.name
        names = [name, *(other for other, first in self._others.items() if first == name)]
        found = [(known, by_name[known]) for known in names if known in by_name]
        if not found:
            raise DataError(f"the checkpoint has no {what} of {name}: it has {named([*by_name], 3)}")
        for known, other in found[1:]:
            if not _same(found[0][1], other):
                raise DataError(
                    f"the checkpoint has other {what} of {known} than of {found[0][0]}, which are one tensor in the "
                    "script's model: does the script tie them, and did the training not?"
                )
        return found[0][1]


def _same(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


def _check_finite(tensor: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"the checkpoint's {what} has values that are not finite: nothing can be trained from it")


def _cut(layout: Layout, shard: Shard, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The shard's words (1-D fp32) of a flat vector with these tensors; gaps are zero."""
    words = torch.zeros(shard.words, dtype=torch.float32, device="cpu")
    for entry in layout.entries:
        first, last = max(shard.start, entry.start), min(shard.stop, entry.stop)
        if first < last:
            whole = _words(entry, tensors[entry.spec.name])
            words[first - shard.start : last - shard.start].copy_(whole[first - entry.start : last - entry.start])
    return words


def _words(entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as its words of the flat vector: a parameter's values as fp32, a buffer's bytes."""
    if entry.spec.group >= 0:
        return tensor.detach().reshape(-1).float()
    words = torch.zeros(entry.stop - entry.start, dtype=torch.float32, device="cpu")
    raw = tensor.detach().to(getattr(torch, entry.spec.dtype)).contiguous().view(-1).view(torch.uint8)
    words.view(torch.uint8)[: len(raw)] = raw
    return words


# ---- Reads what is pickled in a folder of torch.distributed.checkpoint, with only the classes that it needs ----


_OF_METADATA = "torch.distributed.checkpoint.metadata"
_NEEDED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    (_OF_METADATA, "BytesStorageMetadata"),
    (_OF_METADATA, "ChunkStorageMetadata"),
    (_OF_METADATA, "Metadata"),
    (_OF_METADATA, "MetadataIndex"),
    (_OF_METADATA, "StorageMeta"),
    (_OF_METADATA, "TensorProperties"),
    (_OF_METADATA, "TensorStorageMetadata"),
    (_OF_METADATA, "_MEM_FORMAT_ENCODING"),
}


class _OnlyMetadata(pickle.Unpickler):
    """An unpickler that knows the classes of the format's list of tensors, and no others."""

    def find_class(self, module: str, name: str, /) -> Any:
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if of_torch or (module, name) in _NEEDED:
            return super().find_class(module, name)
        raise DataError(f"its list of tensors names {module}.{name}, which no such list needs: it is not read")


class MetadataReader(FileSystemReader):
    """Reads a folder. torch asks it for the list of tensors, so torch never unpickles that list itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self._folder / ".metadata", "rb") as file:
            metadata = _OnlyMetadata(file).load()
        if not isinstance(metadata, Metadata):
            raise DataError(f"its list of tensors is a {type(metadata).__name__}")
        for about in metadata.storage_data.values():
            if Path(about.relative_path).name != about.relative_path:
                raise DataError("its list of tensors names files outside of its folder")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def whole_number(self, metadata: Metadata, key: str) -> int:
        """Return a Python int of the checkpoint. Raises DataError for anything else."""
        about = metadata.storage_data[MetadataIndex(key)]
        if not getattr(about, "transform_descriptors", None):
            with open(self._folder / about.relative_path, "rb") as file:
                file.seek(about.offset)
                value = torch.load(io.BytesIO(file.read(about.length)), weights_only=True)
            if type(value) is int:
                return value
        raise DataError(f"its {key} is neither a tensor nor a whole number")
