"""What stays and what goes; the newest usable snapshot stays whatever is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import records, take

from rallypoint.errors import ConfigError, SnapshotFailed
from rallypoint.store.manifest import snapshot_id
from rallypoint.store.snapshots import Retention, SnapshotStore


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(str(tmp_path))


def folders(store: SnapshotStore) -> list[int]:
    """Versions of the folders that are there, of snapshots and of attempts."""
    return [int(path.name.split("-")[1]) for path in sorted(Path(store.url).glob("step-*"))]


@pytest.mark.parametrize(
    ("retention", "keep", "left"),
    [
        (Retention(), [], [40, 50, 60]),
        (Retention(keep_last=1), [], [60]),
        (Retention(keep_last=0), [], [60]),
        (Retention(keep_last=99), [], [10, 20, 30, 40, 50, 60]),
        (Retention(keep_last=1, keep_best="loss"), [], [30, 60]),
        (Retention(keep_last=1, keep_best="loss", best_is="max"), [], [10, 60]),
        (Retention(keep_last=1, keep_best="accuracy"), [], [60]),
        (Retention(keep_last=1), [snapshot_id(20, 1)], [20, 60]),
    ],
)
def test_what_stays(store: SnapshotStore, retention: Retention, keep: list[str], left: list[int]) -> None:
    for version, loss in ((10, 5.0), (20, 4.0), (30, 1.0), (40, float("nan")), (50, 2.0), (60, 3.0)):
        take(store, version, metrics={"loss": loss})
    store.retain(retention, keep)
    assert folders(store) == left
    found = store.latest_usable(pytest.fail)
    assert found.version == 60


def test_attempts_that_came_to_nothing_go_and_those_under_way_stay(store: SnapshotStore) -> None:
    store.write_part(snapshot_id(10, 1), "a", records(10), "none")
    take(store, 20)
    store.write_part(snapshot_id(15, 2), "a", records(15), "none")
    store.write_part(snapshot_id(30, 1), "a", records(30), "none")
    store.retain(Retention(), keep=[snapshot_id(15, 2)])
    assert folders(store) == [15, 20, 30]


def test_an_attempt_below_a_course_that_was_given_up_is_under_way(store: SnapshotStore) -> None:
    for version in (50, 100):
        take(store, version)
    take(store, 60, attempt=2)  # went on from 50
    store.write_part(snapshot_id(70, 2), "a", records(70), "none")
    store.retain(Retention(keep_last=2))
    assert folders(store) == [50, 60, 70]


@pytest.mark.parametrize("file", ["server0-0.shards", "manifest.json"])
def test_the_newest_usable_stays_when_newer_ones_are_damaged(store: SnapshotStore, file: str) -> None:
    for version in (1, 2, 3, 4):
        take(store, version)
    for version in (3, 4):
        path = Path(store.url) / snapshot_id(version, 1) / file
        path.write_bytes(path.read_bytes()[:-1])
    store.retain(Retention(keep_last=1))
    found = store.latest_usable(lambda _: None)
    assert found.version == 2


def test_nothing_is_deleted_while_nothing_is_usable(store: SnapshotStore) -> None:
    for version in (1, 2, 3):
        take(store, version)
        (Path(store.url) / snapshot_id(version, 1) / "server0-0.shards").unlink()
    store.retain(Retention(keep_last=1))
    assert folders(store) == [1, 2, 3]


def test_other_files_are_left_alone_and_leftovers_are_not(store: SnapshotStore) -> None:
    take(store, 1)
    root = Path(store.url)
    (root / "notes").mkdir()
    (root / "step-by-step.txt").write_text("mine")
    (root / ".latest.0123.partial").write_bytes(b"st")
    store.retain(Retention(keep_last=1))
    assert sorted(path.name for path in root.iterdir()) == ["latest", "notes", snapshot_id(1, 1), "step-by-step.txt"]


def test_half_deleted_is_not_committed(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    take(store, 1)
    take(store, 2)

    def refuse(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    with monkeypatch.context() as killed:
        killed.setattr(store._files, "remove_folder", refuse)
        with pytest.raises(SnapshotFailed, match="step-00000001-1 cannot be deleted: Permission denied"):
            store.retain(Retention(keep_last=1))
    assert [manifest.version for manifest in store.manifests()] == [2]
    store.retain(Retention(keep_last=1))
    assert folders(store) == [2]


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep_last=-1"):
        Retention(keep_last=-1)
