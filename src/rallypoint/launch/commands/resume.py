"""``rallypoint resume``: from which snapshot a run goes on, and with which settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.config.changes import changed_record
from rallypoint.config.keys import check_keys
from rallypoint.config.resolve import merged
from rallypoint.config.values import check_values
from rallypoint.errors import UsageError
from rallypoint.launch.code.kept import CODE
from rallypoint.launch.code.trusted import refuse_others_script, refuse_others_words
from rallypoint.launch.folder import (
    has_snapshot,
    refuse_a_finished_run,
    refuse_a_running_run,
)
from rallypoint.launch.plan import RUN_FILE, Launch, parse_workers, program_of, read_plan
from rallypoint.store.snapshots import SnapshotStore


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is to be other than before; nothing: as it was.

    Attributes:
        cluster: options by name, as `RunOptions` has them: ``{"workers": "2:8"}``.
        settings: nested settings over those of the run.
        original: the code that the run has kept, not the script as it is now.
        script: the script that this command names itself; "": run.json alone does.
    """

    cluster: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any]
    original: bool = False
    script: str = ""


def going_on(run: Path, wishes: Wishes, say: Callable[[str], None]) -> Launch:
    """Return the plan with which the run in this folder goes on from its newest usable snapshot.

    `say` gets a sentence about the snapshot and what runs, one for each setting that changes, and one for each snapshot
    that cannot be used. Raises UsageError when the run cannot go on, or another user could have written what it runs;
    ConfigError for a setting that cannot change.
    """
    refuse_others_words(run)
    plan = msgspec.structs.replace(read_plan(run), folder=str(run))
    kept = wishes.original and (run / CODE).is_dir()
    whose = ""
    if not kept and wishes.script != plan.script:
        whose = refuse_others_script(plan, "resuming", "give --original, which runs the copy that the run has kept")
    check_keys(wishes.settings)
    check_values(wishes.settings)
    refuse_a_running_run(run)
    if "steps" not in wishes.settings:
        refuse_a_finished_run(run)
    if not plan.snapshots:
        raise UsageError(f"{run} was started with --snapshots none: there is nothing to go on from")
    manifest = SnapshotStore(plan.snapshots).latest_usable(say)
    if manifest is None:
        raise UsageError(f"{run} has no usable snapshot in {plan.snapshots}: start it anew")
    overrides = merged(plan.overrides, wishes.settings)
    record, changes = changed_record(manifest.job, overrides, manifest.version)
    step = min(manifest.version * record.steps_per_round, int(record.config["steps"]))
    said = [f"from step {step} on, {change}" for change in changes]
    say(f"going on from step {step}: snapshot {manifest.id}")
    say(f"it runs {program_of(plan)}{', as the run has kept it' if kept and plan.script else ''}")
    for sentence in (whose, *said):
        if sentence:
            say(sentence)
    changed = dict(wishes.cluster)
    if "workers" in changed:
        changed["workers"], changed["workers_start"] = parse_workers(changed["workers"])
    plan = msgspec.structs.replace(
        plan, resume=manifest.id, overrides=overrides, **changed,
        changes=(*plan.changes, *(sentence for sentence in said if sentence not in plan.changes)),
    )  # fmt: skip
    return msgspec.structs.replace(plan, replication=min(plan.replication, plan.servers))  # a job that begins with them


def going_on_or_anew(plan: Launch, say: Callable[[str], None]) -> tuple[Launch, bool]:
    """Return the plan with which the run in the plan's folder goes on, or this plan if there is none to go on with.

    Also, whether the folder must be cleared first: it holds a run that has no snapshot yet. Raises as `going_on`.
    """
    folder = Path(plan.folder)
    if not (folder / RUN_FILE).exists():
        return plan, False
    refuse_a_running_run(folder)
    if not has_snapshot(plan.snapshots):
        say(f"{folder} holds a run that has no snapshot yet: it begins anew")
        return plan, True
    return going_on(folder, Wishes(settings=plan.overrides, script=plan.script), say), False
