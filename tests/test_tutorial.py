"""The tutorial is played as it stands: its files are saved, and its commands run in one shell, in their order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.programs, pytest.mark.slow, pytest.mark.timeout(600)]
PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"


def played() -> str:
    """All of the page as one script. It tells the pids of what it has started when it ends."""
    text = PAGE.read_text()
    files = dict(re.findall(r"^Save this as `([\w.]+)`.*?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert sorted(files) == ["train.py", "use.py"]
    for name, code in files.items():
        Path(name).write_text(code)
    commands = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "set -eu\n" + "".join(commands).replace("RUN=$!\n", "RUN=$!\necho $RUN >> started\n")


def end_what_is_left(home: Path) -> None:
    started = home / "started"
    for pid in map(int, started.read_text().split()) if started.exists() else []:
        try:
            launcher = psutil.Process(pid)
            left = [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in left:
            process.send_signal(signal.SIGKILL)


def test_the_tutorial_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "120"}
    script, printed = tmp_path / "script.sh", tmp_path / "printed"
    script.write_text(played())
    try:
        with printed.open("w") as to:
            done = subprocess.run(["bash", script], env=env, stdout=to, stderr=subprocess.STDOUT, timeout=540)
    finally:
        end_what_is_left(tmp_path)
    output = printed.read_text()
    assert done.returncode == 0, output
    log = (tmp_path / "run1.log").read_text()
    for name in ("worker0", "server0", "coordinator"):
        assert f"{name} was killed (SIGKILL): starting another" in log
    assert "going on from step " in output
    assert output.endswith("the same bytes\n")


def test_the_notebook_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Its cells as one program. (In Jupyter it is played by hand.)"""
    cells = json.loads((PAGE.parents[1] / "examples/tutorial.ipynb").read_text())["cells"]
    program = tmp_path / "cells.py"
    program.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    alone, cluster = re.findall(r"^weights sha256 (\w{64})$", done.stdout, re.MULTILINE)
    assert alone == cluster
    for name in ("worker", "server"):
        assert re.search(rf"{name}\d was killed \(SIGKILL\): starting another", done.stdout)
    assert re.search(r"^\d\d% right$", done.stdout, re.MULTILINE)
