"""What a person sees of a job of sums: no steps, no false alarm, a last line that says what was done."""

from __future__ import annotations

import io

from rich.console import Console

from rallypoint.launch.console import RunConsole
from rallypoint.launch.observing.beside import Beside
from rallypoint.launch.showing.sums import SumsShown
from rallypoint.net.messages import Finished, Members, Planned
from rallypoint.net.summing.messages import Summed

PLAN = Planned((1 << 31) - 1, 2, "scripts", 9, 3, ("worker0", "worker1"), ("server0", "server1"), sums=True)


def _console() -> tuple[RunConsole, io.StringIO]:
    text = io.StringIO()
    return RunConsole(Console(file=text, width=200)), text


def test_a_script_s_own_loop_is_shown_by_its_sums_and_ends_with_their_number() -> None:
    console, text = _console()
    console.show(PLAN)
    console.show(Summed(1234, 5_000_000))
    console.show(Finished("worker0", 1, "the scripts have ended"))
    console.close()
    said = text.getvalue()
    assert "2 servers add up what 2 workers ask for" in said
    assert "done: the scripts have ended, 1,234 sums of 5.0 MB for each worker in " in said
    assert "2147483647" not in said
    assert "stopped at step" not in said


def test_the_line_says_how_many_how_fast_and_how_long_ago() -> None:
    now = [100.0]
    shown = SumsShown(Console(file=io.StringIO()), PLAN, lambda: now[0])
    assert shown.line() == "no sum so far"
    now[0] = 102.0
    shown.take(Summed(10, 4_000_000))
    now[0] = 102.2
    shown.take(Summed(10, 4_000_000))  # a sign of life is no news
    assert shown.line() == "10 sums, 2.0 MB/s, last 0.2 s ago"


def test_a_sign_of_life_between_two_sums_is_heard_so_no_silence_is_warned_of() -> None:
    console, text = _console()
    console.show(PLAN)
    console.heard -= 60.0
    console._silence_said -= 60.0
    console.show(Summed())
    console.warn_of_silence(10.0)
    assert "nothing has been heard" not in text.getvalue()


def test_a_pause_between_two_sums_is_no_stall() -> None:
    counted: list[int] = []

    class Reports:
        def steps(self, done: int) -> None:
            counted.append(done)

        def said(self) -> list[str]:
            return []

    class Page:
        def said(self) -> list[str]:
            return []

    console, _ = _console()
    console.show(PLAN)
    beside = Beside.__new__(Beside)
    beside._reports, beside._page, beside._trackers = Reports(), Page(), []  # type: ignore[assignment]
    console.show(Members("1.1", ("worker0",), (), ("server0",)))
    beside.look(console)
    assert counted == [-1]
