"""The process of a worker that is a group: one failure domain, whichever rank ends and however."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rallypoint.launch.engines.ranks import grouped
from support.beside import until

# Each rank writes its pid, then does what its argument says: ends with a status, or by a signal, or waits
SCRIPT = """
import os, pathlib, signal, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / f"told-{rank}").touch())
(folder / f"new-{rank}").write_text(str(os.getpid()))
(folder / f"new-{rank}").rename(folder / f"pid-{rank}")
what = sys.argv[2 + rank]
while len(list(folder.glob("pid-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.005)
while what == "waits" or what == "until told" and not (folder / f"told-{rank}").exists():
    time.sleep(0.005)
sys.exit(int(what) if what.isdigit() else 0)
"""


class Group:
    """A group whose ranks do what their words say."""

    def __init__(self, folder: Path, *words: str, **options: Any) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        argv = grouped((sys.executable, str(folder / "script.py"), str(folder), *words), len(words))
        self.process = subprocess.Popen(argv, **options)
        until(lambda: len(list(folder.glob("pid-*"))) == len(words) or self.process.poll() is not None)
        self.pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(len(words))]

    def ends(self) -> int:
        status = self.process.wait(60)
        assert not any(psutil.pid_exists(pid) for pid in self.pids), "a rank is left behind"
        return status


def test_a_group_whose_ranks_all_end_well_ends_well(tmp_path: Path) -> None:
    assert Group(tmp_path, "0", "0", "0").ends() == 0


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_group_by_the_same_signal(tmp_path: Path, victim: int) -> None:
    group = Group(tmp_path, "waits", "waits", "waits")
    os.kill(group.pids[victim], signal.SIGKILL)
    assert group.ends() == -signal.SIGKILL


def test_an_error_of_the_leader_ends_the_group_with_its_status(tmp_path: Path) -> None:
    assert Group(tmp_path, "3", "waits").ends() == 3


def test_after_an_error_of_another_rank_the_leader_may_end_by_itself(tmp_path: Path) -> None:
    group = Group(tmp_path, "until told", "4")
    os.kill(group.pids[0], signal.SIGTERM)
    assert group.ends() == 4


def test_sigterm_goes_to_the_leader_alone(tmp_path: Path) -> None:
    group = Group(tmp_path, "until told", "0")
    group.process.send_signal(signal.SIGTERM)
    assert group.ends() == 0
    assert [path.name for path in tmp_path.glob("told-*")] == ["told-0"]


def test_an_interrupt_ends_the_group_without_a_word_of_its_own(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        group = Group(tmp_path, "waits", "waits", start_new_session=True, stderr=errors)
        os.killpg(group.process.pid, signal.SIGINT)
        assert group.ends() == -signal.SIGINT
    assert "script.py" in (tmp_path / "errors").read_text()
    assert "ranks.py" not in (tmp_path / "errors").read_text()


def test_ranks_end_when_their_group_s_process_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import pathlib, os, sys, time\nfrom rallypoint.launch.lifeline import hold_lifeline\n"
        "assert hold_lifeline()\npathlib.Path(sys.argv[1], 'pid-' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(grouped((sys.executable, str(tmp_path / "script.py"), str(tmp_path)), 2))
    pids = [tmp_path / "pid-0", tmp_path / "pid-1"]
    until(lambda: all(path.exists() and path.read_text() for path in pids))
    process.kill()
    process.wait()
    until(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pids))
