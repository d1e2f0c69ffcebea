"""The coordinator's part of a snapshot: collects the parts that were stored, writes the manifest, deletes old ones."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rallypoint.coordinator import inbox
from rallypoint.coordinator.acts import Act, AddFigures, AddPart, BeginSnapshot, CommitSnapshot
from rallypoint.core.cluster.effects import FindSnapshot
from rallypoint.core.cluster.events import SnapshotFound, SnapshotLost
from rallypoint.core.protocol import Stored
from rallypoint.errors import RallypointError
from rallypoint.store.files import EndingThread, patiently
from rallypoint.store.manifest import Manifest, ShardEntry
from rallypoint.store.snapshots import Retention, SnapshotStore

_JUDGED_LATE = 8  # complete snapshots whose evaluation may still be under way


@dataclass
class _Parts:
    files: dict[str, int] = field(default_factory=dict)
    shards: dict[int, ShardEntry] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)


class SnapshotKeeper:
    """Commits snapshots and finds the newest one, on a thread of its own: a slow store delays nothing else.

    Only one thread may call `do`. The answers are events: `put(event)` is called on the keeper's thread, or on the
    caller's.
    """

    def __init__(self, url: str, compression: str, retention: Retention, put: Callable[[inbox.Event], None]) -> None:
        self._store = SnapshotStore(url)
        self._compression, self._retention, self._put = compression, retention, put
        self._parts: dict[str, _Parts] = {}
        self._complete: dict[int, Manifest] = {}  # by step of training; only the keeper's thread looks here
        # What to do, each with the phrase that names it
        self._tasks: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._doing = ""
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._thread.start()

    def do(self, act: Act) -> None:
        """Do one of the shell's acts that are about snapshots; return at once."""
        match act:
            case BeginSnapshot(snapshot=snapshot):
                self._parts = {snapshot: _Parts()}  # drop the parts of earlier snapshots
            case AddPart(part=part):
                self._add(part)
            case CommitSnapshot():
                self._begin_commit(act)
            case AddFigures():
                self._tasks.put((f"the metrics of step {act.step}", lambda: self._judge(act)))
            case FindSnapshot():
                self._tasks.put(("the search for the newest snapshot", self._find))
            case _:
                raise AssertionError(f"an act that is not about snapshots: {act}")

    def stop(self) -> EndingThread:
        """Let the thread end after what was asked for before. Return it, to be waited for."""
        self._tasks.put(None)
        return self._thread, self._doing

    def _add(self, part: Stored) -> None:
        if (parts := self._parts.get(part.snapshot)) is not None:
            parts.files.update(part.files)
            parts.shards.update({shard: ShardEntry(*entry) for shard, entry in part.shards.items()})

    def _begin_commit(self, act: CommitSnapshot) -> None:
        parts = self._parts.pop(act.snapshot, None)
        if parts is None:
            self._put(SnapshotLost(act.snapshot, "its parts have been forgotten"))
            return
        manifest = Manifest(
            id=act.snapshot, version=act.version, record=msgspec.to_builtins(act.record), created=time.time(),
            metrics=dict(act.metrics), compression=self._compression, shards=parts.shards, files=parts.files,
            stop=act.stop, decided=act.decided,
        )  # fmt: skip
        began = parts.began
        self._tasks.put((f"the manifest of snapshot {manifest.id}", lambda: self._commit(act, manifest, began)))

    # ---- on the keeper's thread ----

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._doing, call = task
            try:
                call()
            except Exception as error:  # else the coordinator would wait for an answer for ever
                self._put(inbox.EndWanted(f"the thread for snapshots failed: {type(error).__name__}: {error}"))

    def _commit(self, act: CommitSnapshot, manifest: Manifest, began: float) -> None:
        try:
            self._store.commit(manifest)
        except Exception as error:  # a remote filesystem may raise anything; the job waits for an answer
            self._put(SnapshotLost(manifest.id, _sentence(error)))
            return
        nbytes, seconds = sum(manifest.files.values()), time.monotonic() - began
        self._put(inbox.SnapshotCommitted(manifest.id, manifest.version, nbytes, seconds))
        self._complete.pop(act.step, None)
        self._complete[act.step] = manifest
        while len(self._complete) > _JUDGED_LATE:
            del self._complete[next(iter(self._complete))]
        self._doing = "the deletion of old snapshots"
        try:
            # Keep `origin`: a server may still have to start from it.
            best, decided = act.kept or (-1, manifest.version)  # one of those after `decided` may be the best
            keep = (manifest.id, act.origin)
            self._store.retain(self._kept_by(act), keep, thorough=False, versions=lambda v: v == best or v > decided)
        except Exception as error:
            self._put(inbox.SentenceSaid(f"old snapshots could not be deleted: {_sentence(error)}"))

    def _kept_by(self, act: CommitSnapshot) -> Retention:
        """Which snapshots are kept; the best one also if only the script asks for it."""
        if (rule := act.record.rules.best) is None:
            return self._retention
        metric, best_is = msgspec.structs.astuple(rule)
        return msgspec.structs.replace(self._retention, keep_best=metric, best_is=best_is)

    def _judge(self, act: AddFigures) -> None:
        """Write the manifest again with the metrics of an evaluation that ended after its snapshot was complete."""
        manifest = self._complete.get(act.step) or self._of_version(act.version)
        if manifest is None or manifest.metrics.items() >= act.metrics.items():
            return
        judged = msgspec.structs.replace(manifest, metrics={**manifest.metrics, **act.metrics})
        try:
            if self._store.amend(judged):
                self._complete[act.step] = judged
        except Exception as error:
            self._put(
                inbox.SentenceSaid(f"the figures of snapshot {manifest.id} could not be stored: {_sentence(error)}")
            )

    def _of_version(self, version: int) -> Manifest | None:
        found = self._store.manifests() if version >= 0 else []
        return next((manifest for manifest in found if manifest.version == version), None)

    def _find(self) -> None:
        say = lambda text: self._put(inbox.SentenceSaid(text))  # noqa: E731
        try:
            manifest = patiently(lambda: self._store.latest_usable(say), say, "looking for the newest snapshot")
        except Exception as error:
            self._put(inbox.EndWanted(f"the snapshots cannot be read: {_sentence(error)}"))
            return
        if manifest is None:
            self._put(SnapshotFound(""))
        else:
            known = (manifest.stop, manifest.decided)
            self._put(SnapshotFound(manifest.id, manifest.version, *known))


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, (RallypointError, OSError)) else f"{type(error).__name__}: {error}"
