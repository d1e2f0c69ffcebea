"""Evaluations on this worker: the lead's, and those whose lease it holds, with versions that come from the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from rallypoint.core.deciding.decisions import StopWhen, checked
from rallypoint.core.view import ViewNumber
from rallypoint.errors import UsageError
from rallypoint.net.evaluations.messages import MOST_RULES
from rallypoint.net.messages import Metrics
from rallypoint.worker.evaluating.evaluations import Evaluations, Registered
from rallypoint.worker.exchange.locked import Rewound
from rallypoint.worker.loop.parts import Parts
from rallypoint.worker.module_hooks import ForwardChecks


class LeasedEvaluations:
    """Evaluates the versions that are this worker's to evaluate. Main thread only, between two replicas.

    A version of which it holds the lease is pulled beside what this worker trains with. While the evaluation runs, the
    model holds that version; then it holds again what it held before, bit for bit. A lease that is given to another
    worker, or that a roll-back ends, ends the evaluation before its next forward pass.

    Attributes:
        version: the version that the model holds for an evaluation; None while there is none.
    """

    def __init__(
        self, parts: Parts, evaluations: Evaluations, around: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        """`around(step)` is entered around evaluations, as around those of the lead."""
        self._parts, self._exchange, self._evaluations, self._around = parts, parts.exchange, evaluations, around
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
        decides = bool(self._stops) or parts.config.plateau is not None or bool(parts.config.keep_best)
        if not parts.leases:
            return
        if decides and self._registered:
            raise UsageError("write @run.every above the loop: what the job computes depends on its evaluations")
        self._registered = True
        if decides:
            parts.exchange.leased.decide()
        parts.reports.registered(periods, high=self._evaluations.high, stops=self._stops)

    def lead(self, version: int, generation: ViewNumber, due: list[Registered]) -> None:
        """Evaluate the version that the model holds, which the lead has not left to another worker."""
        parts, step = self._parts, self._parts.config.steps_at(version)
        figures: dict[str, float] = {}
        complete = False

        def report(values: dict[str, float]) -> None:
            figures.update(values)
            parts.reports.evaluated(Metrics(step, values, generation))

        with self._around(step):
            parts.followers.evaluate(step, self._evaluations.bits(due))
            self._evaluations.run(due, step, report, agree=parts.followers.result)
            complete = True
        if not complete:
            return  # given up in a roll-back: `around` has said so
        if parts.leases:
            parts.reports.version_evaluated(version, generation, figures)
        if (reason := parts.followers.stop()) is not None:
            parts.stopping.wish(reason)
        parts.stopping.heed(self._exchange)

    def evaluate(self, version: int) -> None:
        """Evaluate this version, or do nothing if it is not this worker's duty any more."""
        if (pulled := self._exchange.leased.begin(version)) is None:
            return
        generation, vector = pulled
        if vector is None:
            self._parts.reports.not_kept(version, generation)
            return
        step, before = self._parts.config.steps_at(version), self._parts.config.steps_at(version - 1)
        due = self._evaluations.due_at(step, before)
        figures: dict[str, float] = {}

        def report(values: dict[str, float]) -> None:
            figures.update(values)
            self._parts.reports.evaluated(Metrics(step, values, generation))

        with self._holding(version, vector), self._around(step):
            del vector, pulled
            self._checks.on()
            try:
                self._evaluations.run(due, step, report)
            except Rewound:
                return  # another worker evaluates it
            finally:
                self._checks.off()
        self._exchange.leased.end()
        self._parts.reports.version_evaluated(version, generation, figures)
        self._heed(version, generation)

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
