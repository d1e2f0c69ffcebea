"""The picture at a recipe's end."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.core.protocol import Planned
from rallypoint.errors import to_install
from rallypoint.recipes import picture
from rallypoint.recipes.picture import chart

PLANNED = Planned(20, 2, "samples", 100, 3, ("w0",), ("s0",))


def log(folder: Path, steps: int) -> None:
    done = [{"type": "StepDone", "step": step, "loss": 1 / (step + 1), "items": 1} for step in range(steps)]
    events: list[dict[str, Any]] = [msgspec.to_builtins(PLANNED), *done]
    events.append({"type": "Metrics", "step": steps, "values": {"val_loss": 0.5}})
    lines = [json.dumps({"t": 0.0, **event}, separators=(",", ":")) for event in events]
    (folder / "events.jsonl").write_text("\n".join([*lines, '{"t": 1.0, "type": "Metrics", "st']))


def test_a_picture_shows_losses(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log(tmp_path, 20)
    said = picture.save_picture(tmp_path)
    *drawn, sentence = said.splitlines()
    assert sentence == f"a picture of the losses: {tmp_path / 'picture.png'}"
    assert [line for line in drawn if line.endswith(":")] == ["loss:"]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_log_or_steps_has_no_picture(tmp_path: Path) -> None:
    assert picture.save_picture(tmp_path).startswith("no picture: only a run under")
    log(tmp_path, 1)
    assert picture.save_picture(tmp_path) == "no picture: the log has too few steps"
    assert not (tmp_path / "picture.png").exists()


def test_without_matplotlib_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(tmp_path, 5)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    *drawn, sentence = picture.save_picture(tmp_path).splitlines()
    assert sentence == f"for a picture of the losses: {to_install('plots')}"
    assert drawn[:3] == ["", "loss:", "  1 |*"]  # in characters it is there all the same


def test_a_chart_falls_from_the_highest_value_to_the_lowest() -> None:
    assert chart({step: 4.0 - step for step in range(4)}, rows=4) == [
        "4 |*", "  | *", "  |  *", "1 |   *", "   0  3 (step)",
    ]  # fmt: skip
    assert all(len(line) < 80 for line in chart(dict.fromkeys(range(10_000), 1.0)))


def test_values_that_are_not_finite_are_left_out_of_a_chart() -> None:
    assert chart({0: 2.0, 1: math.nan, 2: 1.0, 3: math.inf}, rows=2) == ["2 |*", "1 | *", "   0 2 (step)"]
    assert chart({0: math.nan}) == []
