"""A server's part in snapshots: it copies shards, keeps codec states, and reads shards from a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rallypoint.codec.build import CodecState, ShardCodecStates
from rallypoint.core.layout import Shard
from rallypoint.core.shard.relay import Relay, StateAnswer
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.handover import Key
from rallypoint.errors import RallypointError
from rallypoint.net.frames import AHEAD, Header, Kind
from rallypoint.observe.trace import Tracer
from rallypoint.server.inbox import Event, Restored, RestoreFailed, StateRecalled
from rallypoint.server.job import ServerJob
from rallypoint.store.files import end_threads, patiently
from rallypoint.store.manifest import located
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.store.writer import SnapshotWriter

# ---- Codec states of replicas that move from one worker to another. See `core/shard/relay.py` ----

Send = Callable[[str, Header, memoryview | None], None]


class StateRelay:
    """Runs `Relay` on frames. Not thread-safe: only the owner thread calls it.

    `send(worker, header, payload)` queues a frame to a connected worker and fills in the view's number. For each shard
    that is primary here, it holds at most one codec state of each replica, and one copy for a snapshot. Workers send
    the copy before they contribute to the version that is stored.
    """

    def __init__(self, me: str, formats: ShardCodecStates, replicas: int, send: Send) -> None:
        self._relay: Relay[CodecState] = Relay(me)
        self._formats, self._replicas, self._send = formats, replicas, send
        self._generation: ViewNumber | None = None
        self._copies: dict[Key, tuple[int, CodecState]] = {}  # with the version that it is for
        self.records: dict[int, ShardRecord] = {}  # for a snapshot, complete except for codec states

    def adopt(self, view: View) -> None:
        if self._generation != view.generation:
            self._copies.clear()
        self._generation = view.generation
        self._tell(self._relay.adopt(view))

    def contributed(self, header: Header, worker: str, upcoming: int) -> None:
        """A contribution arrived (added or not). `upcoming` is the next step that the shard takes."""
        self._relay.contributed(header.shard, header.replica, header.step, worker, upcoming)

    def given(self, header: Header, data: memoryview, worker: str, upcoming: int) -> None:
        """A worker gives a codec state, or (empty `data`) reports that it has nothing new."""
        self._send(worker, Header(Kind.TAKEN, shard=header.shard, replica=header.replica, step=header.step), None)
        codec_state = (header.step, CodecState(header.step, header.codec, data)) if data else None
        self._tell(self._relay.given(header.shard, header.replica, worker, upcoming, codec_state))

    def recalled(self, header: Header, worker: str, upcoming: int) -> None:
        """A worker asks for a codec state."""
        self._tell(self._relay.recalled(header.shard, header.replica, worker, upcoming))

    # ---- snapshots ----

    def copied(self, header: Header, data: memoryview) -> None:
        """A copy arrived for a snapshot of the version after its step. Without data: it begins without a state."""
        key, version = (header.shard, header.replica), header.step + 1
        if key not in self._copies or self._copies[key][0] != version:
            self._copies[key] = version, CodecState(header.step + (header.base == AHEAD), header.codec, data)

    def awaited(self, record: ShardRecord, place: Shard) -> bool:
        """The shard was copied for a snapshot. Returns True if the record is kept here until `complete`."""
        if not self._formats.has(place):
            return False
        self.records[record.shard] = record
        return True

    def complete(self, index: int, *, at_last: bool = False) -> ShardRecord | None:
        """The kept record of this shard, once all copies are here. `at_last`: with the copies that are here."""
        record = self.records.get(index)
        if record is None:
            return None
        copies = {r: self._copies.get((index, r), (-1, None)) for r in range(self._replicas)}
        there = {r: copy for r, (version, copy) in copies.items() if copy is not None and version == record.version}
        if len(there) < self._replicas and not at_last:
            return None
        del self.records[index]
        for replica in there:
            del self._copies[index, replica]
        states = {r: np.frombuffer(c.data, np.uint8) for r, c in there.items() if c.data}
        return replace(record, codec_states=states, ahead=tuple(r for r in states if there[r].step == record.version))

    def abandon(self) -> None:
        """The snapshot was stopped."""
        self.records.clear()

    def restored(self, record: ShardRecord, place: Shard) -> None:
        """A shard was read from a snapshot, with its codec states. Workers with these replicas will ask for them."""
        for replica, array in record.codec_states.items():
            step = record.version - (replica not in record.ahead)
            codec_state = CodecState(step, self._formats.of(place).code, array.data)
            self._relay.restored(record.shard, replica, step, codec_state)

    def _tell(self, answers: Sequence[StateAnswer[CodecState]]) -> None:
        for worker, shard, replica, step, codec_state in answers:
            header = Header(Kind.CODEC_STATE, shard=shard, replica=replica, step=step)
            if codec_state is not None:
                header = header._replace(codec=codec_state.code, length=len(codec_state.data))
            self._send(worker, header, None if codec_state is None else codec_state.data)


# ---- This server's part of a snapshot: the shards to copy, and the copies that wait for codec states ----
#
# Copy-on-write: a shard is copied when the owner thread is idle and the store has caught up, at the latest right before
# the shard's next update.


class SnapshotCapture:
    """The shards to copy for one snapshot. Not thread-safe: only the owner thread calls it.

    `state(shard, version, clocks)` returns a shard's state, in arrays that later updates change. `wake` is called, from
    any thread, when `due` may have become True. `is_last(shard, version)`: as far as the view says.
    """

    def __init__(
        self, writer: SnapshotWriter, job: ServerJob, codec_states: StateRelay | None,
        state: Callable[[int, int, tuple[int, ...]], ShardRecord], tracer: Tracer, wake: Callable[[], None],
        is_last: Callable[[int, int], bool],
    ) -> None:  # fmt: skip
        writer.caught_up = wake
        self.snapshot = ""
        self._writer, self._job = writer, job
        self._codec_states, self._state, self._tracer, self._is_last = codec_states, state, tracer, is_last
        self._to_copy: dict[int, tuple[int, tuple[int, ...]]] = {}  # shard -> version and clocks

    @property
    def due(self) -> bool:
        """Is there a shard to copy now, if the owner thread is idle?"""
        return bool(self._to_copy) and self._writer.wants_more

    def begin(self, snapshot: str, shards: int) -> None:
        """A snapshot begins. It stores `shards` shards of this server."""
        self.snapshot = snapshot
        self._writer.begin(snapshot, shards)

    def wanted(self, shard: int, version: int, clocks: tuple[int, ...] = ()) -> None:
        """The shard is at the snapshot's version now: copy it before its next update."""
        self._to_copy[shard] = version, clocks

    def copy_one(self) -> None:
        """Copy one of the shards that wait for it."""
        self._copy(next(iter(self._to_copy)))

    def before_update(self, shard: int) -> bool:
        """The shard is about to change: copy it now if it waits for that.

        Returns True if the snapshot is lost: a worker's copy of a codec state has not come, and will not. (With a
        quorum, a step does without some.)
        """
        if shard in self._to_copy:
            self._copy(shard)
        if self._codec_states is None or shard not in self._codec_states.records:
            return False
        self.codec_state_came(shard, at_last=self._job.config.quorum is not None)
        if lost := shard in self._codec_states.records:
            self.abandon()
        return lost

    def codec_state_came(self, shard: int, *, at_last: bool = False) -> None:
        """A worker's copy of a codec state arrived, perhaps after the shard was copied: store what is complete."""
        assert self._codec_states is not None
        if (record := self._codec_states.complete(shard, at_last=at_last)) is not None:
            self._writer.put(record)

    def viewed(self) -> None:
        """There is a new view. Nobody contributes after the last version: its codec states do not come."""
        waiting = {} if self._codec_states is None else self._codec_states.records
        for shard in [s for s, record in waiting.items() if self._is_last(s, record.version)]:
            self._writer.put(waiting.pop(shard))

    def disowned(self, shard: int) -> None:
        self._to_copy.pop(shard, None)

    def abandon(self) -> None:
        self._to_copy.clear()
        if self._codec_states is not None:
            self._codec_states.abandon()
        self._writer.abandon()

    def close(self) -> None:
        self._writer.close()

    def _copy(self, shard: int) -> None:
        version, clocks = self._to_copy.pop(shard)
        if not self._writer.takes_records:  # the store has failed: the shards that are left need not be copied
            self.abandon()
            return
        with self._tracer.span("capture", shard=shard, version=version):
            record = self._writer.copy(self._state(shard, version, clocks))
        if self._awaits_codec_states(shard, version, record):
            self.codec_state_came(shard)  # all of them may be here
        else:
            self._writer.put(record)

    def _awaits_codec_states(self, shard: int, version: int, record: ShardRecord) -> bool:
        """Keep the copy until the codec states come? Workers send them only at a version that all continue from."""
        goes_on = version > 0 and not self._is_last(shard, version) and self._job.versions_are_common
        states = self._codec_states
        return states is not None and goes_on and states.awaited(record, self._job.shards[shard])


