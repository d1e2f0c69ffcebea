"""The coordinator's part of a snapshot: collects the parts that were stored, writes the manifest, deletes old ones."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.coordinator import inbox
from rallypoint.coordinator.acts import Act, AddFigures, AddPart, CommitSnapshot
from rallypoint.core.cluster.effects import FindSnapshot
from rallypoint.core.cluster.state import Origin
from rallypoint.core.protocol import Aborted, Capture, NotStored, Say, Snapshotted
from rallypoint.errors import sentence_of
from rallypoint.store.files import EndingThread, patiently
from rallypoint.store.manifest import Manifest, ShardEntry
from rallypoint.store.snapshots import Retention, SnapshotStore

_JUDGED_LATE = 8  # complete snapshots whose evaluation may still be under way
_LOOK_AGAIN_S = (0.1, 0.4, 1.5, 3.0)  # seconds before each further look for files that a network file system hides
_NAMED = 3  # writers in a sentence


@dataclass
class _Parts:
    files: dict[str, int] = field(default_factory=dict)
    shards: dict[int, ShardEntry] = field(default_factory=dict)
    writers: dict[str, str] = field(default_factory=dict)  # of each file
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
        self._newest: str | None = ""  # the store's newest snapshot as far as this coordinator knows; "": it does not
        self._tasks.put(("a look at the snapshots", self._look))
        self._doing = ""
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._thread.start()

    def do(self, act: Act) -> None:
        """Do one of the shell's acts that are about snapshots; return at once."""
        match act:
            case Capture(snapshot=snapshot):
                self._parts = {snapshot: _Parts()}  # drop the parts of earlier snapshots
                self._tasks.put(("the deletion of attempts", lambda: self._give_up(snapshot)))
            case AddPart(part=part, writer=writer):
                if (parts := self._parts.get(part.snapshot)) is not None:
                    parts.files.update(part.files)
                    parts.writers.update(dict.fromkeys(part.files, writer))
                    parts.shards.update({shard: ShardEntry(*entry) for shard, entry in part.shards.items()})
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

    def _begin_commit(self, act: CommitSnapshot) -> None:
        parts = self._parts.pop(act.snapshot, None)
        if parts is None:
            self._put(NotStored(act.snapshot, "its parts have been forgotten"))
            return
        manifest = Manifest(
            id=act.snapshot, version=act.version, record=msgspec.to_builtins(act.record), created=time.time(),
            metrics=dict(act.metrics), compression=self._compression, shards=parts.shards, files=parts.files,
            stop=act.stop, decided=act.decided,
        )  # fmt: skip
        self._tasks.put((f"the manifest of snapshot {manifest.id}", lambda: self._commit(act, manifest, parts)))

    # ---- on the keeper's thread ----

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._doing, call = task
            try:
                call()
            except Exception as error:  # else the coordinator would wait for an answer for ever
                self._put(Aborted(f"the thread for snapshots failed: {sentence_of(error)}"))

    def _look(self) -> None:
        with contextlib.suppress(Exception):
            self._newest = self._store.latest()

    def _commit(self, act: CommitSnapshot, manifest: Manifest, parts: _Parts) -> None:
        try:
            if unseen := self._unseen(manifest):
                why = _not_shared(unseen, parts.writers, self._store.url)
                first = manifest.version == 0  # nothing is lost yet, and later ones would not be seen either
                self._put(Aborted(why) if first else NotStored(manifest.id, why))
                return
            self._store.commit(manifest, self._newest)
            self._newest = manifest.id
        except Exception as error:  # a remote filesystem may raise anything; the job waits for an answer
            self._put(NotStored(manifest.id, sentence_of(error)))
            return
        nbytes, seconds = sum(manifest.files.values()), time.monotonic() - parts.began
        self._put(Snapshotted(manifest.id, manifest.version, nbytes, seconds))
        self._complete.pop(act.step, None)
        self._complete[act.step] = manifest
        while len(self._complete) > _JUDGED_LATE:
            del self._complete[next(iter(self._complete))]
        self._doing = "the deletion of old snapshots"
        try:
            # Keep `origin`: a server may still have to start from it.
            best, decided = act.kept or (-1, manifest.version)  # one of those after `decided` may be the best
            keep = (manifest.id, act.origin)
            self._store.retain(self._kept_by(act), keep, versions=lambda v: v == best or v > decided)
        except Exception as error:
            self._put(Say(f"old snapshots could not be deleted: {sentence_of(error)}"))

    def _give_up(self, before: str) -> None:
        with contextlib.suppress(Exception):  # the disk may be full, and takes no snapshot until somebody makes room
            self._store.give_up(before)

    def _unseen(self, manifest: Manifest) -> list[str]:
        """The snapshot's files that the coordinator does not see, after it has looked for some seconds."""
        for pause in _LOOK_AGAIN_S:
            if not self._store.unseen(manifest):
                return []
            time.sleep(pause)
        return self._store.unseen(manifest)

    def _kept_by(self, act: CommitSnapshot) -> Retention:
        """Which snapshots are kept; the best one also if only the script asks for it."""
        if (rule := act.record.rules.best) is None:
            return self._retention
        metric, best_is = msgspec.structs.astuple(rule)
        return msgspec.structs.replace(self._retention, keep_best=metric, best_is=best_is)

    def _judge(self, act: AddFigures) -> None:
        """Write the manifest again with the metrics of an evaluation that ended after its snapshot was complete."""
        try:
            manifest = self._complete.get(act.step) or self._of_version(act.version)
            if manifest is None or manifest.metrics.items() >= act.metrics.items():
                return
            judged = msgspec.structs.replace(manifest, metrics={**manifest.metrics, **act.metrics})
            if self._store.amend(judged):
                self._complete[act.step] = judged
        except Exception as error:
            self._put(Say(f"the figures of step {act.step} could not be stored: {sentence_of(error)}"))

    def _of_version(self, version: int) -> Manifest | None:
        found = self._store.manifests() if version >= 0 else []
        return next((manifest for manifest in reversed(found) if manifest.version == version), None)

    def _find(self) -> None:
        say = lambda text: self._put(Say(text))  # noqa: E731
        try:
            manifest = patiently(lambda: self._store.latest_usable(say), say, "looking for the newest snapshot")
        except Exception as error:
            self._put(Aborted(f"the snapshots cannot be read: {sentence_of(error)}"))
            return
        if manifest is None:
            self._put(Origin(""))
        else:
            known = (manifest.stop, manifest.decided)
            self._put(Origin(manifest.id, manifest.version, *known))


def _not_shared(unseen: Sequence[str], writers: Mapping[str, str], where: str) -> str:
    """The sentence that names who has stored files in a folder of the same name that is not the coordinator's."""
    first = {writers[file]: file for file in reversed(unseen)}
    named = [f"{writer} ({first[writer]})" for writer in sorted(first)]
    more = f" and {len(named) - _NAMED} others" if len(named) > _NAMED else ""
    return (
        f"the coordinator on {socket.gethostname()} does not see in {where} what members have stored there: "
        f"{', '.join(named[:_NAMED])}{more}. Let --snapshots (or --folder) be a folder that all hosts share, or a URL "
        "such as s3://bucket/run; --snapshots none trains without snapshots"
    )
