"""What failures cost: how often to take snapshots, and how much of the time is left for training.

All times are in seconds; `mtbf` is the mean time between failures of the whole job, that is of one machine's divided by
their number, as long as failures are independent.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

NEVER = math.inf


def daly_period(cost: float, mtbf: float) -> float:
    """Seconds between two snapshots, each of which takes `cost` from training: Daly, 2006, equation 37.

    Its first order is sqrt(2 cost M) (Young, 1974). M itself where a snapshot costs 2 M or more.
    """
    if mtbf == NEVER:
        return NEVER
    if cost >= 2 * mtbf:
        return mtbf
    part = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - cost


def goodput(period: float, cost: float, restart: float, mtbf: float) -> float:
    """The share of the time that trains, of a job that goes back to its last snapshot at each failure.

    Daly, 2006, equation 20: failures are a Poisson process, and also strike while a snapshot is taken and while the job
    starts again (`restart`).
    """
    if mtbf == NEVER:
        return 1.0 if period == NEVER else period / (period + cost)
    if period == NEVER:
        return 0.0
    exponent = (period + cost) / mtbf
    if exponent + restart / mtbf > 700.0:
        return 0.0  # e to that is more than a float holds
    return period / (mtbf * math.exp(restart / mtbf) * math.expm1(exponent))


def elastic_goodput(stall: float, mtbf: float) -> float:
    """The share of the time that trains, of a job that loses `stall` seconds at each failure and goes back nowhere."""
    return 1.0 if mtbf == NEVER else mtbf / (mtbf + stall)


# How often to take snapshots, where the user has not said it (`tune="auto"`): from what they cost and what fails.
#
# The rule is Daly's (`core.plan.failures`). Its two figures are measured while the job runs::
#
#     cost     the time that the steps beside a snapshot take longer than usual ones: the median of the last snapshots'
#     M        the mean time between losses of the state, which take the job back to a snapshot: the time so far by
#              their number, as if before it there had been one more in an hour

PRIOR_S = 3600.0  # with one loss in it: what is assumed before any was seen
SHORTEST_S, LONGEST_S = 10.0, 3600.0
SNAPSHOTS = 3  # whose cost is known before anything is changed
_LEAST_COST_S = 1e-3  # what is less cannot be told from nothing
_CHANGED = 1.25  # a period that differs by less stays
_USUAL, _LAST = 64, 8  # steps, snapshots


@dataclass(slots=True)
class TunedPeriod:
    """Measures, and chooses a period.

    Attributes:
        seconds: the period; 0: none is chosen yet.
        losses: how often the job went back to a snapshot.
    """

    seconds: float = 0.0
    losses: int = 0
    _began: float | None = None
    _last: tuple[int, float] | None = None  # the highest step, and when it was reached
    _beside: bool = False  # a snapshot has been under way in this step
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL))
    _slower: list[float] = field(default_factory=list)  # seconds of the steps beside the snapshot under way
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def went_back(self) -> None:
        """The state was lost, and the job goes on from a snapshot. What the steps until then took is not known."""
        self.losses += 1
        self._last, self._beside = None, False
        self._slower.clear()

    def look(self, step: int, now: float, *, taking: bool) -> str:
        """The job is at `step`, the highest so far; `taking`: a snapshot is under way. Returns a sentence if the period
        changes, else ""."""
        self._began = now if self._began is None else self._began
        self._beside = self._beside or taking
        if self._last is not None and step <= self._last[0]:
            return ""
        if self._last is not None and step == self._last[0] + 1:
            (self._slower if self._beside else self._usual).append(now - self._last[1])
        self._last, self._beside = (step, now), taking
        if taking or not self._slower or len(self._usual) < _LAST:
            return ""
        usual = median(self._usual)
        self._costs.append(sum(max(0.0, seconds - usual) for seconds in self._slower))
        self._slower.clear()
        return self._choose(now - self._began)

    def _choose(self, age: float) -> str:
        """Choose the period after a snapshot, `age` seconds after the first step that was seen."""
        if len(self._costs) < SNAPSHOTS:
            return ""
        cost, between = max(_LEAST_COST_S, median(self._costs)), (PRIOR_S + age) / (1 + self.losses)
        found = min(LONGEST_S, max(SHORTEST_S, daly_period(cost, between)))
        if self.seconds and self.seconds / _CHANGED < found < self.seconds * _CHANGED:
            return ""
        self.seconds = found
        times = "never" if not self.losses else f"{self.losses} time{'s' * (self.losses != 1)}"
        return (
            f"a snapshot is due every {found:.3g} s from now on (Daly): one costs {cost:.2g} s, and the state was lost "
            f"{times} in {age:.0f} s, so every {between:.0f} s is assumed"
        )
