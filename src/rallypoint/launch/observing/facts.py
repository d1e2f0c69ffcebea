"""What does not change in a run: its name, and how it was started."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rallypoint.coordinator.journal import kept_state
from rallypoint.errors import RallypointError
from rallypoint.launch.plan import Launch, read_plan


def facts_of(folder: Path) -> dict[str, Any]:
    """The facts of the run in `folder` for its page. A run by hand has no plan, and a plan may be one that this version
    cannot read: then there is only the name."""
    try:
        plan = read_plan(folder)
    except (RallypointError, OSError):
        return {"name": folder.resolve().name, "settings": {}}
    return {"name": folder.resolve().name, "settings": _settings(plan)}


def resolved_of(folder: Path) -> dict[str, str]:
    """All settings of the job in `folder`, by dotted name, as its members have agreed on them; none before that, and
    of a journal that cannot be read."""
    try:
        state = kept_state(folder)
    except RallypointError:
        return {}
    return {} if state is None or state.record is None else dict(_flat(state.record.config))


def _settings(plan: Launch) -> dict[str, str]:
    fewest, most = plan.workers
    said = {
        "command": shlex.join(plan.worker), "engine": plan.engine,
        "workers": str(most) if fewest == most else f"{fewest} to {most}", "servers": str(plan.servers),
        "replication": str(plan.replication),
        "snapshots": plan.snapshots or "none",
    }  # fmt: skip
    return {**said, **dict(_flat(plan.overrides))}


def _flat(settings: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", str(value)
