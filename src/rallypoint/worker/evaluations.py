"""Evaluations: the functions that a script registers with `run.every`, when each is due, its seed and its result; and
what the coordinator is told of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import torch

from rallypoint.core.decisions import StopWhen, is_due
from rallypoint.core.order import derive_seed
from rallypoint.core.protocol import Evaluated, Evaluates, Message
from rallypoint.core.typed import MOST_METRICS, unnamed
from rallypoint.core.view import ViewNumber
from rallypoint.data.randomness import seeded
from rallypoint.errors import UsageError
from rallypoint.worker.ranks.followers import is_number

_REPEATED = 64  # results
Evaluation = Callable[[int], dict[str, float] | None]
Agree = Callable[[Mapping[str, float] | None], Mapping[str, float] | None]


class Evaluations:
    """The evaluations of one run on this worker.

    An evaluation is due with the first version at or after a multiple of its `every`; versions may jump (a quorum,
    local steps, backup tasks). Example: ``every = 10`` and versions of steps 8, 16, 24: due at 16 and 24. Each
    evaluation starts with global random generators seeded from (seed, step). Training's random state is restored
    afterwards.
    """

    def __init__(
        self, model: torch.nn.Module, *, seed: int, ends: Callable[[int], bool],
        watch: Callable[[int], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        """`ends(step)`: the job ends with that step. `watch(step)` is entered around the script's code."""
        self._model, self._seed, self._ends, self._watch = model, seed, ends, watch
        self._registered: list[Registered] = []
        self._seen: int | None = None  # the step of the previous version

    @classmethod
    def unwatched(cls, model: torch.nn.Module, *, seed: int, steps: int) -> Evaluations:
        """Return evaluations around which nothing is entered."""
        return cls(model, seed=seed, ends=lambda step: step == steps, watch=lambda step: nullcontext())

    def add(self, every: int, evaluation: Evaluation) -> None:
        """Call ``evaluation(step)`` after every `every` steps and after the last. UsageError for less than 1."""
        check_period(every)
        self._registered.append(Registered(every, evaluation))

    @property
    def periods(self) -> list[int]:
        """How often each evaluation is due, in steps."""
        return [one.every for one in self._registered]

    def due_at(self, step: int, before: int) -> list[Registered]:
        """The evaluations due with the version of `step`, whatever this worker has evaluated; `before`: see `due`."""
        ends = self._ends(step)
        return [one for one in self._registered if is_due(one.every, step, before, ends=ends)]

    def coming(self, step: int, before: int) -> bool:
        """True if `due` would return an evaluation. Changes nothing."""
        passed = self._passed(before)
        return any(one.is_due(step, passed, ends=self._ends(step)) for one in self._registered)

    def due(self, step: int, before: int) -> list[Registered]:
        """Return the evaluations due with the version of `step`; `before` is the step of the version before it.

        Call it for every version, also on workers that do not evaluate: any worker may evaluate the next version.
        """
        passed, self._seen = self._passed(before), step
        for one in self._registered:
            one.done = min(one.done, step)  # after a roll-back later versions are computed, and evaluated, again
        return [one for one in self._registered if one.is_due(step, passed, ends=self._ends(step))]

    def passed(self, step: int) -> None:
        """A version came with which none is due: that is known, as its forward pass began early."""
        self.due(step, before=step - 1)

    def _passed(self, before: int) -> int:
        return before if self._seen is None else min(self._seen, before)  # below `_seen` after a roll-back

    def bits(self, due: list[Registered]) -> int:
        """Return these evaluations as a number: bit i stands for the one that was registered as number i."""
        return sum(1 << index for index, one in enumerate(self._registered) if one in due)

    def chosen(self, bits: int) -> list[Registered]:
        """Return the evaluations that `bits` says. Raises UsageError for one that was not registered here."""
        if bits >> len(self._registered):
            raise UsageError(
                "rank 0 of this worker has an evaluation that this rank does not have: write @run.every(...) on all "
                "ranks, outside of `if run.lead:`; the result is that of the first rank that returns one"
            )
        return [one for index, one in enumerate(self._registered) if bits >> index & 1]

    def run(self, due: list[Registered], step: int, agree: Agree = lambda values: values) -> dict[str, float]:
        """Run these evaluations in eval mode without gradients. Returns all their figures.

        `agree` returns the result of all ranks of this worker, given this rank's. Raises UsageError for a result that
        is no dict of numbers.
        """
        figures: dict[str, float] = {}
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            for one in due:
                with torch.no_grad(), seeded(derive_seed(self._seed, "evaluate", step)), self._watch(step):
                    values = one.evaluation(step)
                result = agree(None if values is None else checked_result(values, step))
                figures |= result or {}
            for one in due:
                one.done = step  # not before: an evaluation that is given up is due again, with the very same version
        finally:
            for module, training in modes.items():
                module.training = training
        return figures


