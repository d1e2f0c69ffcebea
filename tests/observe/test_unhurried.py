"""Output that nobody reads holds nobody up, and takes little memory."""

from __future__ import annotations

import logging
import os
import re
import threading

import pytest

from rallypoint.observe.lenient import Unhurried
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
        reader = threading.Thread(target=lambda: said.extend(read_all(reading)))
        reader.start()
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
        reader = threading.Thread(target=lambda: said.extend(read_all(reading)))
        reader.start()
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
