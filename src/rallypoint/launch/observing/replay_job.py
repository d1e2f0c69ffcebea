"""The job of a replay: a cluster in this process that begins with a snapshot of the run, and ends after one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from rallypoint.config.changes import changed_record
from rallypoint.coordinator.service import JoinInfo
from rallypoint.core.cluster.state import Resumed
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.launch.observing.replay import Answer, Looked, NotFinite, Task
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.worker.evaluations import Evaluation
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.run import Run


class ReplayedRun(Run):
    """The run of a replay: it makes no evaluations, and its loop ends the script after the step that is looked at.

    What the run has decided from its evaluations is in the task.
    """

    task: Task

    def every(self, steps: int) -> Any:
        """Leave the evaluation out: what the run has decided from its result is known."""
        nothing = super().every(steps)

        def left_out(evaluation: Evaluation) -> Evaluation:
            if self._config.plateau is not None:
                nothing(lambda step: None)  # the job waits for a result, from which nothing follows
            return evaluation

        return left_out

    def stop_when(self, metric: str, **settings: Any) -> None:
        """Do nothing, as `stop`."""

    def stop(self, reason: str = "") -> None:
        """Do nothing: the replay ends after its step."""

    def __iter__(self) -> Iterator[Micro]:
        self._samples: dict[int, list[int]] = {}  # by replica
        self._first: dict[int, NotFinite] = {}
        for micro in super().__iter__():
            if micro.step > self.task.step:
                break
            if micro.step == self.task.step:
                if not self._samples:
                    for name, module in self._parts.model.named_modules():
                        module.register_forward_hook(partial(self._passed, name or "the model"))
                indices = self._parts.batches.indices(micro.step, micro.replica, micro.index)
                self._samples.setdefault(micro.replica, []).extend(indices)
                self._computing = micro.replica
            yield micro
        self._answer()
        raise SystemExit(0)  # what the script does after its loop (saving the model) is no part of the replay

    def _passed(self, name: str, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A forward pass of this module has ended."""
        if self._computing not in self._first and not _is_finite(output):
            own = module.parameters(recurse=False)
            found = NotFinite(name, type(module).__name__, _is_finite(inputs), _is_finite(own))
            self._first[self._computing] = found

    def _answer(self) -> None:
        looked = tuple(
            Looked(replica, tuple(samples), self._first.get(replica)) for replica, samples in self._samples.items()
        )
        answer = Answer(looked, self._parts.tensors.device.type)
        Path(self.task.answer).write_bytes(msgspec.json.encode(answer))


def _is_finite(values: Any) -> bool:
    """True if all floating-point numbers in these tensors, also nested, are finite."""
    if isinstance(values, torch.Tensor):
        return not values.is_floating_point() or bool(torch.isfinite(values).all())
    if isinstance(values, dict):
        return all(_is_finite(value) for value in values.values())
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        return all(_is_finite(value) for value in values)
    return True


def replay_job(path: str) -> EmbeddedJob:
    """Return the job of the replay whose task is in this file: a worker with its own cluster, which begins with a run's
    snapshot, and writes into the task's folder alone."""
    task = msgspec.json.decode(Path(path).read_bytes(), type=Task)
    manifest = SnapshotStore(task.snapshots).load(task.snapshot)
    record, _ = changed_record(manifest.job, task.settings, manifest.version)
    decided = msgspec.structs.replace(manifest.decided, reductions=task.reductions, stop=None)
    job = EmbeddedJob(
        resume=Resumed(record, manifest.id, manifest.version, decided=decided),
        about=JoinInfo(overrides=record.config, folder=task.folder, snapshots=task.snapshots),
    )
    job.run_type = type("ReplayedRun", (ReplayedRun,), {"task": task})
    return job
