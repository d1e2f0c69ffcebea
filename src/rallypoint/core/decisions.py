"""When evaluations are due, and what is decided from their results: an early end, lower rates, the best version.

Pure: the decisions after a version follow from the rules and from the results of all versions up to it, in order. So a
coordinator that was restarted, a job that went back to a snapshot, and a run that is resumed decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec

from rallypoint.core.typed import FromZero, Name, SettingsType, Share
from rallypoint.core.view import EarlyEnd
from rallypoint.errors import ConfigError

Mode = Literal["min", "max"]
_Evaluations = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32, description="of at least 0")]
MOST_REDUCTIONS = 1000  # of the rates: every view and every manifest has the list


class StopWhen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End the job after an evaluation: see `Run.stop_when`.

    Attributes:
        metric: the figure's name.
        patience: stop after so many evaluations in a row without an improvement; 0: not for that reason.
        min_delta: a change of the best value that is not larger than this is no improvement.
        mode: whether the smallest or the largest value is the best.
        below, above: stop with the first value below, or above, this one; None: not for that reason.
    """

    metric: Name
    patience: _Evaluations = 0
    min_delta: float = 0.0
    mode: Mode = "min"
    below: float | None = None
    above: float | None = None

    @property
    def problem(self) -> str:
        """Why this is no rule, for a sentence; "" if it is one."""
        numbers = [self.min_delta, *(limit for limit in (self.below, self.above) if limit is not None)]
        if not self.patience and len(numbers) == 1:
            return "give patience=3, below=2.0 or above=0.9"
        if self.patience < 0 or self.min_delta < 0 or not all(map(math.isfinite, numbers)):
            return "patience and min_delta must be at least 0, and all of them finite"
        return "" if self.mode in ("min", "max") else f"mode is {self.mode!r}: it must be 'min' or 'max'"

    def why(self, value: float, trend: Trend) -> str:
        """Why the job ends with this value, as a phrase; "" if it goes on."""
        if self.below is not None and value < self.below:
            return f"{self.metric} is {value:.6g}, below {self.below:g}"
        if self.above is not None and value > self.above:
            return f"{self.metric} is {value:.6g}, above {self.above:g}"
        if self.patience and trend.bad >= self.patience:
            better = "lower" if self.mode == "min" else "higher"
            best = "" if trend.best is None else f" than {trend.best:.6g}"
            return f"{self.metric} has not become {better}{best} in {trend.bad} evaluations"
        return ""

    def better(self, value: float, best: float) -> bool:
        """Is the value an improvement?"""
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


class ReduceOnPlateau(msgspec.Struct, metaclass=SettingsType, frozen=True, forbid_unknown_fields=True):
    """Multiply the learning rate by `factor` when `metric` has not improved in more than `patience` evaluations.

    It decides as ``torch.optim.lr_scheduler.ReduceLROnPlateau`` does, whose `step` is called with each result.
    It works on top of the optimizer's schedule: the schedule's rate is reduced as often as it was decided by that step.
    """

    metric: Name
    factor: Share = 0.1
    patience: _Evaluations = 10
    threshold: FromZero = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: _Evaluations = 0
    min_lr: FromZero = 0.0
    eps: FromZero = 1e-8
    mode: Mode = "min"

    def better(self, value: float, best: float) -> bool:
        """Is the value an improvement?"""
        sign = -1.0 if self.mode == "min" else 1.0
        limit = best * (1.0 + sign * self.threshold) if self.threshold_mode == "rel" else best + sign * self.threshold
        return value < limit if self.mode == "min" else value > limit

    def reduced(self, rate: float, times: int) -> float:
        """The rate after `times` reductions."""
        for _ in range(times):
            lower = max(rate * self.factor, self.min_lr)
            if rate - lower > self.eps:
                rate = lower
        return rate


class KeepBest(msgspec.Struct, frozen=True):
    """The snapshot of the version with the best value of `metric` is kept."""

    metric: str
    mode: Mode = "min"

    @property
    def word(self) -> str:
        """Which value is the best."""
        return "lowest" if self.mode == "min" else "highest"

    def better(self, value: float, best: float) -> bool:
        return value < best if self.mode == "min" else value > best


class Rules(msgspec.Struct, frozen=True):
    """The rules of one job."""

    stops: tuple[StopWhen, ...] = ()
    plateau: ReduceOnPlateau | None = None
    best: KeepBest | None = None

    @property
    def steers(self) -> bool:
        """True if there is any."""
        return bool(self.stops) or self.plateau is not None or self.best is not None


