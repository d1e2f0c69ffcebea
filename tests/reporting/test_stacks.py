"""Stacks of real processes: asked, stopped, killed, crashed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rallypoint.launch import environment
from rallypoint.launch.folder import STACKS
from rallypoint.launch.observing.reports import Picture, write_report
from rallypoint.launch.observing.stacks import StackOwner, processes_of
from support.beside import until

SCRIPT = """
import ctypes, sys, threading
from rallypoint.launch.observing.stacks import keep_stacks
keep_stacks("worker")
def waits_in_here():
    print("ready", flush=True)
    sys.stdin.readline()
waits_in_here()
ctypes.string_at(0)
"""
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = list[subprocess.Popen[str]]()

    def begin(name: str) -> subprocess.Popen[str]:
        env = {**os.environ, environment.STACKS: str(tmp_path / STACKS), environment.ID: name}
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_says_where_its_threads_are_and_goes_on(start: Start, tmp_path: Path) -> None:
    process = start("worker0")
    for _ in range(2):
        (said,) = processes_of(tmp_path, ask=True)
        assert "waits_in_here" in said.stacks
        assert said.stacks.count("waits_in_here") == 1  # the newest ones only
        assert (said.owner.name, said.owner.pid, said.here, said.state, said.crash) == (
            "worker0", process.pid, True, "", "",
        )
    assert process.poll() is None
    (quiet,) = processes_of(tmp_path, ask=False)
    assert "waits_in_here" in quiet.stacks


SAME_NUMBER = """
import os, pathlib, sys
from rallypoint.launch.observing.stacks import keep_stacks
first = pathlib.Path(sys.argv[1]) / f"worker0-{os.getpid()}.txt"
first.write_text('{"name":"worker0","role":"worker","pid":%d,"host":"here"}\\n' % os.getpid())
keep_stacks("worker")
"""


def test_a_restarted_container_whose_process_has_the_same_number_leaves_stacks_too(tmp_path: Path) -> None:
    (tmp_path / STACKS).mkdir()
    env = {**os.environ, environment.STACKS: str(tmp_path / STACKS), environment.ID: "worker0"}
    subprocess.run([sys.executable, "-c", SAME_NUMBER, str(tmp_path / STACKS)], env=env, check=True)
    picture = Picture(str(tmp_path), processes=processes_of(tmp_path, ask=False))
    assert len(picture.processes) == 2
    write_report(picture, tmp_path / "out")
    assert len(list((tmp_path / "out" / "stacks").iterdir())) == 2


def test_a_stopped_process_is_named_and_a_crashed_one_has_left_its_stacks(start: Start, tmp_path: Path) -> None:
    stopped, killed, crashed = start("worker0"), start("worker1"), start("worker/../2")
    stopped.send_signal(signal.SIGSTOP)
    until(lambda: "T" in Path(f"/proc/{stopped.pid}/stat").read_text().rpartition(")")[2][:3])
    killed.kill()
    killed.wait()
    crashed.communicate("\n")
    said = {process.owner.name: process for process in processes_of(tmp_path, ask=True)}
    assert (said["worker0"].state, said["worker0"].why_none) == ("stopped", "the process is stopped")
    assert (said["worker1"].here, said["worker1"].why_none) == (False, "the process has ended")
    assert said["worker/../2"].crash == "Fatal Python error: Segmentation fault"
    assert "string_at" in said["worker/../2"].stacks
    assert {path.parent for path in tmp_path.rglob("*.txt")} == {tmp_path / STACKS}


def test_no_process_is_asked_that_has_not_the_file_open(tmp_path: Path) -> None:
    """A folder of somebody else's names any process: the signal would end it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as innocent:
        (tmp_path / STACKS).mkdir()
        for name, owner in {
            "a": StackOwner("a", "worker", innocent.pid, socket.gethostname()), "b": StackOwner("b", "worker", 0, "x"),
            "c": StackOwner("c", "worker", 1, "elsewhere"), "d": StackOwner("d", "worker", 1 << 40, "elsewhere"),
        }.items():  # fmt: skip
            (tmp_path / STACKS / f"{name}.txt").write_bytes(msgspec.json.encode(owner) + b"\nsomething")
        (tmp_path / STACKS / "e.txt").write_bytes(b'{"name": "torn')
        (tmp_path / STACKS / "f.txt").symlink_to("a.txt")
        assert [said.owner.name for said in processes_of(tmp_path, ask=True)] == ["a"]
        assert innocent.poll() is None
        innocent.kill()
