"""Tunes `pace_mbit` while the job runs (`tune="auto"`): from step times to the pace that views name."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rallypoint.core.job import JobRecord
from rallypoint.core.tuning.knob import pace_knob
from rallypoint.core.tuning.tuner import Decision, Tuner
from rallypoint.core.view import LinkPace, View

_FIRST = 8  # steps from which the rate that steps reach is known; the first two are not counted
_WARM_UP = 2
_MOST_STEPS = 256  # step times that wait for the next look


class Tuned(NamedTuple):
    """The pace from now on (None: as the job's settings say), and a sentence for the log; "": nothing was decided."""

    pace: LinkPace | None
    said: str


@dataclass(slots=True)
class Tuning:
    """Knows how long steps take, and which pace is on trial.

    `tuner` is None until the candidates are known. A coordinator that is started again goes on from the pace that was
    kept, and tries candidates anew.
    """

    tuner: Tuner | None = None
    _last: tuple[int, float] | None = None  # the highest step, and when it was reached
    _seconds: list[float] = field(default_factory=list)
    _seen: object = None  # the members and homes of the view in which steps were measured
    _counts: tuple[int, int] = (0, 0)  # workers that compute and servers for which the candidates were chosen

    def reached(self, step: int, now: float) -> None:
        """The job is at `step`, the highest so far; also said more than once."""
        if self._last is not None and step == self._last[0]:
            return
        if self._last is not None and step == self._last[0] + 1 and len(self._seconds) < _MOST_STEPS:
            self._seconds.append(now - self._last[1])
        self._last = step, now

    def look(self, view: View, record: JobRecord) -> Tuned | None:
        """Return the pace from now on and what is said of it; None: as before."""
        if record.config.get("tune") != "auto":  # a run that was tuned may be resumed without
            return None if view.pace is None else Tuned(None, "")
        if view.aggregators or view.paused is not None or view.ending:
            self._last = None  # what comes next is not one step later
            self._seconds.clear()
            return None
        seen = (view.generation, view.workers, view.servers, view.primary, view.backup, view.assigned(1 << 60))
        if seen != self._seen:
            self._seen, self._last = seen, None
            self._seconds.clear()
            return self._back(view) if self.tuner is None else self._told(self.tuner, self.tuner.disturbed())
        if self.tuner is not None and self.tuner.settled and self._counts != _counts(view):
            return self._anew(record)
        if self.tuner is not None:
            return self._told(self.tuner, self._go_on(self.tuner))
        self._begin(view, record)
        return None

    def unfinished(self, record: JobRecord) -> str:
        """A sentence for the job's end, if not all candidates have been tried; "": they have, or nothing is tuned."""
        if record.config.get("tune") != "auto" or (self.tuner is not None and self.tuner.settled):
            return ""
        if self.tuner is None:
            return f"tuning has not begun: it looks at a pace after {_FIRST} steps with the same members"
        kept = self.tuner.knob.phrase(self.tuner.best)
        return f"tuning has not ended, as the job was over first: {kept} was in force, and other values were not tried"

    def _back(self, view: View) -> Tuned | None:
        """An earlier coordinator was lost in a trial: the kept value comes back."""
        if view.pace is None or view.pace.mbit == view.pace.kept:
            return None
        kept = LinkPace(view.pace.kept, view.pace.kept)
        return Tuned(kept, "the trial of another pace_mbit ended with its coordinator")

    def _anew(self, record: JobRecord) -> Tuned:
        """What was kept is of other numbers of members, each of which needs another rate now."""
        self.tuner, setting = None, _setting(record)
        self._seconds.clear()
        return Tuned(LinkPace(setting, setting), "there are other numbers of members now: pace_mbit is tuned anew")

    def _told(self, tuner: Tuner, decided: Decision | None) -> Tuned | None:
        return None if decided is None else Tuned(LinkPace(decided.value, tuner.best), decided.said)

    def _begin(self, view: View, record: JobRecord) -> None:
        """Choose the candidates, once enough steps have been measured."""
        if len(self._seconds) < _FIRST:
            return
        seconds = median(self._seconds[_WARM_UP:])
        self._seconds.clear()
        start = _setting(record) if view.pace is None else view.pace.kept
        nbytes = sum(shard.nbytes for shard in record.layout.shards)
        self._counts = workers, servers = _counts(view)
        if seconds > 0:
            self.tuner = Tuner(pace_knob(start, nbytes, workers, servers, seconds))

    def _go_on(self, tuner: Tuner) -> Decision | None:
        """Tell the tuner of the steps since the last look. What comes after a change is of the next trial."""
        times, self._seconds = self._seconds, []
        for seconds in times:
            if (decided := tuner.stepped(seconds)) is not None:
                return decided
        return None


def _setting(record: JobRecord) -> float:
    """The pace of the job's settings, in Mbit/s; 0: none."""
    return float(record.config.get("pace_mbit", 0.0))


def _counts(view: View) -> tuple[int, int]:
    """How many workers compute, and how many servers have shards."""
    return sum(map(bool, view.assigned(1 << 60).values())), len(set(view.primary.values()))
