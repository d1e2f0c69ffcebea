"""``rallypoint resume``: from which snapshot a run goes on, and with which settings.

`start_of` is for a coordinator that is told to --resume: a snapshot, or the job that its journal has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.config.changes import Change, changed_record
from rallypoint.config.keys import check_settings
from rallypoint.config.resolve import merged
from rallypoint.coordinator.journal import kept_state
from rallypoint.coordinator.service import JoinInfo
from rallypoint.core.cluster.state import Resumed, begun_by
from rallypoint.core.cluster.storing.snapshot_duty import ATTEMPTS
from rallypoint.errors import UsageError
from rallypoint.launch.folder import has_snapshot, refuse_a_finished_run, refuse_a_running_run
from rallypoint.launch.kept_code import CODE, refuse_others_script, refuse_others_words
from rallypoint.launch.plan import RUN_FILE, Launch, parse_workers, program_of, read_plan
from rallypoint.observe.lenient import say
from rallypoint.store.manifest import located
from rallypoint.store.snapshots import SnapshotStore, order

LATEST = "latest"  # the newest usable snapshot, if there is any


def command_of(resume: str, about: JoinInfo) -> str:
    """What tells one command with --resume from another: the snapshot, the places and the settings; "" without it."""
    return msgspec.json.encode((resume, about.snapshots, about.overrides)).decode() if resume else ""


def start_of(resume: str, about: JoinInfo, command: str) -> tuple[Resumed | None, list[Change]]:
    """With what a job begins that goes on from the snapshot `resume`, and which settings change.

    `resume` is a name, "latest", or either of them with another store before it: ``s3://bucket/run/latest``. None: the
    job begins with first weights, or goes on with its journal, if `command` has begun it (see `core.cluster.state`):
    the snapshot may be deleted by then. Raises UsageError if another job's snapshot would begin a course in a store
    that has one; SnapshotError and DataError when a snapshot or the journal cannot be read.
    """
    if not resume:
        return None, []
    if about.folder and begun_by(kept_state(Path(about.folder)), command):
        say(f"going on with the job of {about.folder}, which this command has begun")
        return None, []
    place, name = located(resume, about.snapshots)
    if place != about.snapshots and "://" not in place:
        place = str(Path(place).resolve())
    if not place:
        raise UsageError(f"--resume {resume}: of which store? Give --snapshots PLACE, or --resume PLACE/{resume}")
    is_elsewhere = place.rstrip("/") != about.snapshots.rstrip("/")
    own = SnapshotStore(about.snapshots).manifests() if about.snapshots else []
    if is_elsewhere and own:
        raise UsageError(
            f"{about.snapshots} has snapshots, and {resume} is not one of them: give other --snapshots, or --resume "
            f"{LATEST} to go on from what is there"
        )
    store = SnapshotStore(place)
    manifest = store.latest_usable(say) if name == LATEST else store.load(name)
    if manifest is None:
        return None, []
    if not is_elsewhere and order(manifest.id) < max((order(known.id) for known in own), default=(0, 0)):
        store.verify(manifest)
        store.commit(manifest)  # from now on it is the newest one: later ones are of a course that is given up
    snapshot = f"{place}/{manifest.id}" if is_elsewhere else manifest.id
    record, changes = changed_record(manifest.job, about.overrides, manifest.version)
    if is_elsewhere or name == LATEST:  # else the command has named it
        say(f"going on from snapshot {snapshot}")
    if about.threads and record.threads and about.threads != record.threads:
        changes = [*changes, Change("threads", record.threads, about.threads)]
        record = msgspec.structs.replace(record, threads=about.threads)
    stop, decided = manifest.stop, manifest.decided
    if any(change.key == "steps" for change in changes):
        stop = (decided := decided.going_on(manifest.version)).stop
    epoch = max((order(known.id)[1] // ATTEMPTS for known in own), default=0)  # of coordinators that asked for them
    return Resumed(record, snapshot, manifest.version, stop, decided, epoch), changes


def going_on(
    run: Path, say: Callable[[str], None], settings: Mapping[str, Any], *, cluster: Mapping[str, Any] | None = None,
    original: bool = False, script: str = "",
) -> Launch:  # fmt: skip
    """Return the plan with which the run in this folder goes on from its newest usable snapshot.

    Nested `settings` come over those of the run, and options of its `cluster` by name, as `RunOptions` has them.
    `original`: with the code that the run has kept, not the script as it is now. `script`: the one that this command
    names itself; "": run.json alone does.

    `say` gets a sentence about the snapshot and what runs, one for each setting that changes, and one for each snapshot
    that cannot be used. Raises UsageError when the run cannot go on, or another user could have written what it runs;
    ConfigError for a setting that cannot change.
    """
    refuse_others_words(run)
    plan = msgspec.structs.replace(read_plan(run), folder=str(run))
    kept = original and (run / CODE).is_dir()
    whose = ""
    if not kept and script != plan.script:
        whose = refuse_others_script(plan, "resuming", "give --original, which runs the copy that the run has kept")
    check_settings(settings)
    refuse_a_running_run(run)
    if "steps" not in settings:
        refuse_a_finished_run(run)
    if not plan.snapshots:
        raise UsageError(f"{run} was started with --snapshots none: there is nothing to go on from")
    manifest = SnapshotStore(plan.snapshots).latest_usable(say)
    if manifest is None:
        raise UsageError(f"{run} has no usable snapshot in {plan.snapshots}: start it anew")
    overrides = merged(plan.overrides, settings)
    record, changes = changed_record(manifest.job, overrides, manifest.version)
    step = min(manifest.version * record.steps_per_round, int(record.config["steps"]))
    said = [f"from step {step} on, {change}" for change in changes]
    say(f"going on from step {step}: snapshot {manifest.id}")
    say(f"it runs {program_of(plan)}{', as the run has kept it' if kept and plan.script else ''}")
    for sentence in filter(None, (whose, *said)):
        say(sentence)
    changed = dict(cluster or {})
    if "workers" in changed:
        changed["workers"], changed["workers_start"] = parse_workers(changed["workers"])
        if record.config["reading"]["order"] == "own" and changed["workers"][1] != (fixed := record.config["replicas"]):
            raise UsageError(f"each process of rp.wrap is one replica: go on with --workers {fixed}, as this job began")
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
    own = msgspec.structs.asdict(read_plan(folder))
    if any(own[name] != getattr(plan, name) for name in ("workers", "workers_start", "servers", "worker")):
        say(
            f"{folder} has a run with its own numbers of workers and servers and arguments of the script: these count; "
            "`rallypoint resume` changes the numbers"
        )
    return going_on(folder, say, plan.overrides, script=plan.script), False
