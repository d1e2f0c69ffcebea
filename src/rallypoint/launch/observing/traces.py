"""The trace of a run: its processes' files become one."""

from __future__ import annotations

from pathlib import Path

from rallypoint.launch.console import RunConsole
from rallypoint.launch.plan import Launch
from rallypoint.observe.trace import merge


def merge_trace(plan: Launch, console: RunConsole) -> None:
    """Write what the processes have recorded to the file that the plan names, and say where it is."""
    parts = list(Path(plan.folder).glob("trace-*.json"))
    spans = merge(parts, Path(plan.trace))
    for part in parts:
        part.unlink()
    console.console.print(f"trace of {spans} spans in {plan.trace}: open it at https://ui.perfetto.dev")
