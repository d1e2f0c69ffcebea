"""A knob: what is tuned, and the values that are worth a trial."""

from __future__ import annotations

from dataclasses import dataclass

# Of the rate that steps reach now. A link can carry that much, and at most a few times more: steps also compute, and
# flows that share a port are not equally fast. A tenth apart: one of them is at most a tenth too low.
_ABOVE = (1.08, 1.18, 1.29, 1.4, 1.53, 1.68, 1.85, 2.1)


@dataclass(frozen=True, slots=True)
class Knob:
    """What is tuned.

    Attributes:
        name: for the log, as in the configuration.
        unit: of its values, for the log.
        start: its value at the beginning; 0: as without it.
        candidates: the values to try, without `start`.
    """

    name: str
    unit: str
    start: float
    candidates: tuple[float, ...]

    def phrase(self, value: float) -> str:
        """The value as the log names it. Example: ``pace_mbit 190 Mbit/s``; ``no pace_mbit`` for 0."""
        return f"{self.name} {value:.4g} {self.unit}" if value else f"no {self.name}"


def pace_knob(start: float, nbytes: int, workers: int, servers: int, seconds: float) -> Knob:
    """Return the knob `pace_mbit` for a job whose steps take `seconds` now.

    `nbytes` are those of the parameters, which each worker sends and gets in a step. A server sends all of its shards
    to every worker, so with fewer servers than workers theirs are the busiest links. Paces below what steps need now
    cannot help, so none is tried.
    """
    busiest = nbytes * max(1.0, workers / max(1, servers))
    rate = busiest * 8e-6 / seconds
    found = tuple(float(f"{rate * factor:.3g}") for factor in _ABOVE)
    none = (0.0,) if start else ()
    return Knob("pace_mbit", "Mbit/s", start, (*none, *(pace for pace in found if pace != start)))
