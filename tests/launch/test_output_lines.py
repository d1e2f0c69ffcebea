"""What a process prints becomes lines, and takes little memory meanwhile."""

from __future__ import annotations

import pytest

from rallypoint.launch.engines import local
from rallypoint.launch.engines.local import Lines


def test_lines_come_when_they_are_whole() -> None:
    cut = Lines()
    assert cut.feed(b"a\nb\r\n\nc") == ["a", "b", ""]
    assert cut.feed(b"d\n") == ["cd"]
    assert cut.rest() == []
    assert cut.feed(b"the last") == []
    assert cut.rest() == ["the last"]


def test_of_a_progress_bar_its_last_state_is_shown() -> None:
    cut = Lines()
    assert cut.feed(b"10%\r20%\r") == []
    assert cut.feed(b"100%\nbegin\r 1%") == ["100%"]
    assert cut.rest() == [" 1%"]


def test_a_progress_bar_without_an_end_takes_no_memory() -> None:
    cut = Lines()
    for n in range(1000):
        assert cut.feed(b"\r%03d%s" % (n, b"#" * 100)) == []
    assert len(cut._rest) == 103
    assert cut.rest() == ["999" + "#" * 100]


def test_a_line_without_an_end_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LONGEST", 4)
    cut = Lines()
    assert cut.feed(b"abcdefghij") == ["abcd", "efgh"]
    assert cut.feed(b"kl\nm") == ["ijkl"]
    assert cut.rest() == ["m"]
