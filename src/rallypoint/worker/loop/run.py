"""The loop over micro-batches: what the machine says to compute, data by position, versions installed in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from rallypoint.config import JobConfig
from rallypoint.core.order import derive_seed
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.data.loader import MicroBatches, seed_everything
from rallypoint.errors import JobAborted, NonFiniteLoss, UsageError
from rallypoint.net.member import CoordinatorLink
from rallypoint.net.messages import Metrics, NotStored, Report, Say
from rallypoint.observe.trace import Tracer
from rallypoint.store.manifest import Compression
from rallypoint.store.writer import SnapshotWriter
from rallypoint.worker.exchange.exchange import Exchange, Rewound
from rallypoint.worker.loop.allreduce import WorkerOptimizer
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.sources.delayed import Ahead, DelayedSource
from rallypoint.worker.sources.source import DeltaSource
from rallypoint.worker.tensors import ModelTensors

Evaluation = Callable[[int], dict[str, float] | None]
_E = TypeVar("_E", bound=Evaluation)


class Run:
    """One training run on this worker: iterate over it to get this worker's micro-batches.

    When the loop ends, the model holds the final weights on every worker.
    """

    def __init__(
        self, *, model: torch.nn.Module, tensors: ModelTensors, config: JobConfig, batches: MicroBatches,
        exchange: Exchange, source: DeltaSource, coordinator: CoordinatorLink, tracer: Tracer,
        done: Callable[[ViewNumber], None], leads: Callable[[], bool], optimizer: WorkerOptimizer | None = None,
    ) -> None:  # fmt: skip
        self._model, self._tensors, self._config, self._batches = model, tensors, config, batches
        self._exchange, self._source, self._coordinator, self._tracer = exchange, source, coordinator, tracer
        self._done, self._leads, self._optimizer = done, leads, optimizer
        self._writer: SnapshotWriter | None = None
        # A rewind unwinds a forward too, at the next module.
        self._checks = [m.register_forward_pre_hook(lambda *_: exchange.check()) for m in model.modules()]
        self._trace_steps = coordinator.welcome.trace
        self._evaluations: list[tuple[int, Evaluation]] = []
        self._buffers_at_start: list[torch.Tensor] = []
        self._prefetched: tuple[tuple[int, int, int], Any] | None = None
        self._losses: list[float] = []
        self._weights: list[float] = []
        self._evaluated = 0  # the last step at which it was
        self._started = False
        self._delayed = source if isinstance(source, DelayedSource) else None
        self._ahead: Ahead | None = None

    # ---- what the user sees ----

    @property
    def config(self) -> JobConfig:
        """The resolved configuration of the job."""
        return self._config

    @property
    def step(self) -> int:
        """Steps of training behind the version that is here; -1 before the first has come."""
        return self._config.steps_at(self._exchange.step)

    @property
    def lead(self) -> bool:
        """Is it this worker that evaluates (now) and saves (when the job is over)?"""
        return self._leads()

    @property
    def folder(self) -> Path:
        """The run's folder, where results go."""
        folder = Path(self._coordinator.welcome.folder or ".")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def say(self, text: str) -> None:
        """A line for the console and the event log, whatever worker says it."""
        self._coordinator.send(Say(text))

    def every(self, steps: int) -> Callable[[_E], _E]:
        """Decorate ``fn(step) -> {"val_loss": ...}``: called on the lead worker after every `steps` steps and after the
        last, with the model in eval mode and without gradients; what it returns is shown and logged.

        Under local steps that is with the first version that has passed a multiple of `steps`."""
        if steps < 1:
            raise UsageError(f"run.every({steps}): give a positive number of steps")

        def register(evaluation: _E) -> _E:
            self._evaluations.append((steps, evaluation))
            return evaluation

        return register

    def __iter__(self) -> Iterator[Micro]:
        if self._started:
            raise UsageError("a run is iterated once")
        self._started = True
        while True:
            yield from self._go_ahead()
            if (action := self._next_action()) is None:
                break
            match action:
                case machine.Initialise():
                    self._initialise()
                case machine.Install(version=version):
                    generation = self._exchange.view.generation  # what is claimed of this version is claimed in it
                    self._install(version)
                    if self._exchange.step != version:
                        continue  # there was a roll-back meanwhile
                    self._evaluate(generation)
                    if version == self._config.rounds:
                        self._done(generation)
                case machine.Compute(step=round, replica=replica):
                    yield from self._replica(round, replica)
                case machine.Store():
                    self._store(action)
        if self._exchange.gone:
            raise SystemExit(0)  # told to go, and nothing is left here to be done
        if self._exchange.step < 0:
            raise JobAborted("the job was over before this worker had any of its parameters")
        self._end()

    def _next_action(self) -> machine.Action | machine.Store | None:
        self._prefetch()
        with self._tracer.span("wait", step=self._exchange.step):
            return self._exchange.next_action()

    # ---- one replica ----

    def _replica(self, round: int, replica: int) -> Iterator[Micro]:
        began = time.monotonic()
        if (generation := self._exchange.replica.begin(round, replica)) is None:
            return
        self._restore_buffers()
        done = self._resume(round, replica)
        if done is None:
            self._losses, self._weights = [], []
            self._source.begin_replica(round, replica)
        else:
            self._losses, self._weights, began = done.losses, done.weights, began - done.seconds
        steps = self._config.steps_of(round)
        try:
            for step in steps[0 if done is None else done.steps :]:
                yield from self._step(step, replica)
            self._source.end_replica(replica)
        except Rewound:
            self._source.abandon()
            return
        items = len(steps) * self._config.batch * self._config.items_per_sample
        seconds = time.monotonic() - began
        self._coordinator.send(Report(round, replica, _mean(self._losses), _mean(self._weights), items, seconds,
            generation))

    def _go_ahead(self) -> Iterator[Micro]:
        """With a delay, while the version is on its way: the first steps of the replica that will be the next one."""
        if self._delayed is None or (upcoming := self._exchange.upcoming) is None or not self._exchange.idle:
            return
        generation = self._exchange.view.generation
        (round, replica), ahead = upcoming, self._ahead
        if ahead is not None and (ahead.round, ahead.replica, ahead.generation) == (round, replica, generation):
            return
        if not self._delayed.may_go_ahead(round, replica):
            return
        self._losses, self._weights = [], []
        began, count = time.monotonic(), self._config.steps_ahead(round)
        self._delayed.begin_replica(round, replica)
        for step in self._config.steps_of(round)[:count]:
            yield from self._step(step, replica)
        seconds = time.monotonic() - began
        self._ahead = Ahead(round, replica, generation, count, seconds, self._losses, self._weights)

    def _resume(self, round: int, replica: int) -> Ahead | None:
        """What has been made of this round, and holds; another round of that replica begins anew."""
        ahead = self._ahead
        if self._delayed is None or ahead is None or ahead.replica != replica:
            return None
        self._ahead = None
        if ahead.round != round or ahead.generation != self._exchange.view.generation:
            return None
        self._delayed.resume_replica(round, replica)
        return ahead

    def _step(self, step: int, replica: int) -> Iterator[Micro]:
        self._source.begin_step(step)
        before = len(self._losses)
        for index in range(self._config.accumulate):
            micro = Micro(self, step=step, replica=replica, index=index, batch=self._load(step, replica, index))
            yield micro
            if micro.abandoned:
                raise Rewound
            if len(self._losses) == before + index:
                raise UsageError(f"step {step}, replica {replica}: the loop went on without micro.backward(loss)")
        self._source.end_step(finite=all(map(math.isfinite, self._losses[before:])))

    def enter_micro(self, micro: Micro) -> None:
        """``with micro:`` begins (called by Micro). No check: what `__enter__` raises, `__exit__` cannot swallow."""
        seed_everything(derive_seed(self._config.seed, "compute", micro.step, micro.replica, micro.index))

    def backward_micro(self, micro: Micro, loss: torch.Tensor, weight: float) -> None:
        """Back-propagate one micro-batch (called by Micro)."""
        if micro.index == 0:
            self._weights.append(weight)
        elif weight != self._weights[-1]:
            known = self._weights[-1]
            raise UsageError(f"replica {micro.replica}: its micro-batches weigh {known} and {weight}: pass one")
        value = float(loss.detach())
        self._losses.append(value)
        if not math.isfinite(value):
            self._not_finite(micro, value)
        last = micro.index == self._config.accumulate - 1 and self._ends_round(micro.step)
        finite = all(map(math.isfinite, self._losses))
        self._source.begin_backward(_mean(self._weights), finite=finite, last=last)
        with self._tracer.span("backward", step=micro.step, replica=micro.replica):
            (loss / self._config.accumulate if self._config.accumulate > 1 else loss).backward()  # type: ignore[no-untyped-call]

    def _ends_round(self, step: int) -> bool:
        return step + 1 == self._config.steps or (step + 1) % self._config.steps_per_round == 0

    def _not_finite(self, micro: Micro, value: float) -> None:
        what = f"the loss of replica {micro.replica} at step {micro.step} is {value}"
        if self._config.nonfinite == "stop":
            unit = "step" if self._config.local is None else "round"
            raise NonFiniteLoss(
                f"{what}: nothing of that {unit} was applied; lower the learning rate, clip, or set nonfinite to "
                "'skip' or 'continue'"
            )
        if self._config.nonfinite == "continue":
            self.say(f"{what}; continuing as told")

    # ---- data ----

    def _load(self, step: int, replica: int, index: int) -> Any:
        place = (step, replica, index)
        if self._prefetched is not None and self._prefetched[0] == place:
            batch, self._prefetched = self._prefetched[1], None
            return batch
        with self._tracer.span("load", step=step, replica=replica):
            return self._batches.load(step, replica, index)

    def _prefetch(self) -> None:
        """Load the next round's first micro-batch while versions come in; on this thread, so its randomness is safe."""
        if (upcoming := self._exchange.upcoming) is None:
            return
        round, replica = upcoming
        gone = self._ahead is not None and (self._ahead.round, self._ahead.replica) == upcoming
        place = (self._config.steps_at(round) + (self._config.steps_ahead(round) if gone else 0), replica, 0)
        if self._exchange.idle and (self._prefetched is None or self._prefetched[0] != place):
            self._prefetched = (place, self._load(*place))

    # ---- versions ----

    def _initialise(self) -> None:
        """Bring what all begin with: the model as it is, or, where workers are stateful, what it has come to."""
        if self._optimizer is None:
            self._exchange.initialise(self._tensors.part)
            return
        if self._optimizer.version < 0:
            self._optimizer.version = self._exchange.holds = 0
        else:
            self._restore_buffers()
        self._exchange.initialise(self._tensors.part, self._optimizer.record)

    def _store(self, wanted: machine.Store) -> None:
        """Store a share of a snapshot, if the model is still at its version."""
        assert self._optimizer is not None
        about = self._coordinator.welcome
        if self._optimizer.version > wanted.version:
            late = NotStored(wanted.snapshot, "a step was quicker than the word", self._optimizer.version)
            self._coordinator.send(late)
            return
        me = self._exchange.me
        shares = self._tensors.layout.shards[wanted.writers.index(me) :: len(wanted.writers)]
        if not shares:
            return
        if self._buffers_at_start:
            self._restore_buffers()
        if self._writer is None:
            self._writer = SnapshotWriter(
                about.snapshots, cast(Compression, about.compression), me, self._coordinator.send
            )
        with self._tracer.span("capture", version=wanted.version):
            self._writer.begin(wanted.snapshot, len(shares))
            for shard in shares:
                self._writer.put(self._optimizer.record(shard))

    def _install(self, version: int) -> None:
        with self._tracer.span("install", version=version):
            vector, shards = self._exchange.begin_install(version), self._exchange.installing
            if vector is None:
                return
            if self._delayed is not None:
                self._delayed.show_version()  # what a replica has moved is not to be overwritten
            if self._optimizer is not None:
                states, skipped = self._exchange.take_states()
                self._optimizer.install(version, vector, states, skipped=skipped)
                self._exchange.holds = version
            elif shards is None:
                self._tensors.read_from(vector)
            else:
                self._tensors.read_shards_from(vector, shards)
        self._source.installed(shards)
        self._buffers_at_start = [placed.tensor.clone() for placed in self._tensors.buffers]
        self._exchange.installed()
        self._tracer.on = self._trace_steps[0] <= self._exchange.step < self._trace_steps[1]

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        """Every replica starts from the version's buffers, whatever the one before it on this worker left."""
        for placed, start in zip(self._tensors.buffers, self._buffers_at_start, strict=True):
            placed.tensor.copy_(start)

    def _evaluate(self, generation: ViewNumber) -> None:
        step, before = self.step, self._config.steps_at(self._exchange.step - 1)
        ended = step == self._config.steps
        self._evaluated = min(self._evaluated, step)  # later versions are computed, and judged, again
        due = [fn for every, fn in self._evaluations if ended or step // every > before // every]
        if step <= self._evaluated or not due or not self.lead:
            return
        self._evaluated = step
        self._source.show_version()
        training = self._model.training
        self._model.eval()
        with torch.no_grad(), self._tracer.span("evaluate", step=step):
            for evaluation in due:
                values = evaluation(step)
                if values:
                    figures = {name: float(value) for name, value in values.items()}
                    self._coordinator.send(Metrics(step, figures, generation))
        self._model.train(training)

    def release_model(self) -> None:
        """Take the hooks off the model: it is the user's alone again."""
        self._source.remove()
        for check in self._checks:
            check.remove()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _end(self) -> None:
        self.release_model()
        self._restore_buffers()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
