"""The page of a run that is under way: `rallypoint run --watch` serves it, and it ends with the run."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch.folder import COORDINATOR_LOCK
from rallypoint.launch.observing import beside
from rallypoint.launch.observing.beside import Companion, check_page
from rallypoint.launch.options import RunOptions
from rallypoint.watch.app import HEADER
from rallypoint.watch.follow import EVENTS
from support.beside import until
from support.members import script
from support.programs import Program

WAITS = 'while micro.step == 5 and not pathlib.Path("gate").exists(): time.sleep(0.01)'


long = partial(until, within=100.0, pause=0.05)  # on a busy machine a run's processes may take a minute to start


class Reader:
    """A browser that reads the page's news."""

    def __init__(self, address: str) -> None:
        where, token = address.removeprefix("http://").split("/?token=")
        self._connection = http.client.HTTPConnection(where, timeout=240)
        self._connection.request("GET", "/news", headers={HEADER: token})
        self._stream = self._connection.getresponse()

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        while True:
            line = self._stream.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: ") and wanted(json.loads(line[6:])):
                return

    def close(self) -> None:
        self._connection.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_in_a_terminal_the_page_is_served_unless_an_option_says_no(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    served = lambda **options: RunOptions(folder=str(tmp_path), **options).run(["python"]).watch  # noqa: E731
    assert [served(), served(watch=True), served(watch=False)] == [terminal, True, False]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not served()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Program]:
    (tmp_path / "train.py").write_text(script(8, before=WAITS))
    argv = ["-m", "rallypoint.cli", "run", "--watch", "--servers", "1", "--folder", "job", "train.py"]
    program = Program(argv, tmp_path / "out", {**os.environ, "COLUMNS": "200"}, tmp_path)
    yield program
    program.kill()
    program.wait()


def address_of(run: Program, out: Path) -> str:
    told = lambda: out.read_text() if out.exists() else ""  # noqa: E731
    long(lambda: re.search(r"the page of job: (\S+)", told()) is not None or run.poll() is not None, told)
    found = re.search(r"the page of job: (\S+)", told())
    assert found is not None, told()
    return found[1]


def refuses(address: str) -> bool:
    host, _, port = address.removeprefix("http://").partition("/")[0].partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=20).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.slow
def test_a_page_shows_a_run_from_its_start_over_a_coordinator_s_death_to_its_end(run: Program, tmp_path: Path) -> None:
    address = address_of(run, tmp_path / "out")
    browser = Reader(address)
    try:
        browser.until(lambda news: news["step"] == 5)
        os.kill(int((tmp_path / "job" / COORDINATOR_LOCK).read_text().split()[1]), signal.SIGKILL)
        long(lambda: "starting another" in (tmp_path / "out").read_text(), (tmp_path / "out").read_text)
        (tmp_path / "gate").touch()
        browser.until(lambda news: bool(news["ended"] == "finished" and news["step"] == 8))
    finally:
        browser.close()
    assert run.wait(100.0) == 0
    assert refuses(address)


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_page_with_it(run: Program, tmp_path: Path) -> None:
    address = address_of(run, tmp_path / "out")
    assert not refuses(address)
    run.kill()
    until(lambda: refuses(address), "the page is still served")


# ---- the process alone ----


def said(process: Companion) -> str:
    lines: list[str] = []

    def any_said() -> bool:
        lines.extend(process.said())
        return bool(lines)

    long(any_said, lambda: "it says nothing")
    return lines[0]


@pytest.mark.slow
def test_the_page_s_process_says_where_it_is_once_and_ends_when_it_is_closed(tmp_path: Path) -> None:
    (tmp_path / EVENTS).touch()
    process = Companion("watch", str(tmp_path), what="the page cannot be served")
    try:
        process.start()
        process.start()
        line = said(process)
        assert line.startswith(f"the page of {tmp_path}: http://127.0.0.1:")
        assert not refuses(line.rpartition(" ")[2])
    finally:
        process.close()
    assert refuses(line.rpartition(" ")[2])
    assert process.said() == []
    process.start()
    process.close()


def test_a_page_that_is_not_wanted_is_no_process() -> None:
    process = Companion("watch", "nowhere", what="", wanted=False)
    process.start()
    assert process.said() == []
    process.close()


def test_a_page_that_cannot_be_served_says_why_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nosuch"))
    process = Companion("watch", str(tmp_path), what="the page cannot be served")
    process.start()
    assert process.said() == ["the page cannot be served: No such file or directory"]
    process.close()


def test_without_its_packages_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunOptions(watch=True).run(["train.py"]).watch
    monkeypatch.setattr(beside.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install .*uvicorn"):
        check_page()
