"""Output that nobody reads holds nobody up, and takes little memory."""

from __future__ import annotations

import os
import re
import threading

import pytest

from rallypoint.observe.lenient import Unhurried

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
