"""When this worker runs the script's evaluations: each version that is leased to it; without leases, as the lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from rallypoint.core.decisions import StopWhen, checked
from rallypoint.core.protocol import MOST_RULES
from rallypoint.core.view import ViewNumber
from rallypoint.errors import UsageError
from rallypoint.worker.evaluations import Evaluations, Registered
from rallypoint.worker.exchange.locked import Rewound
from rallypoint.worker.loop.parts import Parts
from rallypoint.worker.module_hooks import ForwardChecks


class Evaluator:
    """Evaluates the versions that are this worker's to evaluate. Main thread only, between two replicas.

    A leased version that the model does not hold is pulled beside what this worker trains with. While the evaluation
    runs, the model holds that version; then it holds again what it held before, bit for bit. A lease that is given to
    another worker, or that a roll-back ends, ends such an evaluation before its next forward pass.

    Attributes:
        version: the version that the model holds for an evaluation; None while there is none.
    """

    def __init__(
        self, parts: Parts, evaluations: Evaluations, around: Callable[[int], AbstractContextManager[None]],
        restore_buffers: Callable[[], None],
    ) -> None:  # fmt: skip
        """`around(step)` is entered around evaluations; `restore_buffers()` drops what replicas made of the buffers."""
        self._parts, self._exchange, self._evaluations, self._around = parts, parts.exchange, evaluations, around
        self._restore_buffers = restore_buffers
        self.version: int | None = None
        self._stops: list[StopWhen] = []
        self._registered = False
        self._checks = ForwardChecks(parts.model, lambda module: parts.exchange.leased.check())

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
        decides = bool(self._stops) or parts.config.plateau is not None or bool(parts.config.keep_best)
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
        self._parts.reports.evaluated(version, generation, figures)
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
        parts.reports.evaluated(version, generation, figures)
        if (reason := parts.followers.stop()) is not None:
            parts.stopping.wish(reason)
        parts.stopping.heed(self._exchange)

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