class Registered:
    """One evaluation of the script."""

    def __init__(self, every: int, evaluation: Evaluation) -> None:
        self.every, self.evaluation = every, evaluation
        self.done = 0  # the last step at which it ran here

    def is_due(self, step: int, passed: int, *, ends: bool) -> bool:
        return step > self.done and is_due(self.every, step, max(passed, self.done), ends=ends)


def check_period(every: object) -> None:
    """Raise UsageError if `run.every` was not given a positive number of steps."""
    if callable(every):
        raise UsageError("run.every needs a number of steps: write @run.every(100) above the function")
    if not isinstance(every, int) or every < 1:
        raise UsageError(f"run.every({every}): give a positive number of steps")


def checked_result(values: object, step: int) -> dict[str, float]:
    """Return an evaluation's result as floats by name. Raises UsageError when it is no dict of names and numbers."""
    if not isinstance(values, Mapping):
        raise UsageError(
            f"the evaluation at step {step} returned a {type(values).__qualname__}: return a dict of numbers, such as "
            '{"val_loss": 0.5}, or None'
        )
    if why := unnamed(values):
        raise UsageError(f"the evaluation at step {step} returned {why}")
    for name, value in values.items():
        if not isinstance(name, str) or not is_number(value):
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise UsageError(
                f"the evaluation at step {step} returned a {type(value).__qualname__}{shape} as {name!r}: return names "
                "with one number each, such as loss.mean().item()"
            )
    return {name: float(value) for name, value in values.items()}


class EvaluationReports:
    """Tells the coordinator with `send`, and repeats it to the next coordinator. Any thread may call it."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._lock = send, threading.Lock()
        self._registered: Evaluates | None = None
        self._results: deque[Evaluated] = deque(maxlen=_REPEATED)

    @property
    def figures(self) -> dict[str, float]:
        """The last figures that were sent."""
        with self._lock:
            return next((told.values for told in reversed(self._results) if told.values), {})

    def registered(self, periods: Iterable[int], stops: Iterable[StopWhen]) -> None:
        """The script has evaluations with these periods, and these rules by which they end the job."""
        with self._lock:
            self._registered = Evaluates(tuple(periods), tuple(stops))
            self._send(self._registered)

    def evaluated(self, version: int, generation: ViewNumber, figures: Mapping[str, float] | None) -> None:
        """All evaluations that are due with `version` have run, with these figures; None: nobody has that version."""
        with self._lock:
            values = None if figures is None else dict(islice(figures.items(), MOST_METRICS))
            self._results.append(Evaluated(version, generation, values))
            self._send(self._results[-1])

    def repeat(self, *, new: bool) -> None:
        """The coordinator has admitted this worker (again): it may have been sent into a link that was broken already.

        Nothing that a worker did before counts if it is `new`.
        """
        with self._lock:
            for told in [] if self._registered is None else [self._registered]:
                self._send(told)
            for result in [] if new else self._results:
                self._send(result)
