"""A snapshot as ordinary PyTorch: tensors by parameter name.

As a safetensors or torch.save file, as the weights in a Hugging Face folder, as a torch.distributed.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch

from rallypoint.config.resolve import parse
from rallypoint.config.tree import steps_plainly
from rallypoint.core.layout import Entry, Shard, TensorSpec
from rallypoint.core.modes import Feature
from rallypoint.core.optimizer import ENTRY
from rallypoint.core.typed import named
from rallypoint.errors import ConfigError, DamagedSnapshot, SnapshotError, SnapshotFailed
from rallypoint.store.checkpoints import WRITERS, Content, OptimizerState
from rallypoint.store.manifest import Manifest, age
from rallypoint.store.record import AVERAGE, AVERAGED, MASTER, OWN, ShardRecord
from rallypoint.store.snapshots import Format, SnapshotStore

_NAMED = 3  # frozen parameters named in the summary

def model_state(store: SnapshotStore, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, in their own dtype and shape.

    The names of one tied tensor share its memory. Frozen parameters are not in a snapshot. Raises DamagedSnapshot when
    a shard cannot be read or does not fit the layout.
    """
    return _Flat(store, manifest, lambda name: name == MASTER).model()


def export_snapshot(
    location: str, to: Path, *, average: bool = False, best: bool = False, format: Format | None = None
) -> str:  # fmt: skip
    """Write the model of a snapshot to `to`, and return one line that says what was written.

    `location` is a snapshot's folder or URL; or a store, or a run's folder with `snapshots/` in it, for its latest
    usable snapshot.

    Formats; None: what the ending of `to` says, ``.safetensors`` or ``.pt``.

    - "safetensors": a file with the model, and with its version and fingerprint as metadata.
    - "pt": a file with {"model", "optimizer", "step"}, which torch.load reads with weights_only=True: `optimizer` is
      the state of the optimizer on the servers (under local steps the outer optimizer), `step` the steps of training in
      the model.
    - "hf": `to` is a folder, of Hugging Face's layout; ``model.safetensors`` in it is written. A tied tensor is in it
      once.
    - "dcp": `to` is a new folder, a checkpoint of torch.distributed.checkpoint: see `checkpoints.dcp`. The optimizer is
      left out where it is not one of plain training (see `steps_plainly`).

    With `average` the model's parameters are their average (rp.EMA, rp.SWA). With `best` it is the snapshot with the
    best figure, of those that are there (`keep_best`).

    Raises ConfigError for another ending, SnapshotError when nothing has been averaged, when no figure says
    which is the best, or when there is no usable snapshot, SnapshotFailed when `to` cannot be written.
    """
    form = format or _form_of(to)
    if form == "dcp" and (to.is_symlink() or to.exists()):
        raise SnapshotFailed(f"{to} is there already: a checkpoint of this format is a new folder")
    store, manifest, said = _find(location)
    if best:
        manifest, judged = best_of(store, manifest)
        said = [judged, *said]
    job = manifest.job
    moments = form == "pt" or (form == "dcp" and steps_plainly(parse(job.config)))
    wanted = {MASTER, AVERAGE} if average else {MASTER}
    flat = _Flat(store, manifest, lambda name: name in wanted or (moments and name != AVERAGE))
    model = flat.average() if average else flat.model()
    optimizer = flat.optimizer() if moments else None
    content = Content(manifest, model, optimizer, average)
    said = [*WRITERS[form](content, to), *said]
    if moments and Feature.OWN_OPTIMIZER in job.features:
        said = ["without an optimizer's state: the script's own optimizer goes on with `rallypoint resume`", *said]
    what = f"the average of {_counted(model)}" if average else _counted(model)
    if job.frozen:
        said = [f"frozen parameters are not part of a snapshot ({named(sorted(job.frozen), _NAMED)})", *said]
    return "; ".join([f"wrote {what} of {manifest.id} to {to}", *said])


