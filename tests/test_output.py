"""An error that several workers end with is shown once; everything else is shown as it comes."""

from __future__ import annotations

from rallypoint.errors import StartAgain
from rallypoint.launch.console import Output
from rallypoint.launch.engines.cluster import Exit

BOOM = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    boom()", "ValueError: {}"]


def say(output: Output, process: str, lines: list[str], now: float = 0.0) -> list[str]:
    return [line.text for text in lines for line in output.line(process, text, now)]


def boom(what: str) -> list[str]:
    return [line.format(what) for line in BOOM]


def test_ordinary_lines_are_shown_at_once() -> None:
    assert say(Output(), "worker0", ["one", "two"]) == ["one", "two"]


def test_a_traceback_that_all_workers_end_with_is_shown_once_and_the_others_are_named() -> None:
    output = Output()
    for n in range(3):
        assert say(output, f"worker{n}", boom(f"replica {n}")) == []
    assert [line.text for line in output.ended("worker1", 0.0)] == boom("replica 1")
    assert output.ended("worker0", 0.0) == output.ended("worker2", 0.0) == []
    assert output.summary() == ["worker0, worker2 ended with the same error as worker1"]


def test_of_very_many_workers_with_one_error_some_are_named() -> None:
    output = Output()
    for n in range(1000):
        say(output, f"worker{n}", boom("a"))
        output.ended(f"worker{n}", 0.0)
    assert output.summary() == [
        "worker1, worker2, worker3, worker4, worker5 and 994 more ended with the same error as worker0"
    ]


def test_errors_from_other_places_are_others() -> None:
    output = Output()
    say(output, "worker0", boom("a"))
    say(output, "worker1", [line.replace("line 3", "line 9") for line in boom("a")])
    assert len(output.ended("worker0", 0.0)) == len(output.ended("worker1", 0.0)) == 4
    assert output.summary() == []


def test_a_message_of_several_lines_is_part_of_the_error() -> None:
    output, lines = Output(), [*boom("first"), "second line", "", "third"]
    assert say(output, "worker0", lines) == []
    assert [line.text for line in output.ended("worker0", 0.0)] == lines


SENTENCE = "replicas must be positive"


def ours() -> Output:
    """Three workers have ended with the same sentence of ours, at time 1."""
    output = Output()
    for name in ("worker0", "worker1", "worker2"):
        assert say(output, name, [f"error: {SENTENCE}"]) == output.ended(name, 1.0) == []
    return output


def test_a_sentence_that_differs_only_in_its_replica_is_shown_once() -> None:
    output = Output()
    for n in (0, 1):
        assert say(output, f"worker{n}", [f"error: the loss of replica {n} at step 7 is nan"]) == []
        assert output.ended(f"worker{n}", 1.0) == []
    assert output.sentence_of("worker1") == "the loss of replica 1 at step 7 is nan"
    assert output.rest("worker1: the loss of replica 1 at step 7 is nan") == []
    assert output.summary() == ["worker1 ended with the same error as worker0"]


def test_a_sentence_of_ours_that_failed_the_run_stands_in_the_last_line_only() -> None:
    assert ours().rest(f"worker1: {SENTENCE}") == []


def test_a_sentence_of_ours_is_shown_once_when_the_last_line_says_something_else() -> None:
    output = ours()
    assert output.due(1.5) == []
    assert [line.text for line in output.rest("worker0 ended with status 1")] == [f"error: {SENTENCE}"]
    assert output.rest("worker0 ended with status 1") == []
    assert output.sentence_of("worker2") == SENTENCE
    assert output.sentence_of("worker3") == ""


def test_a_sentence_of_ours_that_did_not_end_the_run_is_shown_while_it_goes_on() -> None:
    output = ours()
    assert [line.text for line in output.due(2.1)] == [f"error: {SENTENCE}"]
    assert output.due(9.0) == output.rest(f"worker1: {SENTENCE}") == []


def test_last_words_of_processes_that_end_well_are_shown_of_each() -> None:
    output, lines = Output(), ["error: 0.25", "saved"]
    for name in ("worker0", "worker1"):
        say(output, name, lines)
    shown = [line.text for name in ("worker0", "worker1") for line in output.ended(name, 0.0, well=True)]
    assert shown == [*lines, *lines]
    assert output.summary() == []


def test_a_keyboard_interrupt_is_shown_by_nobody() -> None:
    output = Output()
    say(output, "worker0", [*BOOM[:3], "KeyboardInterrupt"])
    assert output.ended("worker0", 0.0) == []


def test_a_traceback_that_was_only_logged_is_shown_when_the_process_goes_on() -> None:
    output = Output()
    say(output, "worker0", [*boom("x"), "going on"], now=1.0)
    assert output.due(3.9) == []
    assert [line.text for line in output.due(4.1)] == [*boom("x"), "going on"]
    assert say(output, "worker0", ["more"], now=4.2) == ["more"]


def test_what_processes_print_while_we_end_them_is_dropped() -> None:
    output = Output(ending=True)
    assert say(output, "worker0", ["bye", *boom("x")]) == []
    assert output.ended("worker0", 0.0) == []


def test_a_process_that_wants_another_in_its_place_may_have_drawn_a_progress_bar_before() -> None:
    output = Output()
    assert say(output, "worker0", [StartAgain.LINE]) == []
    assert say(output, "worker1", [f" 45%|####     {StartAgain.LINE}"]) == [" 45%|####"]
    how = Exit(StartAgain.STATUS)
    assert [output.exit_of(f"worker{n}", how).died for n in range(3)] == [True, True, False]
