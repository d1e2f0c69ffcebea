"""Hugging Face Accelerate's own scripts, in two workers whose process group is Rallypoint's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.programs import run_program

SCRIPT = """
import runpy
import torch.distributed as dist
from accelerate import PartialState
import rallypoint.bridges.c10d
from rallypoint.bridges.joining import sums

dist.init_process_group("rallypoint")
PartialState(cpu=True)
runpy.run_module("accelerate.test_utils.scripts.NAME", run_name="__main__", alter_sys=True)
print(f"RESULT {sums().reducer.made}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["test_sync", "test_script", "test_ops"])
def test_accelerate_s_own_scripts_end_well(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("NAME", name))
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    status, text = run_program(
        ["-m", "rallypoint.cli", "run", "--workers", "2", "--servers", "1", "train.py"],
        tmp_path / "out", env=env, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert status == 0, text
    ended = re.findall(r"RESULT (\d+)", text)
    assert len(ended) == 2, text
    assert min(map(int, ended)) > 0, "servers have made no sums"
