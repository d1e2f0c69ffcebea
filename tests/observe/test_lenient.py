"""Output that cannot be printed ends nobody's work."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.launch.console import Screen
from rallypoint.observe.lenient import Lenient, Unhurried, encode_all, flush_output, say

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
