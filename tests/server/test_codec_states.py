"""What a server does with codec states beside relaying them: copies for snapshots, and what a snapshot gives back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rallypoint as rp
from rallypoint.codec.build import ShardCodecStates
from rallypoint.codec.spec import Bf16, Int8
from rallypoint.config import ranks_of, resolve
from rallypoint.core.layout import Layout, TensorSpec, build_layout
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.frames import AHEAD, COPY, Header, Kind
from rallypoint.observe.trace import Tracer
from rallypoint.server.snapshots import SnapshotCapture, StateRelay
from rallypoint.store.record import ShardRecord, decode_record, encode_record

REPLICAS = 2
GENERATION = ViewNumber(1, 1)
Frame = tuple[str, Header, bytes | None]


class Server:
    """One, primary of everything, in a job of two replicas and two shards, of which the first has codec states."""

    def __init__(self) -> None:
        groups = (rp.Group(match=("tail",), codec=Bf16()),)
        config = resolve({"codec": Int8(), "groups": groups, "network.shard_bytes": 4096, "replicas": REPLICAS})
        specs = [TensorSpec("head", (1000,), "float32", 0), TensorSpec("tail", (1000,), "float32", 2)]
        self.layout: Layout = build_layout(specs, config.network.shard_bytes, ranks_of(config))
        self.formats = ShardCodecStates(config)
        self.sent: list[Frame] = []
        self.codec_states = StateRelay("server0", self.formats, REPLICAS, self._send)
        (self.shard,) = self.formats.among(self.layout)
        self.adopt(1)

    def _send(self, worker: str, header: Header, payload: memoryview | None) -> None:
        self.sent.append((worker, header, None if payload is None else bytes(payload)))

    def adopt(self, count: int, generation: ViewNumber = GENERATION) -> None:
        workers = tuple(Member(name, "here", incarnation=1) for name in ("a", "b"))
        primary = dict.fromkeys(range(len(self.layout.shards)), "server0")
        self.codec_states.adopt(View(ViewNumber(1, count), generation, workers, (), (), primary))

    def copy(self, replica: int, step: int, data: bytes, base: int = COPY) -> None:
        header = Header(Kind.CODEC_STATE, shard=self.shard, replica=replica, step=step, base=base, codec=3)
        header = header._replace(length=len(data))
        self.codec_states.copied(header, memoryview(data))

    def record(self, version: int) -> ShardRecord:
        record = ShardRecord(self.shard, version, {"master": np.zeros(1000, np.float32)}, {})
        assert self.codec_states.awaited(record, self.layout.shards[self.shard])
        return record


def kept_state(record: ShardRecord | None) -> dict[int, bytes]:
    return {replica: array.tobytes() for replica, array in record.codec_states.items()}


def test_a_record_waits_for_the_copies_of_all_replicas() -> None:
    server = Server()
    server.record(4)
    assert server.codec_states.complete(server.shard, at_last=False) is None
    server.copy(1, 3, b"one")
    assert server.codec_states.complete(server.shard, at_last=False) is None
    server.copy(0, 3, b"nil")
    assert kept_state(server.codec_states.complete(server.shard, at_last=False)) == {0: b"nil", 1: b"one"}
    assert server.codec_states.complete(server.shard, at_last=True) is None  # it is put once


@pytest.mark.parametrize(("early", "late", "at_last", "kept"), [
    ([(0, 3, b"nil"), (1, 3, b"one")], [], False, {0: b"nil", 1: b"one"}),
    ([], [(0, 3, b"nil"), (0, 3, b""), (1, 3, b"")], False, {0: b"nil"}),
    ([], [(1, 3, b"one"), (0, 2, b"of another version")], True, {1: b"one"}),
], ids=["copies before the snapshot is asked for", "who begins without a state replaces no copy",
        "the next update ends the wait for what was lost with a worker"])  # fmt: skip
def test_a_record_has_the_copies_that_count(
    early: list[Any], late: list[Any], at_last: bool, kept: dict[int, bytes]
) -> None:
    server = Server()
    for copy in early:
        server.copy(*copy)
    server.record(4)
    for copy in late:
        server.copy(*copy)
    assert kept_state(server.codec_states.complete(server.shard, at_last=at_last)) == kept


def capturing(
    server: Server, put: list[ShardRecord], is_last: Callable[..., bool] = lambda *_: False, **parts: Any
) -> tuple[SnapshotCapture[Any], ShardRecord]:
    """What copies shards for a snapshot, and the record that it copies."""
    record = ShardRecord(server.shard, 4, {"master": np.zeros(1000, np.float32)}, {})
    abandon = parts.pop("abandon", None)
    writer: Any = SimpleNamespace(takes_records=True, put=put.append, copy=lambda record: record, abandon=abandon)
    job: Any = SimpleNamespace(versions_are_common=True, shards=server.layout.shards, **parts)
    tracer, states = Tracer("server0"), server.codec_states
    return SnapshotCapture(writer, job, states, lambda *_: record, tracer, lambda: None, is_last), record


def test_a_shard_that_is_copied_after_all_copies_came_is_stored_at_once() -> None:
    """While the job is paused nothing comes later that could complete it."""
    server, put = Server(), list[ShardRecord]()
    capture, _ = capturing(server, put)
    for replica in range(REPLICAS):
        server.copy(replica, 3, b"it")
    capture.wanted(server.shard, 4)
    capture.copy_one()
    assert [list(kept.codec_states) for kept in put] == [[0, 1]]


def test_a_codec_state_that_is_a_step_ahead_comes_back_as_what_it_is() -> None:
    """The worker had contributed to step 4 before it was asked for version 4: it has that contribution with it."""
    server = Server()
    server.copy(0, 3, b"nil")
    server.copy(1, 3, b"one", base=AHEAD)
    server.copy(1, 3, b"of a worker that was assigned the replica later")
    server.record(4)
    stored = server.codec_states.complete(server.shard)
    assert kept_state(stored) == {0: b"nil", 1: b"one"}
    assert stored is not None
    record = decode_record(encode_record(stored, "none"))
    server.codec_states.restored(record, server.layout.shards[server.shard])
    for replica in range(REPLICAS):
        server.codec_states.recalled(Header(Kind.RECALL, shard=server.shard, replica=replica), "a", 4)
    assert [header.step for _, header, _ in server.sent] == [3, 4]


@pytest.mark.parametrize("quorum", [None, 1])
def test_a_snapshot_is_lost_if_a_copy_has_not_come_before_the_next_update(quorum: int | None) -> None:
    """The worker has contributed before it heard of the snapshot, or its link broke. With a quorum it may be slow."""
    server, put, abandoned = Server(), list[ShardRecord](), list[bool]()
    config = SimpleNamespace(quorum=quorum)
    capture, _ = capturing(server, put, config=config, abandon=lambda: abandoned.append(True))
    for copies in ((0, 1), (0,)):
        for replica in copies:
            server.copy(replica, 3, b"it")
        capture.wanted(server.shard, 4)
        lost = capture.before_update(server.shard)
        assert lost == bool(abandoned) == (len(copies) == 1 and quorum is None)
    assert [list(kept.codec_states) for kept in put] == [[0, 1], *([] if quorum is None else [[0]])]
    assert not capture.before_update(server.shard)


@pytest.mark.parametrize("known", [True, False])
def test_nobody_waits_for_codec_states_at_the_last_version(known: bool) -> None:
    """`run.stop()` ends the job there; the view says so before the shard is copied, or after."""
    server, put = Server(), list[ShardRecord]()
    last = {4} if known else set[int]()
    capture, record = capturing(server, put, lambda shard, version: version in last)
    capture.wanted(server.shard, 4)
    capture.copy_one()
    assert bool(put) == known
    capture.viewed()
    assert bool(put) == known
    last.add(4)
    capture.viewed()
    assert put == [record]


@pytest.mark.parametrize("roll_back", [False, True])
def test_an_abandoned_snapshot_is_not_put_and_stale_copies_do_not_count(roll_back: bool) -> None:
    server = Server()
    server.record(4)
    server.copy(0, 3, b"nil")
    server.codec_states.abandon()
    assert server.codec_states.complete(server.shard, at_last=True) is None
    server.adopt(2, ViewNumber(1, 2) if roll_back else GENERATION)
    server.record(4)
    assert kept_state(server.codec_states.complete(server.shard, at_last=True)) == ({} if roll_back else {0: b"nil"})


def test_a_shard_whose_codec_has_no_state_is_not_waited_for() -> None:
    server = Server()
    other = next(shard for shard in server.layout.shards if shard.index != server.shard)
    assert not server.codec_states.awaited(ShardRecord(other.index, 4, {}, {}), other)


def test_a_codec_state_from_a_snapshot_goes_to_the_worker_that_is_assigned_the_replica() -> None:
    server = Server()
    record = ShardRecord(server.shard, 4, {}, {}, codec_states={1: np.frombuffer(b"one", np.uint8)})
    server.codec_states.restored(record, server.layout.shards[server.shard])
    for replica in range(REPLICAS):
        server.codec_states.recalled(Header(Kind.RECALL, shard=server.shard, replica=replica), "a", 4)
    code = server.formats.of(server.layout.shards[server.shard]).code
    nothing = Header(Kind.CODEC_STATE, shard=server.shard, replica=0)
    there = Header(Kind.CODEC_STATE, shard=server.shard, replica=1, step=3, codec=code, length=3)
    assert server.sent == [("a", nothing, None), ("a", there, b"one")]


def test_a_worker_that_gives_a_codec_state_is_told_that_it_is_taken_and_the_next_worker_gets_it() -> None:
    server = Server()
    header = Header(Kind.CODEC_STATE, shard=server.shard, replica=1, step=3, codec=3, length=3)
    server.codec_states.contributed(Header(Kind.PUSH, shard=server.shard, replica=1, step=3), "a", 3)
    server.codec_states.recalled(Header(Kind.RECALL, shard=server.shard, replica=1), "b", 4)
    assert server.sent == []  # "a" may still give what it has
    server.codec_states.given(header, memoryview(b"one"), "a", 4)
    taken = Header(Kind.TAKEN, shard=server.shard, replica=1, step=3)
    assert server.sent == [("a", taken, None), ("b", header, b"one")]
