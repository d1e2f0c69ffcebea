"""A process's trace: written at its end, and no reason to fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rallypoint.observe.trace import Tracer
from rallypoint.own_files import OpenFolder


def traced() -> Tracer:
    tracer = Tracer("worker0")
    tracer.on = True
    with tracer.span("wait", step=3):
        pass
    return tracer


def test_spans_are_written_as_one_file(tmp_path: Path) -> None:
    traced().save(tmp_path)
    (file,) = tmp_path.iterdir()
    assert [event["name"] for event in json.loads(file.read_text())["traceEvents"]] == ["wait"]


def test_without_a_span_there_is_no_file(tmp_path: Path) -> None:
    Tracer("worker0").save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced().save(tmp_path / "gone")
    assert "the trace of worker0 cannot be written to" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
    assert "No such file or directory" in said


def test_a_full_disk_is_a_sentence_and_leaves_no_part_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: OpenFolder, name: str, mode: int) -> None:
        with make(folder, name, mode):
            raise OSError(28, "No space left on device")

    make = OpenFolder.make
    monkeypatch.setattr(OpenFolder, "make", full)
    traced().save(tmp_path)
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
