"""The job of a replay: a cluster in this process that begins with a snapshot of the run, and ends after one step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Unpack

import msgspec

from rallypoint.config.changes import changed_record
from rallypoint.coordinator.service import JoinInfo
from rallypoint.core.cluster.state import Resumed
from rallypoint.data.spec import Collate, Data, Loader, given
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.launch.replaying.inspection import Inspection, KeptGradients
from rallypoint.launch.replaying.probes import Probes
from rallypoint.launch.replaying.samples import described
from rallypoint.launch.replaying.task import Answer, Looked, Task
from rallypoint.parallel.holdings import Parallel
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.worker.carried import TrainSettings
from rallypoint.worker.evaluating.evaluations import Evaluation
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.own import OwnOptimizer, OwnSchedule
from rallypoint.worker.loop.run import Run
from rallypoint.worker.models import Model
from rallypoint.worker.streamed.first_values import Init


class ReplayedRun(Run):
    """The run of a replay: it makes no evaluations, and its loop ends the script after the step that is looked at.

    What the run has decided from its evaluations is in the task.
    """

    def begin(self, task: Task, dataset: object) -> None:
        """Look at that step, whose samples are of this data set."""
        parts = self._parts
        self._dataset = dataset
        self._task, self._exact = task, KeptGradients(parts.exchange.layout, self._config.fingerprints, task.step)
        parts.exchange.replica.contributions = self._exact
        self._inspection = Inspection(parts.model, parts.exchange.layout, parts.batches, self._exact)
        sizes = (self._config.replicas, self._config.accumulate)
        self._probes = Probes(parts.model, parts.batches, self._passes, sizes) if task.probe else None
        self._wanted = task.replica

    def every(self, steps: int, *, priority: Literal["", "high"] = "") -> Any:
        """Leave the evaluation out: what the run has decided from its result is known."""
        nothing = super().every(steps, priority=priority)

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
        for micro in super().__iter__():
            self._inspection.end()
            if micro.step > self._task.step:
                break
            if micro.step == self._task.step:
                if self._probes is not None and self._probes.found is None:
                    yield from self._probes.of(micro.step)
                    assert self._probes.found is not None
                    self._wanted = self._probes.found.replica
                if self._wanted in (-1, micro.replica):
                    self._inspection.begin(micro, debug=self._task.debug)
            yield micro
        self._inspection.end()
        self._answer()
        raise SystemExit(0)  # what the script does after its loop (saving the model) is no part of the replay

    def _answer(self) -> None:
        found = None if self._probes is None else self._probes.found
        device = self._parts.tensors.device.type
        looked = tuple(self._described(one) for one in self._inspection.looked)
        answer = Answer(looked, found, device)
        Path(self._task.answer).write_bytes(msgspec.json.encode(answer))

    def _described(self, looked: Looked) -> Looked:
        """With texts for its samples: they are read again now, when no byte depends on it any more."""
        sizes = self._task.step, looked.replica, self._config.accumulate
        texts = described(self._dataset, self._parts.batches, *sizes)
        return msgspec.structs.replace(looked, described=texts)


class ReplayJob(EmbeddedJob):
    """A worker with its own cluster, which begins with a run's snapshot. It writes into the task's folder alone."""

    run_type = ReplayedRun

    def __init__(self, task: Task) -> None:
        manifest = SnapshotStore(task.snapshots).load(task.snapshot)
        record, _ = changed_record(manifest.job, task.settings, manifest.version)
        decided = msgspec.structs.replace(manifest.decided, reductions=task.reductions, stop=None)
        self._task = task
        super().__init__(
            resume=Resumed(record, manifest.id, manifest.version, decided=decided, scales=task.scales),
            about=JoinInfo(overrides=record.config, folder=task.folder, snapshots=task.snapshots),
        )

    def train(
        self, model: Model, dataset: Data, *, collate_fn: Collate | None = None, loader: Loader | None = None,
        own_optimizer: OwnOptimizer | None = None, own_schedule: OwnSchedule | None = None,
        parallel: Parallel | None = None, init: Init | None = None, **settings: Unpack[TrainSettings],
    ) -> Run:  # fmt: skip
        """As `Job.train`."""
        run = super().train(
            model, dataset, collate_fn=collate_fn, loader=loader, own_optimizer=own_optimizer,
            own_schedule=own_schedule, parallel=parallel, init=init, **settings,
        )  # fmt: skip
        assert isinstance(run, ReplayedRun)
        run.begin(self._task, given(dataset).dataset)
        return run


def replay_job(path: str) -> ReplayJob:
    """Return the job of the replay whose task is in this file."""
    return ReplayJob(msgspec.json.decode(Path(path).read_bytes(), type=Task))
