"""The user's loop over micro-batches: computes the replicas that the machine names, installs versions in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rallypoint.config import JobConfig
from rallypoint.core.decisions import StopWhen, checked
from rallypoint.core.protocol import MOST_RULES, Contributed, Report, Say
from rallypoint.core.typed import named
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.local import GoneAhead
from rallypoint.data.loader import LastBatch
from rallypoint.data.order import Place
from rallypoint.data.processes import LoaderProcesses
from rallypoint.data.randomness import seed_everything
from rallypoint.errors import UsageError
from rallypoint.observe.lenient import say
from rallypoint.observe.trace import LOAD
from rallypoint.parallel import whole_of
from rallypoint.worker.evaluations import Evaluation, Evaluations, Registered, check_period
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.locked import Rewound
from rallypoint.worker.habits import Habits, WrappedHabits, by_the_job
from rallypoint.worker.loop.guard import ModelGuard, Parts, compares
from rallypoint.worker.loop.micro import BufferVersions, EarlyForward, Loop, Micro, check_last
from rallypoint.worker.membership import LeftLoop
from rallypoint.worker.module_hooks import Activations, ModuleHooks
from rallypoint.worker.precision import Autocast, Losses, losses_of
from rallypoint.worker.ranks.followers import LEFT_LOOP, Logged, mean_of
from rallypoint.worker.sources.local import Ahead
from rallypoint.worker.tensors import Carried, Carry, weights_hash

# ---- The passes of the replica that is being computed: forward inside of ``with micro:``, and backward ----


class Passes(Loop):
    """What the micro-batches of a `Run` call: see `Loop`. Main thread only.

    Attributes:
        losses, weights: of the replica's micro-batches and steps so far.
        autocast: as `precision` says.
        told: the script has told the loss. (A loop of its own need not.)
    """

    def __init__(self, parts: Parts, early: EarlyForward, installed_early: Callable[[int], None]) -> None:
        """`installed_early` is called with the step whose forward pass has installed its version."""
        self._parts, self._config, self._early = parts, parts.config, early
        self._exchange, self._installed_early = parts.exchange, installed_early
        self.autocast = Autocast(parts.config, parts.tensors.device)
        self._activations = Activations(parts.model, parts.config)
        self._streamed, self._carried = parts.streamed, parts.tensors.carried
        self._own = parts.config.reading.order == "own"
        tables = [one.weight for same in parts.tensors.tables for one in same]
        known = [*(placed.tensor for placed in parts.tensors.parameters), *tables]
        self._habits = WrappedHabits(known) if self._own else Habits(known)
        self._new_losses = losses_of(parts.staging, parts.config, parts.say)
        self.begin(0)

    def begin(self, replica: int) -> None:
        """A replica begins its round."""
        self.logged, self.told = Logged(), True
        self.resume(self._new_losses(replica), [])

    def resume(self, losses: Losses, weights: list[float]) -> None:
        """A replica goes on with its round."""
        self.losses, self.weights = losses, weights

    def remove(self) -> None:
        """The run is over: the model computes as before."""
        self._habits.leave()
        self._activations.remove()

    def check(self) -> None:
        self._exchange.check()

    def watch(self, micro: Micro) -> None:
        """A loop of the script's own begins: watch its calls until the job is over."""
        self._habits.enter(micro)

    def enter_micro(self, micro: Micro) -> None:
        """It makes no check: `__exit__` could not swallow an error of `__enter__`."""
        self._early.inside = self._exchange.rows.in_micro = True
        self._exchange.cores.take()
        if not self._own:  # else the script's optimizer is what steps, and its calls are right
            if self._parts.alone:  # else a pipeline's schedule back-propagates by itself
                self._habits.enter(micro)
            seed_everything(self._parts.batches.compute_seed(micro.step, micro.replica, micro.index))
        self.autocast.enter()
        if self._streamed is not None:
            self._streamed.begin()

    def exit_micro(self) -> None:
        self._exchange.cores.give()
        if self._streamed is not None:
            self._streamed.leave()
        if self._carried is not None:
            self._carried.keep()
        self.autocast.leave()
        self._habits.exit()
        self._early.inside = self._exchange.rows.in_micro = False

    def backward_at(self) -> str:
        return self._habits.backward_at

    def carried_micro(self, micro: Micro) -> Carry:
        return self._carrying(micro).of(micro.replica)

    def carry_micro(self, micro: Micro, state: Carry) -> None:
        self._carrying(micro).give(micro.replica, state)

    def _carrying(self, micro: Micro) -> Carried:
        if self._carried is None:
            raise UsageError(
                f"step {micro.step}, replica {micro.replica}: micro.carry, but replicas of this job carry nothing: "
                "give job.train(carry=...) the state that each of them begins with"
            )
        return self._carried

    def backward_micro(
        self, micro: Micro, loss: torch.Tensor, weight: float, *, last: bool = True, retain_graph: bool = False
    ) -> None:
        """The gradients of those before it are kept."""
        if not last or micro.losses is not None:
            where = f"step {micro.step}, replica {micro.replica}"
            if self._streamed is not None:
                raise UsageError(
                    f'{where}: micro.backward(more=True) with parameters="streamed" is not supported: gradients leave '
                    "as they are made; add the losses"
                )
            if not self._parts.alone:
                raise UsageError(f"{where}: micro.backward(more=True) is for workers of one process: add the losses")
        if self._early.finish(loss):
            self._installed_early(micro.step)
        if micro.index == 0 and micro.losses is None:
            self._check_no_gradient(micro)
        micro.losses = loss.detach().clone() if micro.losses is None else micro.losses + loss.detach()
        if last:
            self._count(micro, micro.losses, weight)
            weight = mean_of(self.weights)
        ends = last and micro.index == self._config.accumulate - 1 and self.ends_round(micro.step)
        self._parts.source.begin_backward(weight, finite=self.losses.finite, last=ends)
        with self._parts.tracer.span("backward", step=micro.step, replica=micro.replica), self.autocast.off():
            loss = loss / self._config.accumulate if self._config.accumulate > 1 else loss
            scale = self._parts.tensors.loss_scale
            scaled = loss if scale is None else loss * scale[0]
            with by_the_job():
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self._parts.source.end_backward()

    def computed_micro(self, micro: Micro, loss: torch.Tensor | None, weight: float) -> None:
        if self._own:
            self.told = loss is not None
            self._count(micro, loss, weight)
            self._parts.source.begin_backward(weight, finite=self.losses.finite, last=True)
            self._parts.source.end_backward()  # `end_replica` sends what is in .grad
            return
        if self._parts.alone:
            raise UsageError(
                "micro.computed is for a worker of several ranks (--ranks), whose script runs a pipeline schedule: "
                "here call micro.backward(loss)"
            )
        self._count(micro, loss, weight)

    def _count(self, micro: Micro, loss: torch.Tensor | None, weight: float) -> None:
        """Note a micro-batch's loss and weight. `loss` is None on a rank that has none."""
        if micro.index == 0:
            self.weights.append(weight)
        elif weight != self.weights[-1]:
            known = self.weights[-1]
            raise UsageError(f"replica {micro.replica}: its micro-batches weigh {known} and {weight}: pass one")
        none = torch.zeros((), dtype=torch.float32, device=self._parts.tensors.device)  # it takes the way of a loss
        self.losses.add(none if loss is None else whole_of(loss), micro.step)
        self._parts.followers.micro(has_loss=loss is not None)

    def _check_no_gradient(self, micro: Micro) -> None:
        for placed in self._parts.tensors.parameters:
            if placed.tensor.grad is not None:
                at = f" ({self._habits.backward_at})" if self._habits.backward_at else ""
                raise UsageError(
                    f"parameter {placed.entry.spec.name} has a gradient before micro.backward at step {micro.step}: "
                    f"the script has called backward() itself{at}. Give micro.backward the sum of all losses, or each "
                    "of them, all but the last with more=True; torch.autograd.grad leaves no gradient behind"
                )

    def ends_round(self, step: int) -> bool:
        return step + 1 == self._config.steps or (step + 1) % self._config.steps_per_round == 0


