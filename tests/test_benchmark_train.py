"""What the training benchmark makes of its members' words, and the limit that it sets beside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # its modules import one another by name

from cluster import Case
from train import by_step
from train_member import Result


def test_a_step_begins_with_its_last_worker_wherever_its_replicas_are() -> None:
    before = Result(steps=[0, 1, 2, 2], began=[0.0, 1.0, 2.0, 2.7], losses=[4.0, 3.0, 2.0, 1.0], peak_bytes=0)
    moved = Result(steps=[0, 1], began=[0.5, 0.9], losses=[6.0, 5.0], peak_bytes=0)
    assert by_step([before, moved]) == ([0.5, 1.0, 2.0], [5.0, 4.0, 1.5])


@pytest.mark.parametrize(
    ("case", "copies", "seconds"),
    [
        (Case(4, 4, None), 4, 0.0),
        (Case(4, 4, 1000.0), 0, 0.8),
        (Case(4, 4, 1000.0), 4, 0.8),
        (Case(4, 4, 1000.0), 5, 1.0),  # with replication servers carry every gradient once more
        (Case(4, 5, 1000.0), 5, 0.8),
        (Case(4, 4, 1000.0, 1250.0), 5, 0.8),
        (Case(4, 2, 1000.0), 4, 1.6),
    ],
)
def test_a_step_takes_at_least_what_the_busiest_link_takes(case: Case, copies: int, seconds: float) -> None:
    assert case.wire_seconds(100_000_000, copies) == pytest.approx(seconds)