def _form_of(to: Path) -> Format:
    if to.suffix not in (".safetensors", ".pt"):
        raise ConfigError(
            f"{to} has no known ending: .safetensors holds the model, .pt its optimizer's state too; or give --format, "
            f"one of {', '.join(get_args(Format))}"
        )
    return "pt" if to.suffix == ".pt" else "safetensors"


def best_of(store: SnapshotStore, newest: Manifest) -> tuple[Manifest, str]:
    """Return the snapshot with the best figure, and a sentence about it. Of equal ones the earliest is the best.

    Raises SnapshotError when the job keeps no best one, or no snapshot has its figure.
    """
    rule = newest.job.rules.best
    if rule is None:
        raise SnapshotError(
            f"the job of {newest.id} keeps no best snapshot: train it with --set evaluation.keep_best=val_loss"
        )
    judged = [manifest for manifest in store.manifests() if rule.metric in manifest.metrics]
    if not judged:
        known = ", ".join(sorted({name for manifest in store.manifests() for name in manifest.metrics})) or "none"
        raise SnapshotError(f"no snapshot has the figure {rule.metric}: evaluations (run.every) gave {known}")
    best, *others = sorted(judged, key=lambda manifest: manifest.version)
    for manifest in others:
        if rule.better(manifest.metrics[rule.metric], best.metrics[rule.metric]):
            best = manifest
    value = f"{best.metrics[rule.metric]:.6g}"
    return best, f"its {rule.metric} of {value} is the {rule.word} of {len(judged)} snapshots that are kept"


