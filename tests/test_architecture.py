"""The two walks of docs/architecture.md: each hop is a function that a gradient, or a version, really passes."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch

import rallypoint as rp
from rallypoint.launch.embedded import EmbeddedJob

HOME = Path(rp.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
MOST = {"First walk": 14, "Second walk": 9}  # hops


def hops(walk: str) -> list[tuple[str, list[str]]]:
    """The rows of a walk's table, in order: the file, and the functions of which the hop passes at least one."""
    (text,) = re.findall(rf"^## {walk}.*?(?=^## |^### )", PAGE.read_text(), re.M | re.S)
    rows = re.findall(r"^\| (\d+) \| `([^`]+)` \| ([^|]+) \|", text, re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    return [(file, re.findall("`([^`]+)`", functions)) for _, file, functions in rows]


@pytest.fixture(scope="module")
def called() -> set[tuple[str, str]]:
    """The functions that a job in one process calls, as (file, name)."""
    found: set[tuple[str, str]] = set()

    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(HOME)):
            found.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    before = threading.getprofile()
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        with EmbeddedJob(servers=2) as job:  # (of one server nothing travels: the model is stepped where it lies)
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
            data = [torch.ones(8)] * 16
            for micro in job.train(model, data, replicas=1, batch=1, steps=6, optimizer=rp.SGD(lr=0.1)):
                with micro:
                    micro.backward(model(micro.batch).square().mean())
    finally:
        sys.setprofile(None)
        threading.setprofile(before)
    return found


@pytest.mark.parametrize("walk", MOST)
def test_a_job_passes_every_hop(walk: str, called: set[tuple[str, str]]) -> None:
    table = hops(walk)
    assert 0 < len(table) <= MOST[walk]
    missed = [
        f"{file}: {functions}" for file, functions in table
        if not any((str(HOME / file), name) in called for name in functions)
    ]  # fmt: skip
    assert not missed, f"{walk}: a job does not pass {missed}"
