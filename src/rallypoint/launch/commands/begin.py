"""With what a coordinator begins that is told to --resume: a snapshot, or the job that its journal has."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rallypoint.config.changes import Change, changed_record
from rallypoint.coordinator.journal import kept_state
from rallypoint.coordinator.service import JoinInfo
from rallypoint.core.cluster.state import Resumed, begun_by
from rallypoint.core.cluster.storing.snapshot_duty import ATTEMPTS
from rallypoint.errors import UsageError
from rallypoint.observe.lenient import say
from rallypoint.store.manifest import Manifest, located
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
        store.commit(manifest)  # from now on it is the newest one: later ones are of a course that is given up
    snapshot = f"{place}/{manifest.id}" if is_elsewhere else manifest.id
    record, changes = changed_record(manifest.job, about.overrides, manifest.version)
    say(f"going on from snapshot {snapshot}")
    if about.threads and record.threads and about.threads != record.threads:
        changes = [*changes, Change("threads", record.threads, about.threads)]
        record = msgspec.structs.replace(record, threads=about.threads)
    stop, decided = manifest.stop, manifest.decided
    if any(change.key == "steps" for change in changes):
        stop, decided = None, decided.going_on()
    epoch = max((_epoch_of(known) for known in own), default=0)
    return Resumed(record, snapshot, manifest.version, stop, decided, epoch), changes


def _epoch_of(snapshot: Manifest) -> int:
    """The epoch of the coordinator that has asked for the snapshot."""
    return order(snapshot.id)[1] // ATTEMPTS
