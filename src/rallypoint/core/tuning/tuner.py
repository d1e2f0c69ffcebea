"""Tunes one knob by trials: successive halving, then a comparison with a confidence bound.

    MEASURE   12 steps with the value in force
    SCREEN    each candidate for 4 steps (2, if both are a tenth slower); whoever is not faster than the value in force
              is out. The faster half, at most two, stay
    COMPARE   the first of those for 12 steps, then the value in force for 12 more: it is kept if it is surely faster

After each trial that was not kept, the value in force comes back for at least as many steps, which are measured too:
the next candidate is compared with the last 8 of them. So the job is never slower than at the start by more than 2 %
for longer than one trial.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from rallypoint.core.tuning.knob import Knob
from rallypoint.core.tuning.window import Window

WARM_UP = 2  # steps after a change that are not measured: some of their bytes were sent before it
SCREENED, MEASURED, BESIDE = 4, 12, 8  # steps
BETTER = 0.98  # of the step time in force: what gains less is not worth a change
HOPELESS, SEEN = 1.1, 2  # of the step time in force; steps after which a candidate that is so slow is out
SAME = 2  # candidates in a row that change nothing, after which higher ones are left out
FINALISTS = 2
_LEFT_OUT = "; higher ones would limit nothing either, and are left out"


class Decision(NamedTuple):
    """The knob's value from now on, and a sentence for the log ("" if nothing was decided)."""

    value: float
    said: str


class _Stage(Enum):
    MEASURE = auto()
    SCREEN = auto()
    COMPARE = auto()
    AGAIN = auto()  # the value in force once more, beside a finalist
    SETTLED = auto()


@dataclass(slots=True)
class Tuner:
    """Tunes `knob`. Call `stepped` for each step.

    Attributes:
        knob: what is tuned.
        best: the value that is in force outside of trials.
        value: the value that counts now.
    """

    knob: Knob
    best: float = field(init=False)
    value: float = field(init=False)
    _stage: _Stage = _Stage.MEASURE
    _skip: int = WARM_UP
    _seconds: list[float] = field(default_factory=list)
    _in_force: deque[float] = field(default_factory=lambda: deque(maxlen=BESIDE))  # the last steps with `best`
    _waiting: list[float] = field(init=False)
    _screened: list[tuple[float, float]] = field(default_factory=list)  # (part of the time in force, value)
    _finalists: list[float] = field(default_factory=list)
    _rival: tuple[float, Window] | None = None
    _rest: int = 0
    _same: int = 0

    def __post_init__(self) -> None:
        self.best = self.value = self.knob.start
        self._waiting = list(self.knob.candidates)

    @property
    def settled(self) -> bool:
        """True once all candidates have been tried."""
        return self._stage is _Stage.SETTLED

    @property
    def on_trial(self) -> bool:
        """True while the value that counts is not the one in force."""
        return self.value != self.best

    def disturbed(self) -> Decision | None:
        """Members have come or gone: what was measured is of other members. Measure the value in force anew, and then
        try what was on trial again. Returns the decision to go back to the value in force; None if it counts already.
        """
        back = self.on_trial
        if self.settled:
            return None
        match self._stage:
            case _Stage.SCREEN if self.on_trial:
                self._waiting.insert(0, self.value)
            case _Stage.COMPARE:
                self._finalists.insert(0, self.value)
            case _Stage.AGAIN if self._rival is not None:
                self._finalists.insert(0, self._rival[0])
        self._rival, self._rest, self._same = None, 0, 0
        self._in_force.clear()
        self._change(self.best, _Stage.MEASURE)
        return Decision(self.best, "") if back else None

    def stepped(self, seconds: float) -> Decision | None:
        """A step took so long. Returns what changes now; None: nothing."""
        if self.settled:
            return None
        if self._skip:
            self._skip -= 1
            return None
        if self._rest:
            self._in_force.append(seconds)
            self._rest -= 1
            return None if self._rest else self._next()
        self._seconds.append(seconds)
        match self._stage:
            case _Stage.MEASURE if len(self._seconds) >= MEASURED:
                self._in_force.extend(self._seconds)
                return self._next()
            case _Stage.SCREEN if len(self._seconds) >= SCREENED or self._hopeless(SEEN, HOPELESS):
                return self._screen()
            case _Stage.COMPARE if len(self._seconds) >= MEASURED or self._hopeless(SCREENED, 1 / BETTER):
                self._rival = self.value, Window.of(self._seconds)
                self._change(self.best, _Stage.AGAIN)
                return Decision(self.best, "")
            case _Stage.AGAIN if len(self._seconds) >= MEASURED:
                return self._judge()
            case _:
                return None

    # ---- trials ----

    def _next(self) -> Decision:
        """Begin the next trial, or settle."""
        if self._waiting:
            self._change(self._waiting.pop(0), _Stage.SCREEN)
            return Decision(self.value, f"{self.knob.phrase(self.value)} is tried")
        if self._screened:
            self._screened.sort()
            stay = min(FINALISTS, (len(self._screened) + 1) // 2)
            self._finalists += [value for _, value in self._screened[:stay]]
            self._screened.clear()
        if self._finalists:
            self._change(self._finalists.pop(0), _Stage.COMPARE)
            return Decision(self.value, f"{self.knob.phrase(self.value)} is tried for longer")
        self._stage, self.value = _Stage.SETTLED, self.best
        return Decision(self.best, f"tuning has ended: {self.knob.phrase(self.best)}")

    def _screen(self) -> Decision | None:
        base, found, steps = Window.of(self._in_force).median, Window.of(self._seconds).median, len(self._seconds)
        said = f"{self.knob.phrase(self.value)}: {base / max(found, 1e-9):.2f} x ({steps} steps)"
        if found < base * BETTER:
            self._same = 0
            self._screened.append((found / base, self.value))
            return self._and_next(f"{said}, stays")
        self._same = self._same + 1 if found <= base / BETTER else 0
        left_out = self.knob.rising and self._same >= SAME and bool(self._waiting)
        if left_out:
            self._waiting.clear()
        self._change(self.best, _Stage.SCREEN)
        self._rest = steps
        return Decision(self.best, f"{said}, taken back{_LEFT_OUT if left_out else ''}")

    def _judge(self) -> Decision | None:
        assert self._rival is not None
        (value, rival), base = self._rival, Window.of(self._seconds)
        self._rival = None
        self._in_force.extend(self._seconds)
        times = base.median / max(rival.median, 1e-9)
        gain = f"{times:.2f} x ({rival.steps} steps, beside {base.steps} of {base.median:.3g} s)"
        if rival.steps == MEASURED and rival.median < base.median * BETTER and rival.high < base.median:
            before, self.best = self.best, value
            self._in_force.clear()
            self._in_force.extend([rival.median] * BESIDE)
            said = f"{self.knob.phrase(value)} in place of {self.knob.phrase(before)}: {gain}, kept"
        else:
            said = f"{self.knob.phrase(value)}: {gain}, taken back"
        return self._and_next(said)

    def _and_next(self, said: str) -> Decision:
        following = self._next()
        return Decision(following.value, f"{said}; {following.said}")

    def _hopeless(self, steps: int, times: float) -> bool:
        """True if a candidate turns out to be slower after so many steps: no need to measure it to the end."""
        slow = bool(self._in_force) and min(self._seconds) > times * Window.of(self._in_force).median
        return len(self._seconds) == steps and slow

    def _change(self, value: float, stage: _Stage) -> None:
        self._skip = WARM_UP if value != self.value or stage is _Stage.MEASURE else 0
        self.value, self._stage = value, stage
        self._seconds.clear()
