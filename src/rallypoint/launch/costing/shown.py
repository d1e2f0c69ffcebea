"""The planner's answer: for people a table, a sentence and a picture (extra ``plots``), for programs JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rallypoint.core.plan.candidates import Candidate
from rallypoint.core.plan.failures import NEVER
from rallypoint.core.plan.verdict import Verdict, called
from rallypoint.errors import UsageError, to_install
from rallypoint.launch.costing.measured import MeasuredRun
from rallypoint.launch.costing.question import Question

_KINDS = (".png", ".svg", ".pdf")
_COMPUTING, _WAITING = "#4c78a8", "#f2a45c"
_LAYOUT_WIDTH, _ROWS = 22, 12
ASSUMED = (
    "assumed: fp32 gradients and parameters with AdamW, links that nobody else uses, a core for each server, a standby "
    "for each machine that fails"
)


def told(question: Question, candidates: Sequence[Candidate], verdict: Verdict) -> RenderableType:
    """What is printed."""
    failing = question.machines.mtbf < NEVER
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, highlight=False)
    table.add_column("layout", min_width=_LAYOUT_WIDTH)
    for name in ("s/step", "waits", *(["goodput"] if failing else []), "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in shown(candidates, verdict):
        memory = one.memory
        table.add_row(
            called(one), f"{one.step.seconds:.3g}", f"{one.step.waited / one.step.seconds:.0%}",
            *([f"{one.goodput:.1%}"] if failing else []),
            f"{'' if one.fits else '! '}{_gb(memory.device)}/{_gb(memory.host)}/{_gb(memory.server)}",
            style="bold" if one is verdict.best else "",
        )  # fmt: skip
    notes = ["GB: of a GPU, of its host for it, of a server; waits: the part of a step in which a GPU computes nothing"]
    notes += question.notes
    if not all(one.fits for one in candidates):
        notes.append("! does not fit into a GPU's memory")
    lines = [Text(f"{_sentence(note)}", style="dim") for note in (*notes, ASSUMED)]
    return Group(Text(_title(question)), table, *lines, Text(f"\n{_sentence(verdict.why)}", style="bold"))


def shown(candidates: Sequence[Candidate], verdict: Verdict) -> list[Candidate]:
    """The rows of the table, the quickest first: DDP and FSDP always, and what is recommended."""
    ranked = sorted(candidates, key=lambda one: (one.seconds, one.servers))
    kept = ranked[:_ROWS]
    return [one for one in ranked if one in kept or not one.ours or one is verdict.best]


def compared(run: MeasuredRun, seconds: float) -> str:
    """A note on how the model's figure for the run's own layout compares with the measured one."""
    if not run.step:
        return f"the run {run.name} has done too few steps to compare with"
    links = "on such links the model says" if run.busiest else "on one machine; on such links the model says"
    return (
        f"in {run.name} with {run.workers} workers and {run.servers} servers a step took {run.step:.3g} s, of which a "
        f"replica computed {run.computed:.3g}, {links} {seconds:.3g} ({seconds / run.step - 1:+.0%})"
    )


def as_json(question: Question, candidates: Sequence[Candidate], verdict: Verdict) -> bytes:
    """All candidates, the verdict and the notes; a time that is infinite is null."""
    told: dict[str, Any] = {
        "recommendation": _sentence(verdict.why), "servers": verdict.ours, "notes": question.notes,
        "best": _fields(verdict.best), "other": None if verdict.other is None else _fields(verdict.other),
        "layouts": [_fields(one) for one in candidates],
    }  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(told), indent=2)


def _fields(one: Candidate) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(one)
    seconds = None if math.isinf(one.seconds) else one.seconds
    return {**fields, "period": None if one.period == NEVER else one.period, "seconds": seconds}


def _title(question: Question) -> str:
    work, machines = question.workload, question.machines
    gpus = "1 GPU" if machines.gpus == 1 else f"{machines.gpus} GPUs"
    hosts = "" if machines.per_host == 1 else " on 1 host" if machines.hosts == 1 else f" on {machines.hosts} hosts"
    each = "" if question.replicas == 1 else f", {question.replicas} replicas each"
    rounds = "" if work.steps == 1 else f", synchronised every {work.steps} steps"
    return (
        f"{_short(work.words).replace('G', 'B')} parameters (K = {_short(work.nbytes)}B), {gpus}{hosts}{each}, "
        f"computing {work.compute * question.replicas:.3g} s a step{rounds}; "
        f"{_short(machines.rate * 8)}bit/s: K/B = {work.nbytes / machines.rate:.3g} s"
    )


def _short(number: float) -> str:
    """``7 G`` for 7e9, as units follow it."""
    for unit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g} {prefix}"
    return f"{number:.3g} "


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g}" if 0 < nbytes < 1e9 else f"{nbytes / 1e9:.3g}" if nbytes else "-"


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
