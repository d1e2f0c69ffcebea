"""Traces: written at the end of a process, which is no reason to fail; several become one."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from rallypoint.observe.trace import Tracer, merge
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


# ---- Spans of several processes become one trace that viewers open ----


def test_nothing_is_recorded_while_off(tmp_path: Path) -> None:
    tracer = Tracer("w0")
    with tracer.span("step"):
        pass
    tracer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_merged_file_is_a_chrome_trace(tmp_path: Path) -> None:
    for process in ("worker0", "server0"):
        tracer = Tracer(process)
        tracer.on = True
        with tracer.span("step", step=3), tracer.span("push", shard=1):
            pass
        thread = threading.Thread(target=lambda tracer=tracer: tracer.add("wait", 5_000, 9_000, {}), name="link")
        thread.start()
        thread.join()
        tracer.save(tmp_path)
    parts = sorted(tmp_path.glob("trace-*.json"))
    assert [part.name for part in parts] == ["trace-server0.json", "trace-worker0.json"]
    assert merge(parts, tmp_path / "all.json") == 6

    trace = json.loads((tmp_path / "all.json").read_text())
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    labels = [event for event in events if event["ph"] == "M"]
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert len(spans) == 6
    assert len(spans) + len(labels) == len(events)
    for span in spans:
        assert {"name", "ph", "ts", "dur", "pid", "tid", "args"} <= span.keys()
        assert isinstance(span["pid"], int)
        assert isinstance(span["tid"], int)
        assert span["ts"] >= 0
        assert span["dur"] >= 0
    assert min(span["ts"] for span in spans) == 0
    processes = {label["pid"]: label["args"]["name"] for label in labels if label["name"] == "process_name"}
    threads = {
        (label["pid"], label["tid"]): label["args"]["name"] for label in labels if label["name"] == "thread_name"
    }
    assert sorted(processes.values()) == ["server0", "worker0"]
    assert sorted(threads.values()) == ["MainThread", "MainThread", "link", "link"]
    assert {(span["pid"], span["tid"]) for span in spans} == threads.keys()
    assert all(threads[span["pid"], span["tid"]] == "link" for span in spans if span["name"] == "wait")


def test_a_trace_of_nothing_is_still_a_trace(tmp_path: Path) -> None:
    assert merge([], tmp_path / "all.json") == 0
    assert json.loads((tmp_path / "all.json").read_text())["traceEvents"] == []


def test_spans_of_some_names_are_counted_all_the_time_and_recorded_only_while_on(tmp_path: Path) -> None:
    tracer = Tracer("w0")
    tracer.count("wait", "load")
    assert tracer.phases == {"wait": (0, 0.0), "load": (0, 0.0)}
    for name in ("wait", "push", "wait"):
        with tracer.span(name):
            pass
    count, seconds = tracer.phases["wait"]
    assert count == 2
    assert seconds > 0.0
    tracer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    tracer.on = True
    with tracer.span("wait"):
        pass
    assert tracer.phases["wait"][0] == 3
    tracer.save(tmp_path)
    assert [event["name"] for event in json.loads((tmp_path / "trace-w0.json").read_text())["traceEvents"]] == ["wait"]
