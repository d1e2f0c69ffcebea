"""Output that nobody reads holds nobody up, and takes little memory; what cannot be printed ends nobody's work."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rallypoint.launch.console import Screen
from rallypoint.observe.lenient import Lenient, Unhurried, encode_all, flush_output, say
from rallypoint.observe.lines import _MOST_KEYS, _SAME_S, Sparingly, printable_lines

LEFT_OUT = r"\((\d+) lines were left out here: nobody read the output, or there was no room\)\n"


def read_all(fd: int) -> list[str]:
    with os.fdopen(fd) as file:
        return file.readlines()


def test_what_is_not_read_waits_in_order_and_too_much_is_left_out_with_a_sentence() -> None:
    reading, writing = os.pipe()
    lines = [f"line {n} {'x' * 90}\n" for n in range(10_000)]
    with os.fdopen(writing, "w") as file:
        output = Unhurried(file, most=200_000)
        for line in lines:
            output.write(line)  # a pipe takes 64 KiB: this would wait for ever
        assert not output.end(0.0)
        said: list[str] = []
        (reader := threading.Thread(target=lambda: said.extend(read_all(reading)))).start()
        assert output.end(None)
    reader.join()
    at = 0
    for line in said:
        if (left_out := re.fullmatch(LEFT_OUT, line)) is None:
            assert line == lines[at]
        at += 1 if left_out is None else int(left_out[1])
    assert at == len(lines)
    assert len(said) < 5_000  # what the pipe and the room take
    output._thread.join()


def test_output_that_does_not_wait_itself_loses_nothing() -> None:
    """Who shares a terminal or a pipe with us may have made it non-blocking, for all who have it open."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    lines = [f"line {n} {'x' * 90}\n" for n in range(3_000)]  # a pipe takes 64 KiB
    with os.fdopen(writing, "w") as file:
        output = Unhurried(file)
        for line in lines:
            output.write(line)
        assert not output.end(0.05), "the pipe is full"
        said: list[str] = []
        (reader := threading.Thread(target=lambda: said.extend(read_all(reading)))).start()
        assert output.end(None)
        output._thread.join()
    reader.join()
    assert said == lines


def test_a_reader_that_is_gone_is_told_of_and_not_waited_for() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        output = Unhurried(file)
        os.close(reading)
        output.write("first\n")
        assert output.end(None)
        with pytest.raises(BrokenPipeError):
            output.write("second\n")
        output._thread.join()


# ---- Lines that others cause: few of them, and the same one not again and again ----


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def lines(clock: list[float], caplog: pytest.LogCaptureFixture) -> Sparingly:
    caplog.set_level(logging.WARNING, logger="rallypoint")
    return Sparingly(burst=1000, clock=lambda: clock[0])


