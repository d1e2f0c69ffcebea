"""Plain training, a run from its checkpoint on real processes, plain training again: one training, byte for byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plain_training import FIRST, STEPS, going_on, half_way, same, undisturbed

from support.programs import Program

pytestmark = [pytest.mark.programs, pytest.mark.slow]

PATIENCE_S = 200.0
MIDDLE = 5
SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from plain_training import build, data, loss_of, settings
import rallypoint as rp
model = build()
with rp.join() as job:
    for micro in job.train(model, data(), **settings("adamw")):
        with micro:
            micro.backward(loss_of(model, micro.batch))
"""


def test_a_run_begins_with_a_checkpoint_and_leaves_one(tmp_path: Path) -> None:
    def rallypoint(*arguments: object) -> str:
        program = Program(
            ["-m", "rallypoint.cli", *map(str, arguments)], tmp_path / "output", {**os.environ, "COLUMNS": "200"}
        )
        try:
            assert program.wait(PATIENCE_S) == 0, (tmp_path / "output").read_text()
        finally:
            program.kill()
        return (tmp_path / "output").read_text()

    half_way("adamw", tmp_path / "plain")
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = ["--folder", run, "--servers", 2, "--workers", 1, "--set", f"steps={MIDDLE}"]
    said = rallypoint("import", *options, tmp_path / "plain", script)
    assert "with its optimizer's state, is snapshot step-00000003-1" in said
    assert f"going on from step {FIRST}" in rallypoint("resume", run)
    rallypoint("export", run, "--format", "dcp", "--to", tmp_path / "left")
    same(going_on("adamw", tmp_path / "left", range(MIDDLE, STEPS)), undisturbed("adamw"))
