"""A snapshot made of a checkpoint: what the job's servers would hold after as many steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec
import torch

from rallypoint.config import JobConfig
from rallypoint.config.tree import steps_plainly
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Entry, Layout, Shard
from rallypoint.core.modes import Feature
from rallypoint.core.optimizer import of_shard
from rallypoint.errors import ConfigError, DataError
from rallypoint.optim import ShardOptimizer, state_names
from rallypoint.store.checkpoints.reading import Checkpoint
from rallypoint.store.manifest import Manifest, snapshot_id
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.store.state import MASTER

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
    if config.plateau is not None and step > 0:
        raise ConfigError(
            f"a job with plateau= cannot begin from a checkpoint of step {step}: nothing says how often the rate was "
            "reduced before. Begin at step 0 (--step 0), or leave plateau= out"
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
        self._moments: dict[str, dict[str, torch.Tensor]] = {}
        if self._optimizer:
            self._moments = {e.spec.name: self._of(self._optimizer, e, "optimizer state") for e in trained}
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
            raise DataError(f"the checkpoint has no {what} of {name}")
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