class _Flat:
    """Vectors as long as the layout, one for each kind of state. They are filled shard by shard and cut by tensor."""

    def __init__(self, store: SnapshotStore, manifest: Manifest, takes: Callable[[str], bool]) -> None:
        """Read the snapshot, and of its arrays only those whose name `takes` accepts."""
        self._name = manifest.id
        self._layout, self._tied = manifest.job.layout, manifest.job.tied
        self._vectors: dict[str, torch.Tensor] = {}
        self._tables: list[dict[str, torch.Tensor]] = [{} for _ in self._layout.tables]
        self._present: dict[int, set[str]] = {}  # shard -> vectors that it has a part of
        self._scalars: dict[int, dict[str, float]] = {}
        self._averaged: dict[int, float] = {}  # shard -> versions in its average

        shards = self._layout.shards
        for shard, record in zip(shards, store.read(manifest, [s.index for s in shards]), strict=True):
            self._take(shard, record, takes)

    def _take(self, shard: Shard, record: ShardRecord, takes: Callable[[str], bool]) -> None:
        master = record.arrays.get(MASTER)
        if master is None or master.dtype.name != "float32" or master.size != shard.words:
            raise self._damaged(f"shard {shard.index} has no master weights of {shard.words} words")
        # An array of another length has not one value for each element, so it cannot be cut.
        mine = [name for name in record.arrays if name.partition(".")[0] != OWN]
        names = [name for name in mine if takes(name) and record.arrays[name].size == shard.words]
        self._present[shard.index] = set(names)
        self._scalars[shard.index] = {name: value for name, value in record.scalars.items() if name != AVERAGED}
        self._averaged[shard.index] = record.scalars.get(AVERAGED, 0.0)
        for name in names:
            part = torch.from_numpy(record.arrays[name])
            if shard.part is not None:
                table = self._tables[shard.part.table]
                if name not in table:
                    whole = self._layout.tables[shard.part.table].shape
                    table[name] = torch.zeros(whole, dtype=part.dtype, device="cpu")
                table[name][shard.part.part :: shard.part.parts] = part.view(shard.part.rows, shard.columns)
                continue
            if name not in self._vectors:
                self._vectors[name] = torch.zeros(self._layout.words, dtype=part.dtype, device="cpu")
            vector = self._vectors[name]
            if vector.dtype != part.dtype:
                raise self._damaged(f"{name} is {part.dtype} in shard {shard.index} and {vector.dtype} in others")
            # Copied as bytes: a shard of buffers holds any dtype, and must not be converted as numbers.
            vector[shard.start : shard.stop].view(torch.uint8).copy_(part.view(torch.uint8))

    def average(self) -> dict[str, torch.Tensor]:
        if not any(self._averaged.values()):
            raise SnapshotError(
                f"snapshot {self._name} has no average of the parameters: give the job average=rp.EMA(0.999), or wait "
                "until the first version that it takes"
            )
        return self.model(AVERAGE)

    def model(self, parameters: str = MASTER) -> dict[str, torch.Tensor]:
        tables = {spec.name: table[MASTER] for spec, table in self._by_table()}
        entries = [entry for entry in self._layout.entries if entry.spec.name != ENTRY and entry.spec.group >= -1]
        tensors = {entry.spec.name: self._tensor(entry, parameters) for entry in entries} | tables
        return tensors | {name: tensors[first] for name, first in self._tied.items() if first in tensors}

    def optimizer(self) -> OptimizerState:
        states = {e.spec.name: self._state(e) for e in self._layout.entries if e.spec.group >= 0}
        for index, (spec, table) in enumerate(self._by_table()):
            parts = [s.index for s in self._layout.shards if s.part is not None and s.part.table == index]
            states[spec.name] = self._agreed(spec.name, parts)
            states[spec.name] |= {name: values for name, values in sorted(table.items()) if name != MASTER}
        return states

    def _by_table(self) -> list[tuple[TensorSpec, dict[str, torch.Tensor]]]:
        return list(zip(self._layout.tables, self._tables, strict=True))

    def _tensor(self, entry: Entry, parameters: str) -> torch.Tensor:
        dtype = getattr(torch, entry.spec.dtype)
        words = self._vectors[parameters if entry.spec.group >= 0 else MASTER][entry.start : entry.stop]
        if entry.spec.group >= 0:
            return words.to(dtype, copy=True).view(entry.spec.shape)
        raw = words.view(torch.uint8)[: entry.spec.numel * dtype.itemsize]
        return raw.clone().view(dtype).view(entry.spec.shape)

    def _state(self, entry: Entry) -> dict[str, torch.Tensor | float]:
        touched = self._layout.shards_touching(entry.start, entry.stop)
        if not touched:
            return {}
        first, state = touched[0], self._agreed(entry.spec.name, touched)
        for name in sorted(self._present[first] - {MASTER, AVERAGE}):
            state[name] = self._vectors[name][entry.start : entry.stop].clone().view(entry.spec.shape)
        return state

    def _agreed(self, tensor: str, shards: list[int]) -> dict[str, torch.Tensor | float]:
        """The numbers in a tensor's optimizer state, which all of its shards must share."""
        first = shards[0]
        for other in shards[1:]:
            if self._present[other] != self._present[first] or self._scalars[other] != self._scalars[first]:
                raise self._damaged(f"shards {first} and {other} disagree on the optimizer state of {tensor}")
        return dict(self._scalars[first])

    def _damaged(self, what: str) -> DamagedSnapshot:
        return DamagedSnapshot(f"snapshot {self._name} is damaged: {what}")


def _find(location: str) -> tuple[SnapshotStore, Manifest, list[str]]:
    """Return the snapshot that `location` names, and sentences about the ones that were skipped."""
    place = location.rstrip("/")
    root, slash, name = place.rpartition("/")
    if age(name) is not None:
        store = SnapshotStore(root or slash or ".")
        return store, store.load(name), []
    said: list[str] = []
    for url in (place or "/", f"{place}/snapshots"):
        store = SnapshotStore(url)
        manifest = store.latest_usable(said.append)
        if manifest is not None:
            return store, manifest, said
    why = "".join(f"; {sentence}" for sentence in said)
    raise SnapshotError(f"{location} holds no usable snapshot: give a snapshot's folder or that of a run{why}")


def _counted(model: dict[str, torch.Tensor]) -> str:
    nbytes = sum(tensor.nbytes for tensor in model.values())
    size = f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"
    return f"{len(model)} {'tensor' if len(model) == 1 else 'tensors'} ({size})"
