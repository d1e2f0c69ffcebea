"""Tunes settings while the job runs (`tune="auto"`): from step times to the values that views name."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rallypoint.core.job import JobRecord
from rallypoint.core.tuning.knob import KNOBS, Facts
from rallypoint.core.tuning.tuner import Decision, Tuner
from rallypoint.core.view import Tried, View

_FIRST = 8  # steps from which the rate that steps reach is known; the first two are not counted
_WARM_UP = 2
_MOST_STEPS = 256  # step times that wait for the next look


class Tuned(NamedTuple):
    """The values from now on (settings that are missing: as the job says), and a sentence for the log; "": nothing was
    decided."""

    values: dict[str, Tried]
    said: str


@dataclass(slots=True)
class Tuning:
    """Knows how long steps take, and which value of which setting is on trial.

    Knobs are tuned one after the other, in the order of `KNOBS`. A coordinator that is started again goes on from the
    values that were kept, and tries candidates anew.

    Attributes:
        tuner: of the knob that is tuned now; None until its candidates are known.
    """

    tuner: Tuner | None = None
    _last: tuple[int, float] | None = None  # the highest step, and when it was reached
    _seconds: list[float] = field(default_factory=list)
    _seen: object = None  # the members and homes of the view in which steps were measured
    _counts: tuple[int, int] = (0, 0)  # workers that compute and servers for which the candidates were chosen
    _left: list[str] = field(default_factory=lambda: list(KNOBS))  # after this one
    _ended: list[str] = field(default_factory=list)  # what is in force of each knob, as the log names it

    @property
    def settled(self) -> bool:
        """True once all candidates of all knobs have been tried."""
        return self.tuner is not None and self.tuner.settled and not self._left

    def reached(self, step: int, now: float) -> None:
        """The job is at `step`, the highest so far; also said more than once."""
        if self._last is not None and step == self._last[0]:
            return
        if self._last is not None and step == self._last[0] + 1 and len(self._seconds) < _MOST_STEPS:
            self._seconds.append(now - self._last[1])
        self._last = step, now

    def look(self, view: View, record: JobRecord) -> Tuned | None:
        """Return the values from now on and what is said of them; None: as before."""
        if record.config.get("tune") != "auto":  # a run that was tuned may be resumed without
            return Tuned({}, "") if view.tuned else None
        if view.aggregators or view.paused is not None or view.ending:
            self._last = None  # what comes next is not one step later
            self._seconds.clear()
            return None
        seen = (view.generation, view.workers, view.servers, view.primary, view.backup, view.assigned(1 << 60))
        if seen != self._seen:
            self._seen, self._last = seen, None
            self._seconds.clear()
            return self._back(view) if self.tuner is None else self._told(view, self.tuner.disturbed())
        if self._counts != _counts(view) and self.settled:
            return self._anew()
        if self.tuner is None or (self.tuner.settled and self._left):
            return self._begin(view, record)
        return self._told(view, self._go_on(self.tuner))

    def unfinished(self, record: JobRecord) -> str:
        """A sentence for the job's end, if not all candidates have been tried; "": they have, or nothing is tuned."""
        if record.config.get("tune") != "auto" or self.settled:
            return ""
        if self.tuner is None:
            return f"tuning has not begun: it looks at steps after {_FIRST} of them with the same members"
        kept = ", ".join([*self._ended, self.tuner.knob.phrase(self.tuner.best)])
        return f"tuning has not ended, as the job was over first: {kept} was in force, and other values were not tried"

    def _back(self, view: View) -> Tuned | None:
        """An earlier coordinator was lost in a trial: the kept values come back."""
        names = [name for name, tried in view.tuned.items() if tried.value != tried.kept]
        if not names:
            return None
        kept = {name: Tried(tried.kept, tried.kept) for name, tried in view.tuned.items()}
        return Tuned(kept, f"the trial of another {' and '.join(names)} ended with its coordinator")

    def _anew(self) -> Tuned:
        """What was kept is of other numbers of members, each of which needs another rate now."""
        self.tuner, self._left, self._ended = None, list(KNOBS), []
        self._seconds.clear()
        return Tuned({}, f"there are other numbers of members now: {' and '.join(KNOBS)} are tuned anew")

    def _told(self, view: View, decided: Decision | None) -> Tuned | None:
        """What the tuner has decided. The last knob's end is the end of all: it names what is in force of each."""
        if decided is None or self.tuner is None:
            return None
        said = decided.said
        if self.tuner.settled:
            self._ended.append(self.tuner.knob.phrase(self.tuner.best))
            if not self._left:
                said = said.removesuffix(self._ended[-1]) + ", ".join(self._ended)
        return Tuned({**view.tuned, self.tuner.knob.name: Tried(decided.value, self.tuner.best)}, said)

    def _begin(self, view: View, record: JobRecord) -> Tuned | None:
        """Choose the next knob's candidates, once enough steps have been measured."""
        if len(self._seconds) < _FIRST:
            return None
        seconds = median(self._seconds[_WARM_UP:])
        self._seconds.clear()
        if seconds <= 0:
            return None
        nbytes = sum(shard.nbytes for shard in record.layout.shards)
        self._counts = workers, servers = _counts(view)
        name = self._left.pop(0)
        start = view.tuned[name].kept if name in view.tuned else float(record.config.get(name, 0.0))
        knob = KNOBS[name](start, Facts(nbytes, workers, servers, seconds, _told_mbit(view)))
        self.tuner = Tuner(knob)
        tried = ", ".join(f"{value / knob.per_unit:.4g}" for value in knob.candidates)
        now = f"a step takes {seconds:.3g} s with {knob.phrase(start)}"
        return Tuned(view.tuned, f"{name} is tuned: {now}; {tried} {knob.unit} are to be tried")

    def _go_on(self, tuner: Tuner) -> Decision | None:
        """Tell the tuner of the steps since the last look. What comes after a change is of the next trial."""
        times, self._seconds = self._seconds, []
        for seconds in times:
            if (decided := tuner.stepped(seconds)) is not None:
                return decided
        return None


def _counts(view: View) -> tuple[int, int]:
    """How many workers compute, and how many servers have shards."""
    return sum(map(bool, view.assigned(1 << 60).values())), len(set(view.primary.values()))


def _told_mbit(view: View) -> float:
    """What the slowest of the servers' links carries, as it was told; 0: not of all of them."""
    homes = set(view.primary.values())
    return min((server.link_mbit for server in view.servers if server.id in homes), default=0.0)
