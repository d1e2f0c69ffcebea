"""A stream's passes and the job's steps: whichever is over first ends the job."""

from __future__ import annotations

from rallypoint.core.order import stream_looks_ahead, stream_reads, stream_unread


def test_nobody_looks_for_the_end_without_passes_nor_at_the_last_step() -> None:
    assert [stream_looks_ahead(2, step, 4) for step in range(4)] == [True, True, True, False]
    assert not any(stream_looks_ahead(0, step, 4) for step in range(4))


def test_what_is_said_at_the_beginning_names_both() -> None:
    assert stream_reads(3, 1000, given=True) == "the stream is read passes=3 times, for 1000 steps at most"
    assert stream_reads(3, 1000, given=False).endswith(" (steps= is not given)")
    assert stream_reads(0, 1000, given=True) == ""


def test_at_the_end_nothing_is_claimed_that_nobody_knows() -> None:
    """The stream may end with the last step too: nobody has looked."""
    assert stream_unread(3, 8).startswith("the job's 8 steps are over, and its stream, with passes=3, may not be")
    assert stream_unread(0, 8) == ""
