"""The user's loop over micro-batches: computes the replicas that the machine names, installs versions in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal, TypeVar

import torch

from rallypoint.config import JobConfig
from rallypoint.core.decisions import StopWhen
from rallypoint.core.protocol import Contributed, Report, Say
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.local import GoneAhead
from rallypoint.errors import UsageError
from rallypoint.worker.evaluations import Evaluation, Evaluations, check_period
from rallypoint.worker.exchange.exchange import Rewound
from rallypoint.worker.loop.early import EarlyForward
from rallypoint.worker.loop.evaluating import Evaluator
from rallypoint.worker.loop.guard import ModelGuard, compares
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.parts import Parts
from rallypoint.worker.loop.passes import Passes
from rallypoint.worker.loop.prefetch import Prefetch
from rallypoint.worker.loop.versions import Versions, check_last
from rallypoint.worker.module_hooks import ForwardChecks
from rallypoint.worker.ranks.figures import mean_of
from rallypoint.worker.ranks.followers import LEFT_LOOP
from rallypoint.worker.sources.fragments import Ahead
from rallypoint.worker.stopping import LeftLoop

_E = TypeVar("_E", bound=Evaluation)


class Run:
    """One training run on this worker: iterate over it to get this worker's micro-batches.

    When the loop ends, the model holds the final weights on every worker.

    Attributes:
        left_loop: the replica in which the script has left the loop.
    """

    own = False  # True: driven by a loop of the script's own

    def __init__(self, parts: Parts) -> None:
        self._parts, self._config = parts, parts.config
        self._exchange, self._source, self._tracer = parts.exchange, parts.source, parts.tracer
        self._checks = ForwardChecks(parts.model, self._before_module)
        self._guard, self._followers = ModelGuard.of(parts), parts.followers
        self._versions = Versions(parts, self._guard.cast)
        self._early = EarlyForward(parts, self._guard, self._versions)
        self._prefetched = Prefetch(parts)
        self._evaluations = Evaluations(
            parts.model, seed=parts.config.seed, watch=lambda step: self._guard.script(step, values=True),
            ends=lambda step: step == parts.config.steps_at(parts.exchange.end.last),
        )  # fmt: skip
        self._passes = Passes(parts, self._early, self._evaluations.passed)
        self._evaluating = Evaluator(parts, self._evaluations, self._around, self._versions.restore_buffers)
        self._started = False
        self._ahead: GoneAhead[Ahead] = GoneAhead()
        self.left_loop = LeftLoop(
            self._source, finite=lambda: all(map(math.isfinite, self._passes.losses.read())), undo=self._early.undo
        )

    # ---- what the user sees ----

    @property
    def config(self) -> JobConfig:
        """The resolved configuration of the job."""
        return self._config

    @property
    def step(self) -> int:
        """Steps of training in the version that the model holds; -1 before the first version."""
        return self._config.steps_at(self._exchange.step if (at := self._evaluating.version) is None else at)

    @property
    def lead(self) -> bool:
        """True on the worker that evaluates (now), and saves (when the job is over).

        After a `break` out of the loop it waits for the job's end, as `rallypoint.join` does at its end: from then on
        the model holds the final weights.
        """
        self.finish()
        return self._parts.leads()

    @property
    def worker_leads(self) -> bool:
        """When the job is over: the same as `lead`, but on all ranks of that worker.

        For what all of them must call, such as ``get_model_state_dict`` of a model that is sharded.
        """
        return self.lead

    @property
    def folder(self) -> Path:
        """The run's folder, where results belong. Raises UsageError when it cannot be made.

        A coordinator that was started by hand without --folder has none: then it is where this worker runs.
        """
        folder = Path(self._parts.coordinator.welcome.folder or ".")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the run's folder {folder} cannot be made: {error.strerror or error}") from None
        return folder

    def say(self, text: str) -> None:
        """Write a line to the console and the event log. Any worker may call it."""
        self._parts.coordinator.send(Say(text))

    def stop(self, reason: str = "") -> None:
        """End the job with the next version, whatever `steps` says: on all workers the loop ends, and nothing fails.

        Call it in the loop's body, or in an evaluation. The step in progress is the last one (after an evaluation: the
        step that begins). The loop goes on until then, so do not `break`. `reason` is shown.

        Raises UsageError in a mode without a last version, which its sentence names.
        """
        if self._parts.stopping.why_not:
            raise UsageError(self._parts.stopping.why_not)
        self._parts.stopping.wish(reason)

    def stop_when(
        self, metric: str, *, patience: int = 0, min_delta: float = 0.0, mode: Literal["min", "max"] = "min",
        below: float | None = None, above: float | None = None,
    ) -> None:  # fmt: skip
        """End the job when evaluations return `metric` below `below`, or above `above`, or have not made it better by
        more than `min_delta` for the `patience`-th time in a row. Call it before the loop, on all workers.

        It ends with the next version that is to be evaluated, whoever evaluates and however long that takes: training
        does not pass that version before. Raises UsageError in other modes than rp.Sync() and in the loop, ConfigError
        for settings that make no sense.
        """
        rule = StopWhen(metric=metric, patience=patience, min_delta=min_delta, mode=mode, below=below, above=above)
        self._evaluating.stop_when(rule)

    def every(self, steps: int) -> Callable[[_E], _E]:
        """Decorate ``fn(step) -> {"val_loss": ...}``: one worker calls it after every `steps` steps and after the last
        step. In a synchronous job that is a worker that stands by, if there is one, while others train; else the lead.

        The model is in eval mode and gradients are off. The result is shown and logged. Where versions jump over a
        multiple of `steps` (a quorum, local steps), the function is called with the first version after it. The global
        random generators are seeded for it from the job's seed and the step.

        Raises UsageError for what is no number from 1 on. The loop raises UsageError for a result that is no dict of
        numbers, and for an evaluation that changes values of the model's parameters.
        """
        check_period(steps)

        def register(evaluation: _E) -> _E:
            self._evaluations.add(steps, evaluation)
            if self._started:
                self._evaluating.register()
            return evaluation

        return register

    def __iter__(self) -> Iterator[Micro]:
        if self._started:
            raise UsageError("a run is iterated once")
        self._started = True
        self._evaluating.register()
        self._parts.forget_gradients()  # of the script's own passes before the loop
        self._check_forwards()
        self._prefetched.coming(self._exchange)
        while True:
            yield from self._go_ahead()
            if (action := self._next_action()) is None:
                break
            if isinstance(action, machine.Compute):
                yield from self._replica(action.step, action.replica)
            else:
                self._do(action)
        self._end()

    def _do(self, action: machine.Next) -> None:
        match action:
            case machine.Evaluate(version=version):
                self._evaluating.evaluate(version)
            case machine.Initialise():
                self._versions.initialise()
            case machine.Install(version=version):
                if (generation := self._versions.install(version)) is None:
                    return  # a roll-back came meanwhile
                self._evaluating.installed(version, generation)
            case machine.Ended():
                self._versions.restore_buffers()  # a replica may have changed them
            case machine.Store():
                self._versions.store(action)
        if (end := self._exchange.end.take()) is not None:
            self._evaluating.installed(end[1], end[0])  # what is due after the last step
            if self._parts.streamed is not None:
                self._parts.streamed.report()
            self._parts.done(*end)

    def _end(self) -> None:
        """The job is over."""
        self._guard.read()
        self._followers.end(gone=self._exchange.gone, leads=self._parts.leads())
        if self._exchange.gone:
            raise SystemExit(0)  # told to leave, and no replica is assigned any more
        self.release_model()
        check_last(self._exchange.step, self._exchange.end.last)
        self._versions.restore_buffers()

    def finish(self) -> None:
        """Take part in the job until its end if the script has left the loop; else do nothing.

        The worker computes nothing more; others do. Raises UsageError where a mode does not support it.
        """
        stopping, round = self._parts.stopping, self._exchange.step
        if self.left_loop.known and not self._parts.alone:
            raise UsageError(LEFT_LOOP.format(rank=0))
        if self.left_loop.known and stopping.why_not:
            raise UsageError(f"the loop ended before the last step: {stopping.why_not}")
        if not self.left_loop.end_replica():
            return
        own = self._config.order == "own"
        stopping.leave(self._exchange, f"the loop was left at step {self._config.steps_at(round)}", own=own)
        while (action := self._next_action(early=False)) is not None:
            if isinstance(action, machine.Compute):
                stopping.cannot_compute(self._exchange, action.step)
            else:
                self._do(action)
        self._end()

    def _next_action(self, *, early: bool = True) -> machine.Next | None:
        if early:
            self._prefetch()
        self._early.allow(early and self._may_begin_early(self._exchange.step + 1))
        with self._tracer.span("wait", step=self._exchange.step):
            return self._exchange.next_action()

    def _prefetch(self) -> None:
        """Load the next round's first micro-batch while versions arrive."""
        if (upcoming := self._exchange.upcoming) is None or not self._exchange.idle:
            return
        round, replica = upcoming
        gone = self._ahead.has(round, replica)
        first = self._config.steps_at(round) + (self._config.steps_ahead(round) if gone else 0)
        self._prefetched.load((first, replica, 0))

    def _may_begin_early(self, round: int) -> bool:
        """True if nothing has to be done with this round's version before its forward pass begins."""
        return not compares(self._config.steps_at(round)) and self._evaluating.may_begin_early(round)

    # ---- one replica ----

    def _replica(self, round: int, replica: int) -> Iterator[Micro]:
        began = time.monotonic()
        if (generation := self._exchange.replica.begin(round, replica)) is None:
            return
        if not self._early.start(round, replica):
            self._versions.restore_buffers()
        self._followers.compute(round, replica)
        self._prefetched.expect(round, replica, self._exchange.view.replicas_of(self._exchange.me, round))
        done = self._ahead.resume(round, replica, generation)
        if done is None:
            self._passes.begin(replica)
            self._source.begin_replica(round, replica, generation)
        else:
            self._source.resume_replica(round, replica)
            self._passes.resume(done.losses, done.weights)
            began -= done.seconds
        steps = self._config.steps_of(round)
        try:
            for step in steps[0 if done is None else done.steps :]:
                yield from self._step(step, replica)
            self._followers.agree(self._passes.losses, self._passes.weights, self._passes.logged)
            if not self._parts.alone:
                self._parts.stopping.heed_ranks(self._followers.stop(), self._exchange)
            self._source.end_replica(replica)
        except Rewound:
            self._early.undo()
            self._source.abandon()
            return
        optimizer, passes = self._parts.optimizer, self._passes
        loss, weight, figures = self._followers.figures(
            mean_of(passes.losses.read()), mean_of(passes.weights), passes.logged
        )
        self._parts.coordinator.send(Report(
            round, replica, loss if passes.told else math.nan, weight,
            items=len(steps) * self._config.batch * self._config.items_per_sample,
            seconds=time.monotonic() - began - self._early.waited, generation=generation,
            settings=optimizer.settings_digest() if optimizer is not None else "", figures=figures,
        ))  # fmt: skip
        if digests := self._exchange.replica.contributions.take():
            self._parts.coordinator.send(Contributed(round, replica, loss, digests, generation))

    def _go_ahead(self) -> Iterator[Micro]:
        """With a delay: compute the first steps of the next replica while the version is on its way."""
        if (upcoming := self._exchange.upcoming) is None or not self._exchange.idle:
            return
        (round, replica), generation = upcoming, self._exchange.view.generation
        if self._ahead.is_over(round, replica, generation):
            return
        if not self._source.may_go_ahead(round, replica, generation):
            return
        self._passes.begin(replica)
        began, count = time.monotonic(), self._config.steps_ahead(round)
        self._source.begin_replica(round, replica, generation)
        for step in self._config.steps_of(round)[:count]:
            if self._exchange.upcoming is None or self._exchange.view.generation != generation:
                return  # nobody needs them any more
            yield from self._step(step, replica)
        results = Ahead(count, time.monotonic() - began, self._passes.losses, self._passes.weights)
        self._ahead.made(round, replica, generation, results)

    def _step(self, step: int, replica: int) -> Iterator[Micro]:
        self._source.begin_step(step)
        losses, before = self._passes.losses, len(self._passes.losses)
        for index in range(self._config.accumulate):
            batch = self._prefetched.take((step, replica, index))
            scale = self._parts.tensors.loss_scale
            micro = Micro(self._passes, step=step, replica=replica, index=index, batch=batch, scale=scale)
            last = index == self._config.accumulate - 1
            with self._guard.script(step, values=last and compares(step), late=True):
                self._early.begin()
                try:
                    yield micro
                except GeneratorExit:
                    self.left_loop.left(replica, whole=last and micro.finished and self._passes.ends_round(step))
                    raise
            if micro.abandoned:
                raise Rewound
            if len(losses) == before + index:
                raise UsageError(f"step {step}, replica {replica}: the loop went on without micro.backward(loss)")
        if self._parts.alone:
            self._parts.stopping.heed(self._exchange)  # nothing that the next version needs is sent before
        self._source.end_step(finite=lambda: all(map(math.isfinite, losses.read()[before:])))

    def _before_module(self, module: torch.nn.Module) -> None:
        # Outside of `with micro:`, which alone swallows Rewound, the script gets what the model holds
        self._exchange.check(stale=self._early.inside)
        self._early.enter(module)

    # ---- versions ----

    @contextmanager
    def _around(self, step: int) -> Iterator[None]:
        """Around the script's evaluations of that step."""
        self._checks.off()  # an evaluation may save or copy the model
        streaming = nullcontext() if self._parts.streamed is None else self._parts.streamed.evaluating(step)
        with (
            self._tracer.span("evaluate", step=step), self._exchange.evaluating(), self._passes.autocast.on(), streaming
        ):  # fmt: skip
            yield
        self._check_forwards()
        self._parts.forget_gradients()  # of the evaluation's own passes

    def _check_forwards(self) -> None:
        if self._parts.alone:  # of several ranks none may be unwound by itself, inside of a collective
            self._checks.on()

    def release_model(self) -> None:
        """Take the hooks off the model."""
        self._early.undo()
        self._source.remove()
        self._passes.remove()
        if self._parts.streamed is not None:
            self._parts.streamed.remove()
        self._checks.off()
        self._prefetched.close()
        self._guard.remove()
        self._versions.close()
