"""``rallypoint import``: runs a script until it calls `job.train`, which makes a snapshot of a checkpoint.

`rallypoint resume` goes on from it. Importing this loads no torch.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.errors import UsageError, to_resume
from rallypoint.launch import environment
from rallypoint.launch.folder import clear, locked, not_begun, refuse_an_old_run, refuse_used_snapshots
from rallypoint.launch.plan import Launch, write_plan
from rallypoint.store.snapshots import SnapshotStore


class ImportTask(msgspec.Struct, frozen=True):
    """What to import, and where to."""

    checkpoint: str  # see `store.checkpoints`
    step: int  # the steps of training in it; -1: as it says itself
    snapshots: str  # the store that gets the snapshot
    answer: str  # the file that gets an `Answer` when that is done
    folder: str  # the run's folder
    overrides: dict[str, Any] = {}  # the launcher's settings, nested
    strict: bool = False  # refuse a checkpoint that has more than the script's model


class Imported(msgspec.Struct, frozen=True):
    """What was imported, as a sentence, and what the user is to know about it."""

    said: str
    warnings: tuple[str, ...] = ()


def import_checkpoint(
    plan: Launch, checkpoint: Path, step: int = -1, *, strict: bool = False, overwrite: bool = False, made: bool = False
) -> str:
    """Make the folder of a run that goes on from `checkpoint`, and return lines that say how: warnings, a sentence.

    `step`: the steps of training in it; -1: as the checkpoint says itself. With `strict` a checkpoint that has more
    than the script's model is refused. `overwrite` deletes the run that the folder holds, before the script runs.

    Raises UsageError when the folder holds a run already, or the script does not come to its `job.train`.
    """
    check_checkpoint(checkpoint)
    folder = Path(plan.folder)
    fresh = made or not folder.exists()
    with locked(folder), not_begun(folder) if fresh else contextlib.nullcontext():
        if not plan.snapshots:
            raise UsageError("--snapshots none: a checkpoint becomes a snapshot, so it needs a place for one")
        said = []
        if overwrite:
            said.append(clear(folder))
            refuse_used_snapshots(plan.snapshots)
        else:
            refuse_an_old_run(folder, plan.snapshots)
        answer = _imported(plan, checkpoint.resolve(), step, strict=strict)
        write_plan(plan)
    warnings = [f"warning: {sentence}" for sentence in (*said, *answer.warnings) if sentence]
    return "\n".join([*warnings, f"{answer.said}; go on with `{to_resume(plan.folder)}`"])


def check_checkpoint(checkpoint: Path) -> None:
    """Raise UsageError when there is none, before a folder is made for it."""
    if not checkpoint.exists():
        raise UsageError(f"there is no checkpoint {checkpoint}")


def _imported(plan: Launch, checkpoint: Path, step: int, *, strict: bool) -> Imported:
    with tempfile.TemporaryDirectory(prefix="rallypoint-import-") as place:
        task, answer = Path(place) / "task.json", Path(place) / "answer"
        order = ImportTask(str(checkpoint), step, plan.snapshots, str(answer), plan.folder, plan.overrides, strict)
        task.write_bytes(msgspec.json.encode(order))
        status = environment.run_script(plan.worker, {environment.IMPORT: str(task)})
        if not answer.exists() or not SnapshotStore(plan.snapshots).holds_any():
            raise UsageError(f"the script ended with status {status} before it had a snapshot: see above")
        return msgspec.json.decode(answer.read_bytes(), type=Imported)
