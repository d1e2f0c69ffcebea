"""What is tuned while a job runs: the table of knobs, and for each the values that are worth a trial.

A new knob is a function here and a line in `KNOBS`: the trials (`tuner.py`) and the way of a value through views to
every process (`View.setting`) are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rallypoint.core.cost.site import PACED

# Of the rate that steps reach now. A link can carry that much, and at most a few times more: steps also compute, and
# flows that share a port are not equally fast. A tenth apart: one of them is at most a tenth too low.
_ABOVE = (1.08, 1.18, 1.29, 1.4, 1.53, 1.68, 1.85, 2.1)
_BELOW = (PACED, 0.93, 0.88)  # of what a link carries, where that was told

# Milliseconds of a link's rate that may be on their way to it; the likeliest first. With less a sender waits for
# acknowledgements, with more the queue of the port overflows (docs/performance.md: 8 ms at 200 Mbit/s).
_AHEAD_MS = (10.0, 20.0, 5.0, 40.0)
_FULL = 1.25  # a link's rate in terms of what steps reach, where it was not told
_LEAST_SHARE = 16 << 10  # bytes of each link, as in `net.transport`: less is the same


class Facts(NamedTuple):
    """What the candidates follow from.

    Attributes:
        nbytes: of the parameters, which each worker sends and gets in a step.
        workers: that compute.
        servers: that have shards.
        seconds: of a step now.
        told_mbit: what the slowest link of them carries, as it was told; 0: it was not.
    """

    nbytes: int
    workers: int
    servers: int
    seconds: float
    told_mbit: float = 0.0

    @property
    def reached_mbit(self) -> float:
        """What steps make of the busiest links now. A server sends all of its shards to every worker, so with fewer
        servers than workers theirs are the busiest."""
        return self.nbytes * max(1.0, self.workers / max(1, self.servers)) * 8e-6 / self.seconds


@dataclass(frozen=True, slots=True)
class Knob:
    """What is tuned.

    Attributes:
        name: for the log, as in the configuration.
        unit: of its values, for the log.
        start: its value at the beginning; 0: as without it.
        candidates: the values to try, without `start`, in this order.
        per_unit: a value is so many of `unit`.
        rising: candidates ascend, and beyond one that changes nothing all others change nothing either.
    """

    name: str
    unit: str
    start: float
    candidates: tuple[float, ...]
    per_unit: float = 1.0
    rising: bool = False

    def phrase(self, value: float) -> str:
        """The value as the log names it. Example: ``pace_mbit 190 Mbit/s``; ``no pace_mbit`` for 0."""
        return f"{self.name} {value / self.per_unit:.4g} {self.unit}" if value else f"no {self.name}"


def pace_knob(start: float, facts: Facts) -> Knob:
    """Return the knob `pace_mbit`. Paces below what steps need now cannot help, so none is tried."""
    if facts.told_mbit:
        found = sorted(float(f"{facts.told_mbit * part:.3g}") for part in _BELOW)
    else:
        found = [float(f"{facts.reached_mbit * factor:.3g}") for factor in _ABOVE]
    return Knob("pace_mbit", "Mbit/s", start, _tried(start, found), rising=True)


def in_flight_knob(start: float, facts: Facts) -> Knob:
    """Return the knob `in_flight_bytes`. Values are powers of two: a factor of two is as near as it need be."""
    rate = (facts.told_mbit or facts.reached_mbit * _FULL) * 1e6 / 8
    least = _LEAST_SHARE * max(facts.workers, facts.servers)
    found = [max(least, 2.0 ** round(math.log2(rate * ahead / 1e3))) for ahead in _AHEAD_MS]
    return Knob("in_flight_bytes", "KiB", start, _tried(start, found), per_unit=1024.0)


# In the order in which they are tuned: what may be on its way gains more, and with it a pace may gain nothing.
KNOBS: Mapping[str, Callable[[float, Facts], Knob]] = {"in_flight_bytes": in_flight_knob, "pace_mbit": pace_knob}


def _tried(start: float, found: list[float]) -> tuple[float, ...]:
    """Each value once, without the one in force; and "none", where that is not in force.

    Floats, as they are in every member's view: a whole number has other bytes, and so another digest.
    """
    return tuple(dict.fromkeys(float(value) for value in ([0.0, *found] if start else found) if value != start))
