"""A place for snapshots that cannot be used is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch.folder import refuse_unwritable_snapshots


def test_a_place_where_no_snapshot_can_be_written_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written to .*/file/deep: Not a directory; choose another"):
        refuse_unwritable_snapshots(str(tmp_path / "file" / "deep"))


@pytest.mark.parametrize("place", ["", "new/deep"])
def test_a_place_where_snapshots_can_be_written_is_left_as_it_is(tmp_path: Path, place: str) -> None:
    refuse_unwritable_snapshots(str(tmp_path / place))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("elsewhere", ["", "memory://nobody/asks"])
def test_no_snapshots_and_those_of_other_filesystems_are_not_tried(elsewhere: str) -> None:
    refuse_unwritable_snapshots(elsewhere)
