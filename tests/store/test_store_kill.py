"""Kill the writer at any moment: what it said was committed is there, and everything that is there verifies."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from samples import take

from rallypoint.store.snapshots import Retention, SnapshotStore
from rallypoint.testing.processes import fork_server

KILLS = 20


def write_until_killed(root: str, version: int, attempt: int, said: Connection) -> None:
    store = SnapshotStore(root)
    while True:
        version += 1
        take(store, version, attempt, compression="none")
        said.send(version)
        store.retain(Retention(keep_last=2))


@pytest.mark.slow
def test_killed_at_any_moment_the_last_committed_snapshot_is_whole(tmp_path: Path) -> None:
    context = fork_server()
    moments = random.Random(7)
    store = SnapshotStore(str(tmp_path))
    version = 0
    for attempt in range(KILLS):
        listening, said = context.Pipe(duplex=False)
        writer = context.Process(target=write_until_killed, args=(str(tmp_path), version, attempt, said))
        writer.start()
        said.close()
        committed = listening.recv()
        time.sleep(moments.uniform(0.0, 0.1))  # any moment will do: whatever it is, the promise holds
        writer.kill()
        writer.join()
        while True:
            try:
                committed = listening.recv()
            except (EOFError, OSError):
                break
        listening.close()
        writer.close()

        found = store.latest_usable(pytest.fail)
        assert found is not None
        assert found.version >= committed > version
        for manifest in store.manifests():
            store.verify(manifest)
        version = found.version
    take(store, version + 1, KILLS)
    store.retain(Retention(keep_last=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", f"step-{version + 1:08d}-{KILLS}"]
