"""The page in a real browser: it draws, it shows a worker's death, and goes on when the coordinator is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_watch_run import address_of, long

from rallypoint.launch.folder import COORDINATOR_LOCK
from support.browser import NAMES, Tab, browser, executable
from support.members import script
from support.programs import Program

WAITS = 'while micro.step >= len(pathlib.Path("open").read_bytes()): time.sleep(0.01)'
STEPS = 30

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not executable(), reason=f"no browser here: none of {', '.join(NAMES)} is installed"),
]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Program]:
    (tmp_path / "train.py").write_text(script(30, before=WAITS))
    opened(tmp_path, 5)
    argv = ["-m", "rallypoint.cli", "run", "--watch", "--workers", "2", "--servers", "1", "--folder", "job", "train.py"]
    program = Program(argv, tmp_path / "out", {**os.environ, "COLUMNS": "200"}, tmp_path)
    yield program
    program.kill()
    program.wait()


@pytest.fixture
def tab() -> Iterator[Tab]:
    with browser() as tab:
        yield tab


def opened(folder: Path, steps: int) -> None:
    """Let the script do this many steps."""
    (folder / "new").write_bytes(b"." * steps)
    (folder / "new").replace(folder / "open")


def kill_member(run: Program, name: str) -> None:
    next(one for one in psutil.Process(run.pid).children(recursive=True) if one.name() == name).kill()


def painted(tab: Tab, member: str, state: str) -> bool:
    """Has the last column of this member's row the colour of that state?"""
    return bool(
        tab.evaluate(f"""(() => {{
        const canvas = one("members").firstElementChild, row = run.members.findIndex((row) => row.id === "{member}");
        const y = (row * 18 + 8) * devicePixelRatio, probe = document.createElement("canvas").getContext("2d");
        probe.fillStyle = colour("{state}");
        probe.fillRect(0, 0, 1, 1);
        const here = canvas.getContext("2d").getImageData(canvas.width - 2, y, 1, 1).data;
        return String(here) === String(probe.getImageData(0, 0, 1, 1).data);
    }})()""")
    )


def test_the_page_draws_shows_a_death_and_goes_on_after_the_coordinator_s(
    run: Program, tab: Tab, tmp_path: Path
) -> None:
    tab.open(address_of(run, tmp_path / "out"))
    tab.until("run.step === 5 && charts['curves loss'].data[0].length === 5")
    assert tab.evaluate("document.getElementById('figures').textContent").startswith("step5 of 30")
    assert tab.evaluate("document.querySelectorAll('.uplot canvas').length") >= 3
    assert painted(tab, "worker1", "computing")

    kill_member(run, "worker1")
    tab.until("run.marks.some((mark) => mark.kind === 'loss' && mark.text === 'without worker1')")
    assert painted(tab, "worker1", "gone")
    opened(tmp_path, 12)
    tab.until("run.step === 12 && charts['curves loss'].data[0].length === 12")

    os.kill(int((tmp_path / "job" / COORDINATOR_LOCK).read_text().split()[1]), signal.SIGKILL)
    long(lambda: "coordinator was killed" in (tmp_path / "out").read_text(), (tmp_path / "out").read_text)
    opened(tmp_path, STEPS)
    tab.until("run.ended === 'finished'")
    assert tab.evaluate("[run.step, charts['curves loss'].data[0].length]") == [STEPS, STEPS]
    assert tab.evaluate("document.getElementById('status').textContent").startswith("finished")
    assert tab.errors == []
    assert run.wait(100.0) == 0
