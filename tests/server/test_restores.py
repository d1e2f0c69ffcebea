"""Shards are read from a snapshot beside the owner's thread, which takes events and views meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_server import FIRST, LAYOUT, SECOND, OneServer

from rallypoint.codec.spec import Int8
from rallypoint.config import resolve
from rallypoint.core.protocol import Unrestored
from rallypoint.core.view import ViewNumber
from rallypoint.errors import DamagedSnapshot
from rallypoint.net.frames import Header, Kind
from rallypoint.server import inbox
from rallypoint.server.snapshots import READ_AHEAD, Restores
from rallypoint.store import files
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotStore
from support.beside import Hanging, until
from support.gathering import Once, gathering, reference_hash

THIRD = ViewNumber(1, 3)
AN_HOUR_S = 3600.0


class Store:
    """A store of two snapshots, "one" and "two", whose only shard is filled with 1 or with 2; or it does not answer."""

    def __init__(self) -> None:
        self.silent = {"one"}

    def load(self, origin: str) -> str:
        return origin

    def read(self, manifest: str, shards: tuple[int, ...]) -> Iterator[ShardRecord]:
        if manifest in self.silent:
            raise files.StoreSilent(f"snapshot {manifest} cannot be read: timed out")
        for shard in shards:
            yield record(manifest, shard)


def record(origin: str, shard: int = 0) -> ShardRecord:
    words, value = LAYOUT.shards[shard].words, {"one": 1.0, "two": 2.0}[origin]
    arrays = {name: np.full(words, value, np.float32) for name in ("master", "exp_avg", "exp_avg_sq")}
    return ShardRecord(shard, 3, arrays, {"step": 3.0})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(files, "DELAYS_S", (AN_HOUR_S,))
    monkeypatch.setattr(SnapshotStore, "load", lambda self, origin: store.load(origin))
    monkeypatch.setattr(SnapshotStore, "read", lambda self, manifest, shards: store.read(manifest, shards))
    return store


@pytest.fixture
def server(store: Store, tmp_path: Path) -> Iterator[OneServer]:
    server = OneServer(snapshots=str(tmp_path))
    yield server
    server.reducer.close()


@pytest.fixture
def with_codec_states(store: Store, tmp_path: Path) -> Iterator[OneServer]:
    server = OneServer(resolve({"replicas": 2, "steps": 5, "codec": Int8()}), snapshots=str(tmp_path))
    yield server
    server.reducer.close()


def next_of(server: OneServer) -> inbox.Event:
    until(lambda: bool(server.queued))
    return server.queued.pop(0)


def master(server: OneServer) -> float:
    owned: Any = server.reducer._owned[0]
    return float(owned.master[0])


def test_another_roll_back_ends_a_restore_that_waits_for_its_store(server: OneServer) -> None:
    server.adopt(FIRST)
    server.adopt(SECOND, "one")
    until(lambda: bool(server.context.sentences))
    assert server.context.sentences[0].endswith("timed out; trying again in 3600 s")
    server.adopt(THIRD, "two")  # the owner's thread is free for it, though "one" is to be read again in an hour
    server.reducer.handle(next_of(server))
    assert (server.version, master(server)) == (3, 2.0)
    began = time.monotonic()
    server.reducer.close()
    assert time.monotonic() - began < 10.0
    assert server.queued == []


def test_a_manifest_that_cannot_be_read_for_a_moment_costs_no_job(
    server: OneServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "DELAYS_S", (0.0,))
    store.silent.clear()
    silent = [True]

    def load(origin: str) -> str:
        if silent:
            silent.pop()
            raise files.StoreSilent("the bucket cannot be read: timed out")
        return origin

    monkeypatch.setattr(store, "load", load)
    server.adopt(FIRST)
    server.adopt(SECOND, "one")
    server.reducer.handle(next_of(server))
    assert (server.version, master(server)) == (3, 1.0)
    assert server.context.sentences == [
        "s restores 1 shard from snapshot one: the bucket cannot be read: timed out; trying again in 0 s"
    ]


def test_no_more_records_are_read_than_the_owner_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large job's shards would fill the memory a second time."""
    shards = range(12)
    monkeypatch.setattr(SnapshotStore, "load", lambda self, origin: origin)
    monkeypatch.setattr(SnapshotStore, "read", lambda self, manifest, shards: (
        ShardRecord(shard, 3, {}, {}) for shard in shards))  # fmt: skip
    waiting: list[inbox.Event] = []
    at_once: list[int] = []

    def put(event: inbox.Event) -> None:
        waiting.append(event)
        at_once.append(len(waiting))

    restores = Restores("s", "memory://", put, lambda text: None)
    restores.begin(shards, "one", SECOND)
    until(lambda: len(waiting) == READ_AHEAD)
    for _ in shards:
        until(lambda: bool(waiting))
        waiting.pop(0)
        restores.left_the_inbox()
    restores.close()
    assert len(at_once) == len(shards)
    assert max(at_once) == READ_AHEAD