class Trend(msgspec.Struct, frozen=True):
    """What one rule knows of its metric: the best value, how many evaluations in a row were no improvement, and how
    many more do not count (the cooldown)."""

    best: float | None = None
    bad: int = 0
    cooldown: int = 0

    def after(self, rule: StopWhen | ReduceOnPlateau, value: float) -> Trend:
        """With one more value. One that is not finite is no improvement."""
        if math.isfinite(value) and (self.best is None or rule.better(value, self.best)):
            return Trend(value, 0, self.cooldown)
        return Trend(self.best, self.bad + 1, self.cooldown)


class Best(msgspec.Struct, frozen=True):
    """The best version so far, its value, and the rule by which it is the best; None: it is not known."""

    version: int
    value: float
    rule: KeepBest | None = None


class Decided(msgspec.Struct, frozen=True):
    """All that is decided from the evaluations of versions up to `version`.

    Attributes:
        trends: what each rule knows, by its text: a rule that a resumed run changes begins anew.
        reductions: the versions from which on the rates are reduced once more, ascending.
        best: the best version; None before the first value.
        stop: the early end; None if there is none.
        before: from `version`, the last one, only the best is decided; all else from versions up to this. None: all.
    """

    version: int = 0
    trends: dict[str, Trend] = {}
    reductions: tuple[int, ...] = ()
    best: Best | None = None
    stop: EarlyEnd | None = None
    before: int | None = None

    def after(self, rules: Rules, version: int, figures: Mapping[str, float], following: int | None) -> Decided:
        """With the result of one more version. `figures` are empty if it has none.

        `following`: the next version that is due by its period; what is decided counts from that one on. None after the
        job's last version, from which nothing but the best is decided: it may not be due in a run with more steps.
        """
        best = self._best(rules.best, version, figures)
        if following is None:
            return msgspec.structs.replace(
                self, version=version, best=best, before=self.version if self.before is None else self.before
            )
        trends, reductions, stop = dict(self.trends), self.reductions, self.stop
        for rule in rules.stops:
            if rule.metric not in figures:
                continue
            value, name = figures[rule.metric], repr(rule)
            trends[name] = trends.get(name, Trend()).after(rule, value)
            if stop is None and (why := rule.why(value, trends[name])):
                stop = EarlyEnd(following, why, "run.stop_when")
        if (plateau := rules.plateau) is not None and plateau.metric in figures:
            trend = trends.get(repr(plateau), Trend()).after(plateau, figures[plateau.metric])
            if trend.cooldown:
                trend = Trend(trend.best, 0, trend.cooldown - 1)
            if trend.bad > plateau.patience:
                trend = Trend(trend.best, 0, plateau.cooldown)
                if len(reductions) < MOST_REDUCTIONS:
                    reductions = (*reductions, following)
            trends[repr(plateau)] = trend
        return Decided(version, trends, reductions, best, stop)

    def going_on(self, version: int) -> Decided:
        """What a run with more steps begins with at `version`. If rules have ended the job there, they begin anew."""
        if self.stop is None or self.stop.version > version:
            return self
        trends = {name: trend for name, trend in self.trends.items() if not name.startswith(StopWhen.__name__)}
        return msgspec.structs.replace(self, stop=None, trends=trends)

    def best_by(self, rule: KeepBest) -> Best | None:
        """The best version by this rule. One by another rule, which a resumed run has changed, does not count."""
        return self.best if self.best is not None and self.best.rule in (None, rule) else None

    def _best(self, rule: KeepBest | None, version: int, figures: Mapping[str, float]) -> Best | None:
        value = math.nan if rule is None else figures.get(rule.metric, math.nan)
        best = self.best if rule is None else self.best_by(rule)
        if rule is None or not math.isfinite(value):
            return best
        return Best(version, value, rule) if best is None or rule.better(value, best.value) else best


def is_due(every: int, step: int, before: int, *, ends: bool) -> bool:
    """True if an evaluation with the period `every` (steps) is due with the version of `step`.

    `before` is the step of the version before it; `ends`: the job ends with this one. Examples, with ``every=10``: due
    at 10 after 9, at 12 after 8, at 7 if the job ends there; never at 0.
    """
    return step > 0 and (ends or step // every > before // every)


def reductions_at(reductions: Iterable[int], version: int) -> int:
    """How often the rate is reduced for the update of that version."""
    return sum(first <= version for first in reductions)


def checked(rule: StopWhen) -> StopWhen:
    """Return the rule. Raises ConfigError if it is none."""
    if rule.problem:
        raise ConfigError(f"run.stop_when({rule.metric!r}): {rule.problem}")
    return rule
