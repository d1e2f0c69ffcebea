"""A whole cluster inside this process, for a script that was started without a launcher.

Two such jobs do not train to the end: that of an import writes the first snapshot, that of a replay ends after a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec
import torch

from rallypoint.config import record_of, resolve
from rallypoint.config.changes import changed_record
from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.state import Resumed
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.typed import named, printable
from rallypoint.data.identity import identity_of
from rallypoint.data.spec import Collate, Data, Loader, given
from rallypoint.errors import ConfigError, DataError, UsageError
from rallypoint.launch.commands.importing import Imported, ImportTask
from rallypoint.launch.console import RunConsole
from rallypoint.launch.observing.replay import Looked, NotFinite, ReplayAnswer, ReplayTask
from rallypoint.net.handshake import LAUNCHER, Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.transport import InprocTransport
from rallypoint.observe.lenient import say
from rallypoint.observe.usage import usable_cores
from rallypoint.observe.waits import SharedCores
from rallypoint.optim import InPlace
from rallypoint.parallel import Parallel
from rallypoint.server.service import ServerService
from rallypoint.store.checkpoints import Checkpoint, begin_from, read_checkpoint
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.worker.evaluations import Evaluation
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.own import OwnOptimizer, OwnSchedule
from rallypoint.worker.loop.run import Run
from rallypoint.worker.loop.session import Job
from rallypoint.worker.sources.streamed import Init, prepare
from rallypoint.worker.tensors import ModelTensors, TrainSettings


class EmbeddedJob(Job):
    """A worker with its own coordinator and server on threads of this process, over the in-process transport.

    With a `console` the run's progress is shown there. Where the script computes with most of the cores, the server
    waits while it does. The process has as many intra-op threads as before when the job is closed.
    """

    def __init__(
        self, *, servers: int = 1, folder: str = "", console: RunConsole | None = None, about: JoinInfo | None = None,
        resume: Resumed | None = None,
    ) -> None:  # fmt: skip
        """`resume`: the snapshot to begin with, which `about` says where to find. None are taken."""
        transport, self._shared, in_place = InprocTransport(), SharedCores(), InPlace()
        self._threads_before = torch.get_num_threads()
        self._coordinator = CoordinatorService(
            terms=Terms(servers=servers), bind="coordinator:0", transport=transport,
            join_info=about or JoinInfo(folder=folder), resume=resume,
        )  # fmt: skip
        self._coordinator.start()
        self._servers = [
            ServerService(id=f"server{i}", coordinator=self._coordinator.address, bind="server:0", transport=transport)
            for i in range(servers)
        ]
        for server in self._servers:
            server.share(self._shared, in_place)
            server.start()
        self._console = console
        self._observer = None if console is None else CoordinatorLink(
            transport=transport, address=self._coordinator.address, me=Identity("observer", LAUNCHER),
            handlers=Handlers(console.show, lambda error: None),  # the coordinator closes it when the job is over
        )  # fmt: skip
        if self._observer is not None:
            self._observer.start()
        super().__init__(id="worker0", coordinator=self._coordinator.address, transport=transport, cores=self._shared)
        self._in_place = in_place if servers == 1 else None
        if 2 * torch.get_num_threads() <= usable_cores():
            self._cores = None  # cores are left for the server

    def _finish(self, run: Run | None) -> None:
        try:
            super()._finish(run if self._console is None else self._run)  # sys.exit(0) in the loop is as a `break`
        except UsageError as error:
            say(f"warning: {error}. On a cluster the job would fail", error=True)
            return
        if run is not None and not self._finished:
            say("warning: the loop has not begun. On a cluster the job would fail", error=True)

    def close(self) -> None:
        self._shared.give()  # an error may have left a micro-batch half begun
        super().close()
        for server in self._servers:
            server.close()
        self._coordinator.close()
        if self._observer is not None and self._console is not None:
            self._observer.close()
            self._console.close()
        torch.set_num_threads(self._threads_before)


_NAMED = 8  # tensors that are left out


class ImportJob(EmbeddedJob):
    """A worker that trains nothing. `train` writes a snapshot for the job that the script describes."""

    def __init__(self, task: ImportTask) -> None:
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
        warnings += _of("parts that are no model, optimizer or step", checkpoint.unread)
        for name, parameter in tensors.frozen.items():
            found = checkpoint.model.get(name)
            if found is not None and not torch.equal(found.to(parameter.dtype), parameter.detach().cpu()):
                raise DataError(
                    f"the checkpoint has other values of {name}, which is frozen: servers do not hold frozen "
                    "parameters, so let the script load them before job.train"
                )
        if tensors.carried is not None:  # no checkpoint has it: replicas begin with what the script gives
            checkpoint = replace(checkpoint, model={**checkpoint.model, **tensors.carried.tensors})
        record = record_of(
            config, tensors.layout, tensors.frozen_hashes(), data=identity_of(data.dataset), tied=tensors.tied
        )
        step = _step_of(task, checkpoint)
        manifest = begin_from(checkpoint, step, record, config, SnapshotStore(task.snapshots))
        what = "with its optimizer's state" if checkpoint.optimizer else "without an optimizer's state (it begins anew)"
        said = f"{task.checkpoint}, {what}, is snapshot {manifest.id} of {task.folder}"
        Path(task.answer).write_bytes(msgspec.json.encode(Imported(said, tuple(warnings))))
        raise SystemExit(0)  # what the script does after its loop is no part of the import


def import_job(path: str) -> ImportJob:
    """Return the job of the import whose task is in this file."""
    return ImportJob(msgspec.json.decode(Path(path).read_bytes(), type=ImportTask))


def _step_of(task: ImportTask, checkpoint: Checkpoint) -> int:
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
    return [
        *_of("weights that the script's model does not have", checkpoint.model.keys() - model.state_dict().keys()),
        *_of("optimizer states that the script's model does not train", checkpoint.optimizer.keys() - trained),
    ]


def _of(what: str, names: Iterable[str]) -> list[str]:
    some = named([printable(name) for name in sorted(names)], _NAMED)
    return [f"the checkpoint has {what}, and they are left out: {some}"] if names else []


class ReplayedRun(Run):
    """The run of a replay: it makes no evaluations, and its loop ends the script after the step that is looked at.

    What the run has decided from its evaluations is in the task.
    """

    task: ReplayTask
    coordinator: CoordinatorService

    def every(self, steps: int) -> Any:
        """Leave the evaluation out: what the run has decided from its result is known."""
        nothing = super().every(steps)

        def left_out(evaluation: Evaluation) -> Evaluation:
            if self._config.evaluation.plateau is not None:
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
        self.coordinator.wait_for_step(self.task.step, 10.0)  # its loss waits for what servers say of the step
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
        answer = ReplayAnswer(looked, self._parts.tensors.device.type)
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
    task = msgspec.json.decode(Path(path).read_bytes(), type=ReplayTask)
    manifest = SnapshotStore(task.snapshots).load(task.snapshot)
    record, _ = changed_record(manifest.job, task.settings, manifest.version)
    decided = msgspec.structs.replace(manifest.decided, reductions=task.reductions, stop=None)
    job = EmbeddedJob(
        resume=Resumed(record, manifest.id, manifest.version, decided=decided),
        about=JoinInfo(overrides=record.config, folder=task.folder, snapshots=task.snapshots),
    )
    job.run_type = type("ReplayedRun", (ReplayedRun,), {"task": task, "coordinator": job._coordinator})
    return job
