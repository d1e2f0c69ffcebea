"""The planner's answer as a picture, by matplotlib (the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rallypoint.core.cost.candidates import Candidate
from rallypoint.core.cost.verdict import called
from rallypoint.errors import UsageError, to_install

_KINDS = (".png", ".svg", ".pdf")
_COMPUTING, _WAITING = "#4c78a8", "#f2a45c"


def check_chart(path: Path) -> None:
    """UsageError if matplotlib is not installed, `path` has no ending that it knows, or its folder does not exist."""
    if path.suffix not in _KINDS:
        raise UsageError(f"--plot {path}: name a file that ends with {', '.join(_KINDS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}; make it first")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError(f"--plot needs matplotlib: {to_install('plots')}") from None


def draw(candidates: Sequence[Candidate], title: str, path: Path) -> None:
    """Draw a bar for each candidate, the first one at the top: computing, and waiting. UsageError if it cannot be
    written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.32 * len(candidates)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [called(one) for one in candidates]
    places = list(range(len(candidates)))
    busy = [one.step.seconds - one.step.waited for one in candidates]
    axes.barh(places, busy, color=_COMPUTING, label="computing")
    axes.barh(places, [one.step.waited for one in candidates], left=busy, color=_WAITING, label="waiting")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step, when nothing fails")
    axes.set_title(title, fontsize="medium")
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
