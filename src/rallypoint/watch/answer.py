"""What the page is sent: first everything, then only what has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rallypoint.watch.series import Series
from rallypoint.watch.state import RunState


@dataclass(slots=True)
class Reader:
    """What one page knows already. `news` is made for it alone."""

    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)  # curve -> its revision, and its last point's step
    _lists: dict[str, object] = field(default_factory=dict)  # part -> what it was made from
    _revision: int = -1

    @property
    def began(self) -> bool:
        """True if this page knows something already."""
        return self._revision >= 0

    def news(self, run: RunState) -> dict[str, Any] | None:
        """What has changed since the last call, for JSON; None if nothing has."""
        if run.revision == self._revision:
            return None
        self._revision = run.revision
        said: dict[str, Any] = {
            "now": round(run.now, 2),
            "step": run.step,
            "sums": run.sums,
            "again": run.again,
            "ended": run.ended,
            "why": run.why,
            "late": _late(run),
            "times": _times(run),
            "skipped": run.skipped,
            "stalled": run.stalled,
            "ledger": _ledger(run),
        }
        for part, curves in (("curves", run.curves), ("evaluations", run.evaluations)):
            said[part] = self._curves(part, curves)
        plan = None if run.plan is None else msgspec.to_builtins(run.plan)
        marked = len(run.marks), run.marks[-1] if run.marks else None
        told = len(run.sentences), run.sentences[-1] if run.sentences else None
        stored = len(run.snapshots), run.snapshots[-1] if run.snapshots else None
        self._part(said, "plan", plan, lambda: plan)
        self._part(said, "members", run.members.revision, run.members.rows)
        self._part(said, "machines", run.machines.revision, run.machines.told)
        self._part(said, "marks", marked, lambda: list(run.marks))
        self._part(said, "sentences", told, lambda: list(run.sentences))
        self._part(said, "snapshots", stored, lambda: list(run.snapshots))
        return said

    def _part(self, said: dict[str, Any], name: str, made_from: object, make: Any) -> None:
        if name not in self._lists or self._lists[name] != made_from:
            self._lists[name] = made_from
            said[name] = make()

    def _curves(self, part: str, curves: Mapping[str, Series]) -> dict[str, Any]:
        """For each curve that has changed its points, from step `from` on: the page drops what it has from there on."""
        changed = {}
        for name, series in curves.items():
            revision, end = self._seen.get(f"{part} {name}", (-1, 0))
            if series.revision == revision:
                continue
            start = end if 0 <= series.whole <= revision else 0
            self._seen[f"{part} {name}"] = series.revision, series.end
            changed[name] = {"from": start, "width": series.width, **series.columns(start)}
        return changed


def _late(run: RunState) -> dict[str, float]:
    return {worker: round(seconds, 4) for worker, seconds in run.late.items()}


def _ledger(run: RunState) -> dict[str, Any]:
    """What was used and counted so far. `staleness`: [mean, most] updates, in streaming modes."""
    said: dict[str, Any] = {"updates": run.step, "used": run.step * (0 if run.plan is None else run.plan.items)}
    if (counted := run.accounted) is not None:
        said |= {name: getattr(counted, name) for name in ("applied", "folded", "dropped", "repeats")}
        if number := sum(counted.staleness.values()):
            mean = sum(updates * count for updates, count in counted.staleness.items()) / number
            said["staleness"] = [round(mean, 2), max(counted.staleness)]
    return said


def _times(run: RunState) -> dict[str, Any]:
    times = run.times
    seconds, step, cause = times.longest
    return {
        "p50": times.quantile(0.5), "p99": times.quantile(0.99), "goodput": round(times.goodput, 4),
        "stalls": times.stalls, "lost": {cause: round(lost, 2) for cause, lost in times.lost.items()},
        "longest": {"seconds": round(seconds, 2), "step": step, "cause": cause},
    }  # fmt: skip
