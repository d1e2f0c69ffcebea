"""Runs a script until it calls `job.train`, which makes a snapshot of a checkpoint: `rallypoint resume` goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import msgspec

from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.launch.folder import locked, not_begun, refuse_an_old_run
from rallypoint.launch.importing.task import Task
from rallypoint.launch.plan import Launch, write_plan
from rallypoint.store.snapshots import SnapshotStore


def import_checkpoint(plan: Launch, checkpoint: Path, step: int) -> str:
    """Make the folder of a run that goes on from `checkpoint`, and return a sentence that says how.

    `step`: the steps of training in it; -1: as the checkpoint says itself.

    Raises UsageError when the folder holds a run already, or the script does not come to its `job.train`.
    """
    folder = Path(plan.folder)
    if not plan.snapshots:
        raise UsageError("--snapshots none: a checkpoint becomes a snapshot, so it needs a place for one")
    fresh = not folder.exists()
    with locked(folder), not_begun(folder) if fresh else contextlib.nullcontext():
        refuse_an_old_run(folder, plan.snapshots)
        said = _imported(plan, checkpoint.resolve(), step)
        write_plan(plan)
    return f"{said}; go on with `rallypoint resume {plan.folder}`"


def _imported(plan: Launch, checkpoint: Path, step: int) -> str:
    with tempfile.TemporaryDirectory(prefix="rallypoint-import-") as place:
        task, answer = Path(place) / "task.json", Path(place) / "answer"
        order = Task(str(checkpoint), step, plan.snapshots, str(answer), plan.folder, plan.overrides)
        task.write_bytes(msgspec.json.encode(order))
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT_")}
        ours |= {environment.IMPORT: str(task)}
        try:
            done = subprocess.run(plan.worker, env=ours, stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise UsageError(f"the script cannot be started: {plan.worker[0]}: {error.strerror}") from None
        if not answer.exists() or not SnapshotStore(plan.snapshots).holds_any():
            raise UsageError(f"the script ended with status {done.returncode} before it had a snapshot: see above")
        return answer.read_text()