# ---- Loads micro-batches: the next one while versions arrive, or several ahead in loader processes ----


class Prefetch:
    """What the loop asks for micro-batches. Main thread only.

    Without loader processes it loads there too, so a data set may use the global random generators. The span "load" is
    the time for which the loop has waited for a micro-batch.

    Where a stream ends, it tells the coordinator with which step the job is to end.
    """

    def __init__(self, parts: Parts) -> None:
        self._batches, self._tracer, self._say = parts.batches, parts.tracer, parts.say
        self._stopping = parts.stopping
        self._ready: tuple[Place, Any] | None = None
        self._processes = LoaderProcesses(self._batches, self._say) if self._batches.loader.workers else None

    def coming(self, exchange: Exchange) -> None:
        """Before the first version: in a job that does not go on from a snapshot, have the first samples fetched."""
        view, fresh = exchange.view, exchange.step < 0 and not exchange.view.origin
        if self._processes is not None and fresh and (mine := view.replicas_of(exchange.me, 0)):
            self._processes.coming(0, mine[0], mine)

    def expect(self, round: int, replica: int, replicas: tuple[int, ...]) -> None:
        """This worker computes `replica` now, and has these `replicas` (ascending) in this round."""
        if self._processes is not None:
            self._processes.expect(round, replica, replicas)

    def load(self, place: Place) -> None:
        """Load this micro-batch now, unless it is loaded already, or processes load it."""
        if self._processes is None and (self._ready is None or self._ready[0] != place):
            self._ready = place, self._load(place)

    def take(self, place: Place) -> Any:
        """Return this micro-batch; load it if it is not loaded yet. Raises DataError as `MicroBatches.load`."""
        ready, self._ready = self._ready, None  # one of another place has been loaded in vain, and may be of the past
        batch = ready[1] if ready is not None and ready[0] == place else self._load(place)
        if not isinstance(batch, LastBatch):
            return batch
        step, replica, _ = place
        self._stopping.wish(f"the stream is over, replica {replica} has no full batch after it", step=step)
        return self._batches.on_device(batch)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def _load(self, place: Place) -> Any:
        step, replica, index = place
        with self._tracer.span(LOAD, step=step, replica=replica):
            if self._processes is not None:
                batch = self._processes.take(place)
            else:
                batch, skipped = self._batches.loaded(step, replica, index)
                for sentence in skipped:
                    self._say(sentence)
            return batch if isinstance(batch, LastBatch) else self._batches.on_device(batch)  # (moved when it is taken)


