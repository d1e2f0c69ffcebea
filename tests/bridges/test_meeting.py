"""Where torch's processes meet, under ``rallypoint run``: rank 0 chooses, the others read it in the run's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.bridges import joining
from rallypoint.launch import environment
from rallypoint.worker.loop.session import Job

COORDINATOR = "127.0.0.1:4700"


class Worker(Job):
    """A worker that has joined nothing."""

    def __init__(self, id: str, folder: Path) -> None:
        self.id, self.welcome = id, SimpleNamespace(folder=str(folder))


def write(folder: Path, port: int) -> None:
    (folder / joining.MEETING).write_text(json.dumps({"job": COORDINATOR, "host": "127.0.0.1", "port": port}))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_of_an_earlier_run_in_the_same_folder_at_the_same_address_is_not_believed(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator with a fixed address, such as a service of Kubernetes, is started again."""
    written: list[int] = []

    def all_have_come(job: Job, **place: Any) -> object:
        if rank:
            write(tmp_path, 2222)  # rank 0 has chosen before it joined
        written.append(json.loads((tmp_path / joining.MEETING).read_text())["port"])
        return object()

    write(tmp_path, 1111)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", environment.RANKS, environment.SUMS):
        monkeypatch.setenv(name, "")  # to be as it was after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv(environment.COORDINATOR, COORDINATOR)
    monkeypatch.setenv(environment.WORKERS, "2")
    monkeypatch.setattr(joining, "_joined", [])
    monkeypatch.setattr(joining, "join_cluster", lambda: Worker(f"worker{rank}", tmp_path))
    monkeypatch.setattr(joining, "Sums", all_have_come)
    monkeypatch.setattr(joining, "_end_with_the_script", lambda made: None)
    joining.sums()
    assert os.environ["RANK"] == str(rank)
    assert written != [1111]
    assert os.environ["MASTER_PORT"] == str(written[0])
