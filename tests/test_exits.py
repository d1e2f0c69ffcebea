"""How processes end: no thread of ours is left that would abort the interpreter's end, from which torch cannot recover.

Real interpreters: the forked ones of `support.programs` skip their end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HELD = """
import sys, threading, torch
from rallypoint.launch.commands.by_hand import end_process

def hold(began):
    square = torch.zeros(400, 400)
    while True:
        torch.mm(square, square, out=square)
        began.set()

torch.set_num_threads(1)
if sys.argv[2] == "held":
    began = threading.Event()
    threading.Thread(target=hold, args=(began,), daemon=True).start()
    began.wait()
print("the last line")
end_process(int(sys.argv[1]))
"""
SCRIPT = """
import torch, rallypoint as rp
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
job = rp.join()
for micro in job.train(model, data, replicas=2, batch=4, steps=3):
    with micro:
        micro.backward(model(micro.batch[0]).square().mean())
    if micro.step == %d:
        break
"""
# Exit functions run in the reverse order of their registration: this one runs last
LEFT = """
import atexit, os, threading

def left():
    if (name := os.environ.get("RALLYPOINT_ID")):
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        open(os.path.join(os.environ["LEFT"], name), "w").write(",".join(names))

atexit.register(left)
"""


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """The environment in which every named Python process writes which threads it has left at its end."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LEFT)
    (tmp_path / "left").mkdir()
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "LEFT": str(tmp_path / "left")}


def left_by(name: str, watched: dict[str, str]) -> set[str]:
    """The threads that the process has left, without those that only block in a call or are about to end."""
    names = set(filter(None, (Path(watched["LEFT"]) / name).read_text().split(",")))
    # A closed link's own thread ends by itself, and calls nothing of ours until then (`net.dialer`)
    return {thread for thread in names if thread != "lifeline" and not thread.startswith("link to ")}


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("how", ["held", "free"])
def test_a_role_ends_with_its_status_also_when_a_thread_that_it_has_given_up_is_inside_of_torch(
    tmp_path: Path, status: int, how: str
) -> None:
    done = python("-c", HELD, str(status), how, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "the last line\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("last", [2, 1], ids=["to its end", "and broken off"])
def test_a_job_joined_without_with_leaves_no_thread_at_the_script_s_end(
    tmp_path: Path, watched: dict[str, str], last: int
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT % last)
    done = python("script.py", cwd=tmp_path, **watched, RALLYPOINT_ID="script")
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_by("script", watched) == set()


@pytest.mark.slow
def test_no_role_leaves_a_thread_at_its_end(tmp_path: Path, watched: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT % 99)
    size = ("--workers", "2", "--servers", "2", "--replication", "2", "--aggregators", "1")
    done = python("-m", "rallypoint.cli", "run", *size, "--folder", "run", "script.py", cwd=tmp_path, **watched)
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["aggregator0", "coordinator", "server0", "server1", "worker0", "worker1"]
    assert {name: left_by(name, watched) for name in names} == {name: set() for name in names}
