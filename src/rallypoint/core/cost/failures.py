"""What failures cost: how often to take snapshots, and how much of the time is left for training.

All times are in seconds; `mtbf` is the mean time between failures of the whole job, that is of one machine's divided by
their number, as long as failures are independent.
"""

from __future__ import annotations

import math

NEVER = math.inf


def young_period(cost: float, mtbf: float) -> float:
    """Seconds between two snapshots, each of which takes `cost` from training: sqrt(2 cost M). Young, 1974.

    Assumes that the cost is small beside M, and that a failure costs half a period on average.
    """
    return math.sqrt(2 * cost * mtbf) if mtbf < NEVER else NEVER


def daly_period(cost: float, mtbf: float) -> float:
    """The same to a higher order: Daly, 2006, equation 37. M itself where a snapshot costs 2 M or more."""
    if mtbf == NEVER:
        return NEVER
    if cost >= 2 * mtbf:
        return mtbf
    part = cost / (2 * mtbf)
    return young_period(cost, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - cost


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
