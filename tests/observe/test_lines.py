"""Lines that others cause: few of them, and the same one not again and again."""

from __future__ import annotations

import logging

import pytest

from rallypoint.observe.lines import _MOST_KEYS, _SAME_S, Sparingly, printable_lines


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
