"""The picture at the end of a recipe: losses by step, and validations.

It is drawn by matplotlib (the extra ``plots``), from what the run's log has recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rallypoint.errors import DataError, to_install
from rallypoint.launch.replaying.losses import recorded_losses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "picture.png"
ROWS, COLUMNS = 6, 60  # of the curve in characters
_LEAST = 2  # steps: fewer make no curve
_COLOR, _OTHER = "#4c78a8", "#f2a45c"


def save_picture(run: Path) -> str:
    """Draw the run in this folder into its picture.png. Returns what to print: the losses in characters, and a
    sentence.
    """
    try:
        losses, measured = recorded_losses(run), _measured(run)
    except (DataError, OSError):
        return "no picture: only a run under `rallypoint train` or `rallypoint run` has a log of its losses"
    if len(losses) < _LEAST:
        return "no picture: the log has too few steps"
    return "\n".join(["", "loss:", *chart(losses), _saved(losses, measured, run / NAME)])


def _saved(losses: dict[int, float], measured: dict[str, dict[int, float]], path: Path) -> str:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        return f"for a picture of the losses: {to_install('plots')}"
    try:
        _figure(losses, measured).savefig(path, dpi=110)
    except OSError as error:
        return f"the picture {path} cannot be written: {error.strerror}"
    return f"a picture of the losses: {path}"


def _figure(losses: dict[int, float], measured: dict[str, dict[int, float]]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    axes.plot(list(finite), list(finite.values()), color=_COLOR, label="loss", linewidth=0.9)
    for name, values in measured.items():
        axes.plot(list(values), list(values.values()), "o-", color=_OTHER, label=name, markersize=3)
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _measured(log: Path) -> dict[str, dict[int, float]]:
    """The results of evaluations, by name and step."""
    found: dict[str, dict[int, float]] = {}
    with open(log / "events.jsonl", "rb") as lines:
        for line in lines:
            if b'"Metrics"' not in line:
                continue
            try:
                event = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue  # a line that was torn
            for name, value in event.get("values", {}).items():
                found.setdefault(name, {})[int(event["step"])] = math.nan if value is None else float(value)
    return {name: dict(sorted(values.items())) for name, values in found.items()}


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