def test_the_same_line_is_written_once_in_a_while(
    lines: Sparingly, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for port in range(5):
        lines.warn(f"h:{port} has said nothing", key="h has said nothing")
    lines.warn("g:1 has said nothing", key="g has said nothing")
    clock[0] = _SAME_S
    lines.warn("h:6 has said nothing", key="h has said nothing")
    assert caplog.messages == [
        "h:0 has said nothing", "g:1 has said nothing (4 more such lines before)", "h:6 has said nothing",
    ]  # fmt: skip


def test_of_lines_that_were_left_out_at_last_one_is_shown(lines: Sparingly, caplog: pytest.LogCaptureFixture) -> None:
    """Other lines come between: `done: ...` of a coordinator, say."""
    for port in range(3):
        lines.warn(f"h:{port} has said nothing", key="h has said nothing")
    lines.close()
    assert caplog.messages == ["h:0 has said nothing", "2 more such lines, the last: h:2 has said nothing"]


def test_lines_stay_lines_and_command_no_terminal() -> None:
    assert printable_lines("one\x1b[2J\ntwo" + "o" * 1000) == "one\\x1b[2J\ntwo" + "o" * 1000


def test_lines_without_a_key_are_all_written(lines: Sparingly, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        lines.warn("the same")
    assert caplog.messages == ["the same"] * 3


def test_only_so_many_keys_are_kept(lines: Sparingly) -> None:
    for number in range(3 * _MOST_KEYS):
        lines.warn("a line", key=number)
    assert len(lines._written) == _MOST_KEYS


# ---- Output that cannot be printed ends nobody's work ----


FULL = Path("/dev/full")  # a file on a disk without room


@pytest.mark.parametrize(("encoding", "shown"), [
    ("latin-1", "gr\xfc?e ? ?\n"), ("ascii", "gr??e ? ?\n"), ("utf-8", "gr\xfcŋe \ufffd \u2713\n"),
])  # fmt: skip
def test_a_character_that_the_stream_cannot_encode_is_replaced(encoding: str, shown: str) -> None:
    written = io.BytesIO()
    output = Lenient(io.TextIOWrapper(written, encoding=encoding))
    output.write("gr\xfcŋe \ufffd \u2713\n")
    output.flush()
    assert written.getvalue().decode(encoding) == shown


def test_a_line_for_which_there_is_no_room_is_left_out() -> None:
    for line_buffering in (True, False):
        file = os.fdopen(os.open(FULL, os.O_WRONLY), "w")
        output = Lenient(file)
        file.reconfigure(line_buffering=line_buffering)
        output.write("one line\n")
        output.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # what it still holds
        file.close()
        output.write("it is closed\n")
        output.flush()


def test_that_nobody_reads_is_told() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        output = Lenient(file)
        output.write("a line\n")
        with pytest.raises(BrokenPipeError):
            output.flush()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), file.fileno())


@pytest.mark.parametrize("stream", ["full", "closed", "gone", "none"])
def test_a_process_says_what_it_can_and_goes_on(stream: str) -> None:
    prepare = {
        "full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", "closed": "sys.stdout.close()",
        "gone": "r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w)", "none": "sys.stdout = None",
    }[stream]  # fmt: skip
    code = f"import os, sys; from rallypoint.observe.lenient import *; {prepare}; say('a line'); flush_output()"
    done = subprocess.run([sys.executable, "-c", f"{code}; os._exit(7)"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (7, b"")


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_process_that_was_started_without_streams_makes_no_pipe_in_their_place(closed: str, tmp_path: Path) -> None:
    """A child has its own standard input under that number: what it was given there was lost."""
    code = (
        "import os, sys; from rallypoint.observe.lenient import *; open_standard_streams(); print('fine', flush=True); "
        "open(sys.argv[1], 'w').write(f'{min(os.pipe()) > 2} {sys.stdin.read()!r}')"
    )
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, str(tmp_path / "said")]
    subprocess.run(shell, capture_output=True, check=True)
    assert (tmp_path / "said").read_text() == "True ''"


def test_what_a_role_says_is_printed_at_once_whatever_its_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error, name in ((False, "stdout"), (True, "stderr")):
        written = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding="ascii"))
        say("worker \xfc has joined", error=error)
        assert written.getvalue() == b"worker ? has joined\n"
        monkeypatch.undo()


def test_commands_print_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    encode_all()
    print("\u2713 done")
    flush_output()
    assert written.getvalue() == b"? done\n"


def test_a_screen_shows_what_the_stream_takes() -> None:
    written = io.BytesIO()
    screen = Screen(file=io.TextIOWrapper(written, encoding="latin-1"), highlight=False)
    screen.print("step 1: \ufffd")
    assert written.getvalue() == b"step 1: ?\n"
    with FULL.open("w") as full:
        Screen(file=full, highlight=False).print("step 2")  # no OSError
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_unhurried_output_goes_on_when_the_disk_has_room_again(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        real = os.dup(file.fileno())
        os.dup2(os.open(FULL, os.O_WRONLY), file.fileno())
        output = Unhurried(file)
        output.write("lost\n")
        assert output.end(60)  # it was tried, and nobody is told that the reader is gone
        os.dup2(real, file.fileno())
        os.close(real)
        output = Unhurried(file)
        output._left_out = 1
        output.write("kept\n")
        assert output.end(60)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "kept"
