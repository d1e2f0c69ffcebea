"""A run in the terminal: what the page shows, as far as a screen of text can. Whatever its log says is `printable`."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from rallypoint.core.typed import LONGEST_TEXT, printable
from rallypoint.watch.follow import Follower
from rallypoint.watch.state import RunState, Series, differing

_BLOCKS = "▁▂▃▄▅▆▇█"
_EVERY_S = 0.5
_SENTENCES, _LATE, _HOSTS = 6, 5, 8
_VARIES = re.compile(r"\([^)]*\)|\b\d[\d.]*\b")  # what differs between two sentences of one sort; not worker0
_NOISE = 1e-9  # of a value: what sums of equal ones differ by
_COLOURS = {
    "computing": "cyan", "standby": "yellow", "server": "green", "aggregator": "magenta", "gone": "bright_black",
}  # fmt: skip


def top(folders: Mapping[str, Path], settings: Mapping[str, Mapping[str, str]], console: Console) -> None:
    """Show the run in a folder, or compare several, until Ctrl-C; once where the console is no terminal.

    Raises UsageError if there is no log.
    """
    followers, left_out = {name: Follower(folder) for name, folder in folders.items()}, 0

    def look() -> RenderableType:
        nonlocal left_out
        for follower in followers.values():
            follower.look()
        runs = {name: follower.run for name, follower in followers.items()}
        if len(runs) > 1:
            return compared(runs, settings, console.width)
        ((name, run),) = runs.items()
        left_out = max(0, left_out - 1)  # there may be more room than before
        while True:
            view = shown(run, name, console.width, left_out)
            fits = not console.is_terminal or len(console.render_lines(view, pad=False)) <= console.height
            if fits or left_out > len(run.curves) + len(run.evaluations):
                return view
            left_out += 1

    if not console.is_terminal:
        console.print(look())
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(look(), refresh=True)
            time.sleep(_EVERY_S)


def compared(runs: Mapping[str, RunState], settings: Mapping[str, Mapping[str, str]], width: int) -> RenderableType:
    """The settings that differ, and the curves of the losses on one scale of steps and values."""
    differ = differing(settings)
    table = Table.grid(*(Column(overflow="fold") for _ in ("", *runs)), padding=(0, 2))
    table.add_row("" if any(differ.values()) else "no settings differ", *map(_text, runs))
    for setting in differ[next(iter(runs))]:
        table.add_row(_text(setting), *(_text(differ[name][setting]) for name in runs))
    losses = {name: run.curves["loss"] for name, run in runs.items() if "loss" in run.curves}
    values, last = [value for curve in losses.values() for value in curve.means], max(run.step for run in runs.values())
    widths = {name: max(width // 2, width * runs[name].step // max(1, last)) for name in losses}
    curves = [_curve(f"loss of {name}", curve, widths[name], values) for name, curve in losses.items() if curve.points]
    return Group(*(_head(run, name) for name, run in runs.items()), *curves, table)


def shown(run: RunState, name: str, width: int, left_out: int = 0) -> RenderableType:
    """The run as it is now, in `width` characters. `left_out`: machines, curves but the first, at last most times."""
    half = max(20, width // 2 - 4)
    curves = [_curve(name, curve, half) for name, curve in {**run.curves, **run.evaluations}.items() if curve.points]
    short = left_out > 0 and left_out >= len(curves)
    del curves[max(1, len(curves) - left_out) :]
    return Group(
        _head(run, name), *([_happened(run, 3 if left_out else _SENTENCES)] if run.sentences or run.marks else []),
        *([Columns(curves, equal=True, width=half)] if curves else []),
        Columns([_times(run, half, short=short), _members(run, half)], equal=True, width=half),
        *([_machines(run)] if run.machines.hosts and not left_out else []),
    )  # fmt: skip


def _head(run: RunState, name: str) -> RenderableType:
    steps = 0 if run.plan is None else run.plan.steps
    state = run.ended or ("running" if run.plan is not None else "waiting for members")
    told = Text.assemble(
        (printable(name), "bold"), "  ", (state, "bold red" if state == "failed" else "bold"),
        f"  {run.sums:,} sums" if run.of_sums else f"  step {run.step:,}{f' of {steps:,}' if steps else ''}",
    )  # fmt: skip
    p50 = run.times.quantile(0.5)
    if run.plan is not None and steps and p50 and not run.ended:
        rate, left = run.plan.items / p50, (steps - run.step) * p50
        told.append(f"  {rate:,.0f} {printable(run.plan.item)}/s  {_seconds(left)} left")
    if run.why:
        told.append(f"\n{printable(run.why, LONGEST_TEXT)}", "red" if run.ended == "failed" else "")
    return Group(told, Padding(ProgressBar(total=max(1, steps), completed=run.step), 0))


def _curve(name: str, curve: Series, width: int, scale: Sequence[float] = ()) -> RenderableType:
    values = curve.means
    text = Text(spark(values, width - 4, scale), style="cyan")
    told = f"now {values[-1]:.4g}, {min(values):.4g} to {max(values):.4g}"
    return Panel(Group(text, told), title=_text(name), title_align="left", width=width)


def spark(values: list[float], width: int, scale: Sequence[float] = ()) -> str:
    """The values as one line of blocks from the lowest to the highest (of `scale`), of several beyond `width` the mean.

    Returns "" if their range is not finite: of 1e308 and -1e308, for example.
    """
    share = max(1.0, len(values) / width)
    bounds = [round(number * share) for number in range(min(width, len(values)) + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds) if b > a]
    low, high = min(scale or means), max(scale or means)
    if not math.isfinite(high - low):
        return ""
    block = (len(_BLOCKS) - 1) / (high - low) if high - low > _NOISE * max(abs(low), abs(high)) else 0.0
    return "".join(_BLOCKS[round((value - low) * block)] for value in means)


def _times(run: RunState, width: int, *, short: bool) -> RenderableType:
    times = run.times
    table = Table.grid(padding=(0, 2))
    table.add_row("p50 of a step", _seconds(times.quantile(0.5)))
    table.add_row("p99", _seconds(times.quantile(0.99)))
    table.add_row("goodput", f"{times.goodput:.1%}")
    if short:
        return Panel(table, title="time", title_align="left", width=width)
    if times.stalls:
        seconds, step, cause = times.longest
        table.add_row("longest stall", _text(f"{_seconds(seconds)} at step {step}: {cause}"))
    for cause, lost in times.lost.most_common():
        table.add_row(_text(f"lost to {cause}"), _seconds(lost))
    if run.snapshots:
        newest = run.snapshots[-1]
        table.add_row("newest snapshot", f"version {newest['version']}, {newest['nbytes'] / 1e6:.1f} MB")
    for worker, late in sorted(run.late.items(), key=lambda one: -one[1])[:_LATE]:
        table.add_row(_text(worker), f"{_seconds(late)} behind the first")
    return Panel(table, title="time", title_align="left", width=width)


def _members(run: RunState, width: int) -> RenderableType:
    now = {member: spans[-1][1] for member, spans in run.members.spans.items()}
    table = Table.grid(padding=(0, 2))
    for state, count in Counter(now.values()).most_common():
        names = [str(row["id"]) for row in run.members.rows() if now[str(row["id"])] == state]
        more = f", and {count - 8} more" if count > 8 else ""
        shown = Text("left" if state == "gone" else state, _COLOURS.get(state, ""))
        table.add_row(shown, str(count), _text(", ".join(names[:8]) + more))
    return Panel(table, title="members", title_align="left", width=width)


def _machines(run: RunState) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    told = run.machines.told()
    for host in told["hosts"][:_HOSTS]:
        shares = f"{spark(host['cpu'], 20)} {host['cpu'][-1]} %", f"memory {host['memory'][-1]} %"
        table.add_row(_text(host["name"]), *shares, f"waited for data {host['waited']:.0%}")
    if (more := told["more"] + len(told["hosts"]) - _HOSTS) > 0:
        table.add_row(f"and {more} more")
    return Panel(table, title="machines", title_align="left")


def _happened(run: RunState, most: int) -> RenderableType:
    """The newest of what matters: deaths, joins, roll-backs, waits. Advice fills up; what repeats is one line."""
    gone = {f"without {one['text'].partition(' is gone: ')[0]}" for one in run.sentences}  # said with the reason
    lines: dict[str, tuple[bool, float, str, int]] = {}
    for one in sorted([*run.sentences, *run.marks], key=lambda one: float(one["t"])):
        text, kind = str(one["text"]), one.get("kind", "")
        if kind == "loss" and text in gone:
            continue
        first = text.partition(" ")[0].strip(":,")
        matters = kind not in ("", "skip") or first in run.members.spans or one.get("step", 0) > 0
        sort = _VARIES.sub("", text)
        again = sort in lines and lines[sort][2] == text  # else it has other numbers: the newest counts
        lines[sort] = matters, float(one["t"]), text, lines[sort][3] + 1 if again else 1
    table = Table.grid(padding=(0, 2))
    for _, t, text, times in sorted(sorted(lines.values())[-most:], key=lambda line: line[1]):
        table.add_row(Text(_seconds(t), "dim"), _text(text + (f" ({times} times)" if times > 1 else "")))
    return Panel(table, title="what happened", title_align="left")


def _text(said: str) -> Text:
    return Text(printable(said, LONGEST_TEXT))


def _seconds(s: float) -> str:
    if s >= 3600:
        return f"{s // 3600:.0f} h {s % 3600 // 60:.0f} min"
    if s >= 60:
        return f"{s // 60:.0f} min {s % 60:.0f} s"
    return f"{s:.1f} s" if s >= 1 else f"{1e3 * s:.0f} ms"
