"""Streamed parameters under kills: the same bytes as the same job with parameters on its workers, undisturbed.

(A killed worker is in the walk of FEATURE x MODE.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.core.modes import Feature, ModeName

sys.path.insert(0, str(Path(__file__).parent.parent / "modes"))

from cell_jobs import CellJob, Play
from test_walk import (
    Walk,
    a_server_with_a_backup_is_killed,
    a_straggler_is_helped_and_killed,
    a_worker_is_killed,
    everybody_with_the_state_is_killed,
    the_whole_job_is_killed_and_resumed,
    undisturbed,
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[list[Walk]]:
    walks: list[Walk] = []
    yield walks
    for walk in walks:
        walk.close()


@pytest.mark.slow
def test_the_bytes_are_those_of_parameters_on_the_workers() -> None:
    assert undisturbed(ModeName.SYNC, (Feature.STREAMED,)) == undisturbed(ModeName.SYNC, ())


@pytest.mark.slow
@pytest.mark.parametrize(("happens", "feature"), [
    (a_worker_is_killed, Feature.BUFFERS),
    (a_server_with_a_backup_is_killed, Feature.REPLICATION),
    (everybody_with_the_state_is_killed, Play.SNAPSHOTS),
    (the_whole_job_is_killed_and_resumed, Play.RESUME),
    (a_straggler_is_helped_and_killed, Feature.BACKUP_TASKS),
], ids=lambda value: getattr(value, "__name__", None))
def test_whatever_is_killed_the_bytes_are_the_same(
    happens: object, feature: Feature | Play, home: list[Walk], tmp_path: Path
) -> None:
    home.append(Walk(tmp_path, CellJob(ModeName.SYNC, (Feature.STREAMED, feature))))
    assert callable(happens)
    happens(home[-1])
