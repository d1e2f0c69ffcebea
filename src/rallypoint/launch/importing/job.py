"""The job of a script that runs to say what it trains: `train` writes the first snapshot and ends the process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

import msgspec
import torch

from rallypoint.config import record_of, resolve
from rallypoint.core.typed import printable
from rallypoint.data.identity import identity_of
from rallypoint.data.spec import Collate, Data, Loader, given
from rallypoint.errors import ConfigError, DataError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.launch.importing.task import Answer, Task
from rallypoint.parallel.holdings import Parallel
from rallypoint.store.checkpoints.beginning import begin_from
from rallypoint.store.checkpoints.reading import Checkpoint, read_checkpoint
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.worker.carried import TrainSettings
from rallypoint.worker.loop.own import OwnOptimizer, OwnSchedule
from rallypoint.worker.loop.run import Run
from rallypoint.worker.streamed.building import prepare
from rallypoint.worker.streamed.first_values import Init
from rallypoint.worker.tensors import ModelTensors

_NAMED = 8  # tensors that are left out


class ImportJob(EmbeddedJob):
    """A worker that trains nothing. `train` writes a snapshot for the job that the script describes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        super().__init__()

    def train(
        self, model: torch.nn.Module, dataset: Data, *, collate_fn: Collate | None = None, loader: Loader | None = None,
        own_optimizer: OwnOptimizer | None = None, own_schedule: OwnSchedule | None = None,
        parallel: Parallel | None = None, init: Init | None = None, **settings: Unpack[TrainSettings],
    ) -> Run:  # fmt: skip
        """Write the snapshot, say so, and end the process: never returns."""
        if own_optimizer is not None:
            raise ConfigError("a job with own_optimizer= cannot begin from a checkpoint: let the script load its state")
        if parallel is not None:
            raise ConfigError("a checkpoint is imported by one process: leave parallel= out, and give --ranks later")
        carry = settings.pop("carry", None)
        task, data = self._task, given(dataset, collate_fn, loader)
        config = resolve({**data.settings, **settings}, task.overrides)
        tensors = ModelTensors(model, config, prepare(model, config, init), carry)
        checkpoint = read_checkpoint(Path(task.checkpoint)).named_as(model.state_dict().keys())
        warnings = _left_out(tensors, model, checkpoint)
        if task.strict and warnings:
            raise DataError(f"--strict: {'; '.join(warnings)}")
        _check_frozen(tensors, checkpoint)
        if tensors.carried is not None:  # no checkpoint has it: replicas begin with what the script gives
            checkpoint = replace(checkpoint, model={**checkpoint.model, **tensors.carried.tensors})
        record = record_of(
            config, tensors.layout, tensors.frozen_hashes(), data=identity_of(data.dataset), tied=tensors.tied
        )
        step = _step_of(task, checkpoint)
        manifest = begin_from(checkpoint, step, record, config, SnapshotStore(task.snapshots))
        what = "with its optimizer's state" if checkpoint.optimizer else "without an optimizer's state (it begins anew)"
        said = f"{task.checkpoint}, {what}, is snapshot {manifest.id} of {task.folder}"
        Path(task.answer).write_bytes(msgspec.json.encode(Answer(said, tuple(warnings))))
        raise SystemExit(0)  # what the script does after its loop is no part of the import


def import_job(path: str) -> ImportJob:
    """Return the job of the import whose task is in this file."""
    return ImportJob(msgspec.json.decode(Path(path).read_bytes(), type=Task))


def _step_of(task: Task, checkpoint: Checkpoint) -> int:
    if task.step >= 0:
        return task.step
    if checkpoint.step >= 0:
        return checkpoint.step
    said = {float(state["step"]) for state in checkpoint.optimizer.values() if "step" in state}
    if len(said) != 1:
        raise DataError(f"{task.checkpoint} does not say of which step it is: give --step N")
    return int(said.pop())


def _left_out(tensors: ModelTensors, model: torch.nn.Module, checkpoint: Checkpoint) -> list[str]:
    """Sentences about what the checkpoint has and the script's model has not."""
    trained = {placed.entry.spec.name for placed in tensors.parameters}
    trained |= {name for name, first in tensors.tied.items() if first in trained}
    said = []
    for what, names in (
        ("weights", checkpoint.model.keys() - model.state_dict().keys()),
        ("optimizer states", checkpoint.optimizer.keys() - trained),
    ):
        if names:
            some = [printable(name) for name in sorted(names)[:_NAMED]]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            why = "the script's model does not have" if what == "weights" else "the script's model does not train"
            said.append(f"the checkpoint has {what} that {why}, and they are left out: {', '.join(some)}{more}")
    return said


def _check_frozen(tensors: ModelTensors, checkpoint: Checkpoint) -> None:
    """Frozen parameters are the script's: raise DataError where the checkpoint has others."""
    for name, parameter in tensors.frozen.items():
        found = checkpoint.model.get(name)
        if found is not None and not torch.equal(found.to(parameter.dtype), parameter.detach().cpu()):
            raise DataError(
                f"the checkpoint has other values of {name}, which is frozen: servers do not hold frozen parameters, "
                "so let the script load them before job.train"
            )
