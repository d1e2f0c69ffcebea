"""Codec states of replicas that move from one worker to another. See `core/shard/relay.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rallypoint.codec.state import CodecState, ShardCodecStates
from rallypoint.core.layout import Shard
from rallypoint.core.shard.relay import Answer, Relay
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.handover import Key
from rallypoint.net.frames import Header, Kind
from rallypoint.store.record import ShardRecord

Send = Callable[[str, Header, memoryview | None], None]


class CodecStates:
    """Runs `Relay` on frames. Not thread-safe: only the owner thread calls it.

    `send(worker, header, payload)` queues a frame to a connected worker and fills in the view's number. For each shard
    that is primary here, it holds at most one codec state of each replica, and one copy for a snapshot. Workers send
    the copy before they contribute to the version that is stored.
    """

    def __init__(self, me: str, formats: ShardCodecStates, replicas: int, send: Send) -> None:
        self._relay: Relay[CodecState] = Relay(me)
        self._formats, self._replicas, self._send = formats, replicas, send
        self._generation: ViewNumber | None = None
        self._copies: dict[Key, CodecState] = {}
        self._records: dict[int, ShardRecord] = {}  # for a snapshot, complete except for codec states

    def adopt(self, view: View) -> None:
        """Adopt a new view."""
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
        """A copy arrived for a snapshot of the version after its step."""
        self._copies[header.shard, header.replica] = CodecState(header.step, header.codec, data)

    def awaited(self, record: ShardRecord, place: Shard) -> bool:
        """The shard was copied for a snapshot. Returns True if the record is kept here until `complete`."""
        if not self._formats.has(place):
            return False
        self._records[record.shard] = record
        return True

    def complete(self, index: int, *, at_last: bool) -> ShardRecord | None:
        """The kept record of this shard, once all copies are here. `at_last`: with the copies that are here."""
        record = self._records.get(index)
        if record is None:
            return None
        copies = {r: self._copies.get((index, r)) for r in range(self._replicas)}
        there = {r: c for r, c in copies.items() if c is not None and c.step == record.version - 1}
        if len(there) < self._replicas and not at_last:
            return None
        del self._records[index]
        for replica in there:
            del self._copies[index, replica]
        return replace(record, codec_states={r: np.frombuffer(c.data, np.uint8) for r, c in there.items()})

    def abandon(self) -> None:
        """The snapshot was stopped."""
        self._records.clear()

    def restored(self, record: ShardRecord, place: Shard) -> None:
        """A shard was read from a snapshot, with its codec states. Workers with these replicas will ask for them."""
        for replica, array in record.codec_states.items():
            step = record.version - 1
            codec_state = CodecState(step, self._formats.of(place).code, array.data)
            self._relay.restored(record.shard, replica, step, codec_state)

    def _tell(self, answers: Sequence[Answer[CodecState]]) -> None:
        for worker, shard, replica, step, codec_state in answers:
            header = Header(Kind.CODEC_STATE, shard=shard, replica=replica, step=step)
            if codec_state is not None:
                header = header._replace(codec=codec_state.code, length=len(codec_state.data))
            self._send(worker, header, None if codec_state is None else codec_state.data)