# ---- Reads shards from a snapshot in a thread of its own, and puts them into the owner's inbox as events ----

READ_AHEAD = 2  # records that are read but not loaded; each is a shard with its optimizer state


class _Cancelled(RallypointError):
    """A new generation began: these shards are no longer wanted."""


class _Reading:
    """One restore and its thread, which ends soon after `cancel`."""

    def __init__(self, doing: str, run: Callable[[_Reading], None]) -> None:
        self._doing = doing
        self._cancelled = threading.Event()
        self._room = threading.Semaphore(READ_AHEAD)
        self._thread = threading.Thread(target=run, args=(self,), name="restore", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()
        self._room.release()  # the thread may wait for room

    @property
    def thread(self) -> tuple[threading.Thread, str]:
        return self._thread, self._doing

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def pause(self, seconds: float) -> None:
        """Sleep before the next attempt. Raises _Cancelled as soon as the restore is cancelled."""
        if self._cancelled.wait(seconds):
            raise _Cancelled

    def wait_for_room(self) -> None:
        """Block until few enough records wait in the inbox. Raises _Cancelled: see `pause`."""
        self._room.acquire()
        self.pause(0.0)

    def make_room(self) -> None:
        """A record has left the inbox."""
        self._room.release()


class Restores:
    """At most one restore counts: that of the current generation. Only the owner's thread calls its methods.

    ```
       begin(generation 1.5) --> a thread reads --> Restored(record, 1.5) into the inbox, one for each shard
                                                 +-> RestoreFailed(error, 1.5)
    ```

    The owner's thread never waits for the store. While the reading thread retries after an error, the owner can adopt a
    view, even one that rolls back again. `put` puts an event into the inbox. `say` gets a sentence for each error; the
    reading thread calls it.
    """

    def __init__(self, me: str, url: str, put: Callable[[Event], None], say: Callable[[str], None]) -> None:
        self._me, self._url, self._put, self._say = me, url, put, say
        self._readings: list[_Reading] = []  # the last one is current; earlier ones are cancelled
        self._missing: set[int] = set()
        self._recalls: dict[int, list[StateRecalled]] = {}

    def begin(self, shards: Sequence[int], origin: str, generation: ViewNumber) -> None:
        """Begin to read these shards from the snapshot `origin`. Cancels an earlier restore."""
        self.cancel()
        self._missing = set(shards)
        doing = f"{self._me} restores {len(shards)} shard{'s' * (len(shards) != 1)} from snapshot {origin}"

        def run(reading: _Reading) -> None:
            try:
                self._read(reading, doing, shards, origin, generation)
            except _Cancelled:
                return
            except Exception as error:  # the owner's thread handles it, or ignores it in a new generation
                self._put(RestoreFailed(error, generation))

        self._readings.append(_Reading(doing, run))

    def cancel(self) -> None:
        """The generation is over: stop the restore."""
        for reading in self._readings:
            reading.cancel()
        self._readings = [reading for reading in self._readings if reading.runs]
        self._missing.clear()
        self._recalls.clear()

    def close(self) -> None:
        """Cancel, and wait for the threads; for a store that hangs only a few seconds."""
        readings = list(self._readings)
        self.cancel()
        end_threads(*(reading.thread for reading in readings))

    def left_the_inbox(self) -> None:
        """The owner's thread took a record of the current restore out of the inbox."""
        self._readings[-1].make_room()

    def postpones(self, event: StateRecalled) -> bool:
        """A worker asks for a codec state. Is its shard still being read?

        If so, keeps the event until `loaded` and returns True.
        """
        if event.header.shard not in self._missing:
            return False
        self._recalls.setdefault(event.header.shard, []).append(event)
        return True

    def loaded(self, shard: int) -> list[StateRecalled]:
        """The shard is loaded. Returns the events that `postpones` kept for it."""
        self._missing.discard(shard)
        return self._recalls.pop(shard, [])

    def _read(self, reading: _Reading, doing: str, shards: Sequence[int], origin: str, generation: ViewNumber) -> None:
        url, name = located(origin, self._url)
        store = SnapshotStore(url)
        manifest = patiently(lambda: store.load(name), self._say, doing, reading.pause)
        for index in shards:
            reading.wait_for_room()
            record = patiently(
                lambda index=index: next(store.read(manifest, (index,))), self._say, doing, reading.pause  # type: ignore[misc]
            )
            self._put(Restored(record, generation))
