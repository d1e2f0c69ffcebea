"""What the page needs of a run: what does not change in it, and how its buttons' orders are carried out."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rallypoint.coordinator.fingerprints import KeptFingerprints
from rallypoint.coordinator.journal import kept_state
from rallypoint.core.cluster.terms import copies_of
from rallypoint.core.job import JobRecord
from rallypoint.core.protocol import AnyOrder, Drain, Pause, StopWanted
from rallypoint.errors import DataError, RallypointError, UsageError
from rallypoint.launch import ask
from rallypoint.launch.plan import Launch, read_plan

_NEWEST = 8  # of so many versions one is looked for of which all shards have told their digests


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
    of a journal that cannot be read. Before them, in a job with `fingerprints`, the weights' hash so far."""
    try:
        state = kept_state(folder)
    except RallypointError:
        return {}
    if state is None or state.record is None:
        return {}
    return {**_weights(folder, state.record), **dict(_flat(state.record.config))}


def _weights(folder: Path, record: JobRecord) -> dict[str, str]:
    """The hash of the newest version of which the digests of all shards are kept. Two runs with the same layout and the
    same weights have the same hash."""
    with contextlib.suppress(DataError), KeptFingerprints(folder) as kept:
        for version in reversed(kept.versions()[-_NEWEST:]):
            digests = kept.version(version)
            if len(digests) == len(record.layout.shards):
                whole = hashlib.sha256(b"".join(digests[shard] for shard in sorted(digests))).hexdigest()
                return {f"hash of the weights after {record.steps_at(version)} steps": whole}
    return {}


def _settings(plan: Launch) -> dict[str, str]:
    fewest, most = plan.workers
    said = {
        "command": shlex.join(plan.worker), "engine": plan.engine,
        "workers": str(most) if fewest == most else f"{fewest} to {most}", "servers": str(plan.servers),
        "replication": str(copies_of(plan.replication, plan.servers)),
        "snapshots": plan.snapshots or "none",
    }  # fmt: skip
    return {**said, **dict(_flat(plan.overrides))}


def _flat(settings: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", str(value)


if TYPE_CHECKING:
    from rallypoint.watch.app import Wish


def follow(run: Path, wish: Wish) -> str:
    """Carry the order out on the run in this folder. Returns a sentence; RallypointError if it cannot be done."""
    match wish.order:
        case "snapshot":
            return ask.take_snapshot(run, _unsaid)
        case "resize":
            if not wish.workers and not wish.servers:
                raise UsageError("to what size? give a number of workers or of servers")
            return ask.resize(run, wish.workers, wish.servers, _unsaid)
        case _:
            return ask.order(run, _order(wish), _unsaid)


def _unsaid(sentence: str) -> None:
    """The page shows only what has come of an order."""


def _order(wish: Wish) -> AnyOrder:
    match wish.order:
        case "stop":
            return StopWanted(wish.reason)
        case "drain":
            return Drain(wish.member)
        case _:
            return Pause(on=wish.order == "pause")