# ---- Evaluations: each version that is leased to this worker; without leases, as the lead ----


class Evaluator:
    """Evaluates the versions that are this worker's to evaluate. Main thread only, between two replicas.

    A leased version that the model does not hold is pulled beside what this worker trains with. While the evaluation
    runs, the model holds that version; then it holds again what it held before, bit for bit. A lease that is given to
    another worker, or that a roll-back ends, ends such an evaluation before its next forward pass.
    """

    def __init__(
        self, parts: Parts, evaluations: Evaluations, around: Callable[[int], AbstractContextManager[None]],
        restore_buffers: Callable[[], None],
    ) -> None:  # fmt: skip
        """`around(step)` is entered around evaluations; `restore_buffers()` drops what replicas made of the buffers."""
        self._parts, self._exchange, self._evaluations, self._around = parts, parts.exchange, evaluations, around
        self._restore_buffers = restore_buffers
        self.version: int | None = None  # the version that the model holds for an evaluation; None while there is none
        self._stops: list[StopWhen] = []
        self._registered = self._named = False  # are the evaluations told; are their figures' names known?
        self._checks = ModuleHooks(parts.model, lambda module: parts.exchange.leased.check())

    def stop_when(self, rule: StopWhen) -> None:
        """The script has this rule. Raises UsageError where the job cannot decide, ConfigError if it is no rule."""
        if self._parts.decides_not:
            raise UsageError(self._parts.decides_not)
        if self._registered:
            raise UsageError("call run.stop_when before the loop: what the job computes depends on it from the start")
        if len(self._stops) == MOST_RULES:
            raise UsageError(f"run.stop_when was called more than {MOST_RULES} times: leave some out")
        self._stops.append(checked(rule))

    def register(self) -> None:
        """Tell the coordinator which evaluations the script has, also if none, and by which rules they decide.

        Raises UsageError if they decide and the loop has begun: others compute already.
        """
        parts, periods = self._parts, self._evaluations.periods
        if not parts.leases:
            return
        decides = bool(self._stops) or parts.config.evaluation.plateau is not None or bool(
            parts.config.evaluation.keep_best
        )
        if decides and self._registered:
            raise UsageError("write @run.every above the loop: what the job computes depends on its evaluations")
        self._registered = True
        if periods:
            parts.exchange.leased.expect(periods)
        parts.reports.registered(periods, self._stops)

    def may_begin_early(self, version: int) -> bool:
        """True if this worker does not evaluate the version before its forward pass begins."""
        if self._parts.leases:
            return not self._exchange.leased.is_due(version)
        return not self._evaluations.coming(*self._steps(version))

    def installed(self, version: int, generation: ViewNumber) -> None:
        """The model holds that version: without leases, the lead evaluates it."""
        if self._parts.leases:
            return
        due = self._evaluations.due(*self._steps(version))
        if due and self._parts.leads():
            self._evaluate(version, generation, due)

    def evaluate(self, version: int) -> None:
        """Evaluate this version, or do nothing if it is not this worker's duty any more."""
        leased, due = self._exchange.leased, self._evaluations.due_at(*self._steps(version))
        if (generation := leased.held(version)) is not None:
            self._restore_buffers()
            self._evaluate(version, generation, due)
            leased.end()
            return
        if (pulled := leased.begin(version)) is None:
            return
        generation, vector = pulled
        if vector is None:
            self._parts.reports.evaluated(version, generation, None)
            return
        step = self._parts.config.steps_at(version)
        with self._holding(version, vector), self._around(step):
            del vector, pulled
            self._checks.on()
            try:
                figures = self._evaluations.run(due, step)
            except Rewound:
                return  # another worker evaluates it
            finally:
                self._checks.off()
        leased.end()
        self._tell(version, generation, figures, due)
        self._heed(version, generation)

    def _steps(self, version: int) -> tuple[int, int]:
        """Of that version and of the one before."""
        return self._parts.config.steps_at(version), self._parts.config.steps_at(version - 1)

    def _evaluate(self, version: int, generation: ViewNumber, due: list[Registered]) -> None:
        """Evaluate the version that the model holds. It notices a roll-back only after it ends."""
        parts, step = self._parts, self._parts.config.steps_at(version)
        figures: Mapping[str, float] | None = None
        parts.source.show_version()
        with self._around(step):
            parts.followers.evaluate(step, self._evaluations.bits(due))
            figures = self._evaluations.run(due, step, agree=parts.followers.result)
        if figures is None:
            return  # given up in a roll-back: `around` has said so
        self._tell(version, generation, figures, due)
        if (reason := parts.followers.stop()) is not None:
            parts.stopping.wish(reason)
        parts.stopping.heed(self._exchange)

    def _tell(self, version: int, generation: ViewNumber, figures: Mapping[str, float], due: list[Registered]) -> None:
        self._parts.reports.evaluated(version, generation, figures)
        if self._named or len(due) < len(self._evaluations.periods):
            return
        self._named, rules = True, self._parts.config.evaluation  # all evaluations have returned their figures
        wanted = {"keep_best": rules.keep_best, "plateau": "" if rules.plateau is None else rules.plateau.metric}
        wanted |= {f"run.stop_when({rule.metric!r})": rule.metric for rule in self._stops}
        for rule, metric in wanted.items():
            if metric and metric not in figures:
                text = f"no evaluation has returned {metric}, which {rule} is about: figures are {named([*figures])}"
                self._parts.coordinator.send(Say(text))

    def _heed(self, version: int, generation: ViewNumber) -> None:
        """The evaluation may have called `run.stop()`. A worker that stands by has nothing to hold back."""
        stopping = self._parts.stopping
        if self._exchange.step >= version:
            stopping.heed(self._exchange)
        elif stopping.wanted is not None and not self._exchange.end.is_early:
            stopping.say(version + 1, generation)

    @contextmanager
    def _holding(self, version: int, vector: torch.Tensor) -> Iterator[None]:
        """In the body the model holds the parameters and buffers of `vector`, which are those of `version`."""
        tensors = self._parts.tensors
        placed = [one.tensor for one in (*tensors.parameters, *tensors.buffers)]
        with torch.no_grad():
            before = [tensor.clone() for tensor in placed]
        tensors.read_from(vector)
        self.version = version
        try:
            yield
        finally:
            self.version = None
            with torch.no_grad():
                for tensor, values in zip(placed, before, strict=True):
                    tensor.copy_(values)


