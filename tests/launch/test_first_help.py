"""What `--help` says first, and that nothing of its words is taken for markup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.programs import run_program

pytestmark = pytest.mark.programs
ENV = {**os.environ, "COLUMNS": "200"}


def test_help_begins_with_how_to_run_a_script_and_a_recipe(tmp_path: Path) -> None:
    status, text = run_program(["-m", "rallypoint.cli", "--help"], tmp_path / "output", env=ENV)
    assert status == 0
    assert text.index("Run a script on") < text.index("Train a ready-made recipe") < text.index("Say what a job would")


def test_help_names_extras_in_their_brackets(tmp_path: Path) -> None:
    status, text = run_program(["-m", "rallypoint.cli", "run", "--help"], tmp_path / "output", env=ENV)
    assert status == 0
    assert "rallypoint[watch] is installed" in " ".join(text.replace("│", " ").split())