def test_what_was_read_for_an_older_generation_is_dropped(server: OneServer, store: Store) -> None:
    store.silent.clear()
    server.adopt(FIRST)
    server.adopt(SECOND, "one")
    stale = next_of(server)
    server.adopt(THIRD, "two")
    current = next_of(server)
    server.reducer.handle(stale)
    server.reducer.handle(inbox.RestoreFailed(OSError("gone"), SECOND))
    assert server.version == -1
    server.reducer.handle(current)
    assert (server.version, master(server)) == (3, 2.0)


def test_a_snapshot_that_cannot_be_read_ends_the_generation_that_begins_with_it(
    server: OneServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "DELAYS_S", ())
    server.adopt(FIRST)
    server.adopt(SECOND, "one")
    with pytest.raises(files.SnapshotError, match="go on with `rallypoint resume`"):
        server.reducer.handle(next_of(server))


def test_a_snapshot_that_was_damaged_after_it_was_verified_is_told_of_and_another_one_loaded(
    server: OneServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.silent.clear()
    read = store.read

    def damaged(manifest: str, shards: tuple[int, ...]) -> Iterator[ShardRecord]:
        if manifest == "one":
            raise DamagedSnapshot("snapshot one is damaged: file 0 has other bytes")
        return read(manifest, shards)

    monkeypatch.setattr(store, "read", damaged)
    server.adopt(FIRST)
    server.adopt(SECOND, "one")
    server.reducer.handle(next_of(server))
    told = Unrestored("snapshot one is damaged: file 0 has other bytes", SECOND)
    assert server.context.said.pop() == told
    server.reducer.handle(inbox.AdmissionCame(False))  # by a coordinator that may not have heard it
    assert server.context.said.pop() == told
    server.adopt(THIRD, "two")
    server.reducer.handle(next_of(server))
    assert (server.version, master(server)) == (3, 2.0)
    server.context.said.clear()
    server.reducer.handle(inbox.AdmissionCame(False))
    assert told not in server.context.said


def test_a_shard_is_restored_once(server: OneServer, store: Store) -> None:
    """A second record of the same generation would take back what was applied since."""
    store.silent.clear()
    server.adopt(FIRST)
    server.adopt(SECOND, "one")
    server.reducer.handle(next_of(server))
    server.reducer.handle(inbox.Restored(record("two"), SECOND))
    assert master(server) == 1.0


def test_a_codec_state_that_is_recalled_meanwhile_is_answered_from_the_snapshot(with_codec_states: OneServer) -> None:
    """An answer before the shard is there would say that there is none: the replica would begin with other bytes."""
    server = with_codec_states
    channel: Any = server.channel
    server.reducer.handle(inbox.Linked(channel, "w"))
    server.adopt(FIRST)
    server.adopt(SECOND, "one")
    server.reducer.handle(inbox.StateRecalled(channel, "w", Header(Kind.RECALL, SECOND, shard=0, replica=1)))
    assert server.channel.frames == []
    stored = record("one")
    stored.codec_states[1] = np.frombuffer(b"state", np.uint8)
    server.reducer.handle(inbox.Restored(stored, SECOND))
    (answer,) = server.channel.frames
    assert (answer.replica, answer.step, answer.length) == (1, 2, 5)


@pytest.mark.slow
def test_a_server_lost_while_restores_wait_costs_another_roll_back_and_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store does not answer two servers after the first loss; one of them goes on after the second."""
    read: Callable[..., Any] = SnapshotStore.read
    silent = [True, True]
    monkeypatch.setattr(files, "DELAYS_S", (AN_HOUR_S,))

    def reads(self: SnapshotStore, *of: Any) -> Any:
        if silent:
            silent.pop()
            raise files.StoreSilent("the bucket cannot be read: timed out")
        return read(self, *of)

    with gathering(3, tmp_path) as cluster:

        def lose() -> None:
            monkeypatch.setattr(SnapshotStore, "read", reads)
            cluster.servers[2].close()
            until(lambda: len([said for said in cluster.sentences() if "restores" in said]) == 2)
            cluster.servers[1].close()

        trap = Once(4, 1, lose)
        assert cluster.add_worker(trap).result() == reference_hash()
        assert trap.done


def test_a_recall_of_an_older_generation_makes_nobody_the_owner(with_codec_states: OneServer) -> None:
    """Else its worker, which asks again, would keep another from the codec state."""
    server = with_codec_states
    channel: Any = server.channel
    server.reducer.handle(inbox.Linked(channel, "w"))
    server.adopt(FIRST)
    server.adopt(SECOND)
    server.reducer.handle(inbox.StateRecalled(channel, "w", Header(Kind.RECALL, FIRST, shard=0, replica=1)))
    assert server.channel.frames == []
    server.reducer.handle(inbox.StateRecalled(channel, "w", Header(Kind.RECALL, SECOND, shard=0, replica=1)))
    assert len(server.channel.frames) == 1


def test_a_store_that_hangs_during_a_restore_does_not_keep_the_server_from_ending(
    server: OneServer, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "END_PATIENCE_S", 0.05)
    monkeypatch.setattr(store, "load", hangs := Hanging())
    server.adopt(FIRST)
    server.adopt(SECOND, "one")
    hangs.keeps_nobody(server.reducer.close)
    assert [said.getMessage() for said in caplog.records] == [
        "given up: s restores 1 shard from snapshot one. The job is over, and the store has not answered for 0.05 s"
    ]