# ---- The loop ----

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
        self._checks = ModuleHooks(parts.model, self._before_module)
        self._guard, self._followers = ModelGuard.of(parts), parts.followers
        self._versions = BufferVersions(parts, self._guard.cast)
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
        """The run's folder, an absolute path: results belong there. Raises UsageError when it cannot be made.

        A job that runs alone has none, nor has a coordinator that was started by hand without --folder: then it is the
        folder where this process runs, and Rallypoint itself writes nothing there.
        """
        folder = Path(self._parts.coordinator.welcome.folder).absolute()
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

        It ends with the next version that is due for an evaluation, however long an evaluation takes: training does not
        pass that version before. Raises UsageError in other modes than rp.Sync() and in the loop, ConfigError for
        settings that make no sense.
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
            case machine.UploadFirst():
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
            self._versions.ended(end[1])
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
        if self._parts.alone and self._parts.streamed is None and self._parts.leads():
            say(f"weights sha256 {weights_hash(self._parts.model)}")

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
        own = self._config.reading.order == "own"
        stopping.leave(self._exchange, f"the loop was left at step {self._config.steps_at(round)}", own=own)
        while (action := self._next_action(early=False)) is not None:
            if isinstance(action, machine.Compute):
                stopping.say(action.step + 1, self._exchange.end.generation, left=action.step)
                self._exchange.end.wait_for_others()
            else:
                self._do(action)
        self._end()

    def _next_action(self, *, early: bool = True) -> machine.Next | None:
        if early:
            self._prefetch()
        round = self._exchange.step + 1  # may its forward pass begin before its version is here?
        free = early and not compares(self._config.steps_at(round)) and self._evaluating.may_begin_early(round)
        self._early.allow(free)
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
                if (reason := self._followers.stop()) is not None:
                    self._parts.stopping.wish(reason)
                with suppress(Rewound):  # other ranks send their gradients first: `end_replica` raises it after that
                    self._parts.stopping.heed(self._exchange)
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
            items=len(steps) * self._config.batch * self._config.reading.items_per_sample,
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
