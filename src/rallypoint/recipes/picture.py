"""The picture at the end of a recipe: losses by step, validations, and images that were made.

It is drawn by matplotlib (the extra ``plots``), from what the run's log has recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rallypoint.errors import DataError, to_install
from rallypoint.recipes.chart import chart
from rallypoint.watch.follow import recorded_losses, rows_of
from rallypoint.watch.state import EVALUATION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "picture.png"
_LEAST = 2  # steps: fewer make no curve
_COLORS = ("#4c78a8", "#b279a2")
_OTHER = "#f2a45c"
_SHOWN = 8  # images


def save_picture(log: Path, folder: Path, *, curves: Sequence[str] = ("loss",), images: Tensor | None = None) -> str:
    """Draw the run whose folder is `log` into `folder`/picture.png. Returns what to print: the losses in characters,
    and a sentence.

    `curves`: what the steps update in turn, each a curve of its own: ("discriminator", "generator").
    `images`: [n, 1, height, width] in [0, 1]; the first eight are shown.
    """
    try:
        losses, measured = recorded_losses(log), _measured(log)
    except (DataError, OSError):
        return "no picture: only a run under `rallypoint train` or `rallypoint run` has a log of its losses"
    if len(losses) < _LEAST:
        return "no picture: the log has too few steps"
    drawn = [
        line for name, part in _parted(losses, curves).items() if len(part) >= _LEAST
        for line in ["", f"{name}:", *chart(part)]
    ]  # fmt: skip
    return "\n".join([*drawn, _saved(losses, measured, curves, images, folder / NAME)])


def _saved(
    losses: dict[int, float], measured: dict[str, dict[int, float]], curves: Sequence[str], images: Tensor | None,
    path: Path,
) -> str:  # fmt: skip
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        return f"for a picture of the losses: {to_install('plots')}"
    try:
        _figure(losses, measured, curves, images).savefig(path, dpi=110)
    except OSError as error:
        return f"the picture {path} cannot be written: {error.strerror}"
    return f"a picture of the losses: {path}"


def _parted(losses: dict[int, float], curves: Sequence[str]) -> dict[str, dict[int, float]]:
    """The finite losses of each of `curves`, which steps update in turn."""
    return {
        name: {step: loss for step, loss in losses.items() if step % len(curves) == place and math.isfinite(loss)}
        for place, name in enumerate(curves)
    }


def _figure(
    losses: dict[int, float], measured: dict[str, dict[int, float]], curves: Sequence[str], images: Tensor | None
) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2 if images is None else 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.add_gridspec(2, _SHOWN, height_ratios=(4, 0.001 if images is None else 1))
    axes = figure.add_subplot(grid[0, :])
    for number, (name, part) in enumerate(_parted(losses, curves).items()):
        axes.plot(list(part), list(part.values()), color=_COLORS[number % 2], label=name, linewidth=0.9)
    for name, values in measured.items():
        axes.plot(list(values), list(values.values()), "o-", color=_OTHER, label=name, markersize=3)
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    for number, image in enumerate(images[:_SHOWN, 0] if images is not None else ()):
        one = figure.add_subplot(grid[1, number])
        one.imshow(image.clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1)
        one.axis("off")
    return figure


def _measured(log: Path) -> dict[str, dict[int, float]]:
    """The results of evaluations, by name and step."""
    found: dict[str, dict[int, float]] = {}
    for run in rows_of(log):
        step, figures = run.row or (0, {})
        for name in figures:
            if name.startswith(EVALUATION):
                found.setdefault(name.removeprefix(EVALUATION), {})[step] = figures[name]
    return {name: dict(sorted(values.items())) for name, values in found.items()}
