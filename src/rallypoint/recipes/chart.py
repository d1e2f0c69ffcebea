"""A curve in characters, for a terminal: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

ROWS, COLUMNS = 6, 60


def chart(values: Mapping[int, float], *, rows: int = ROWS, columns: int = COLUMNS) -> list[str]:
    """Return lines of characters for values by step: each column is the mean of its steps, the highest at the top.

    Values that are not finite are left out; no lines if there are no others.
    """
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    if not finite:
        return []
    means = _means([finite[step] for step in sorted(finite)], columns)
    low, high = min(means), max(means)
    places = [round((high - mean) / ((high - low) or 1.0) * (rows - 1)) for mean in means]
    labels = {0: f"{high:.3g}", rows - 1: f"{low:.3g}"}
    width = max(len(label) for label in labels.values())
    drawn = [
        f"{labels.get(row, ''):>{width}} |{''.join('*' if place == row else ' ' for place in places).rstrip()}"
        for row in range(rows)
    ]
    first, last = str(min(finite)), str(max(finite))
    gap = " " * max(1, len(means) - len(first) - len(last))
    return [*drawn, f"{'':>{width}}  {first}{gap}{last} (step)"]


def _means(values: list[float], most: int) -> list[float]:
    """Return the means of at most so many parts of `values`, which are equally long up to one."""
    count = min(most, len(values))
    cuts = [number * len(values) // count for number in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
