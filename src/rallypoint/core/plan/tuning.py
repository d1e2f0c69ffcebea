"""Tunes settings while the job runs (`tune="auto"`): from step times to the values that views name."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median
from typing import NamedTuple

from rallypoint.core.job import JobRecord
from rallypoint.core.layout import SHARD_BYTES, WORD_BYTES
from rallypoint.core.plan.pipeline import step_cost
from rallypoint.core.plan.site import PACED, Servers, Site, Workers
from rallypoint.core.plan.workload import Workload, layers_of
from rallypoint.core.view import Tried, View

# What is tuned while a job runs: the table of knobs, and for each the values that are worth a trial.
#
# A new knob is a function here and a line in `KNOBS`: the trials (`tuner.py`) and the way of a value through views to
# every process (`View.setting`) are the same for all.


# Of the rate that steps reach now. A link can carry that much, and at most a few times more: steps also compute, and
# flows that share a port are not equally fast. A tenth apart: one of them is at most a tenth too low.
_ABOVE = (1.08, 1.18, 1.29, 1.4, 1.53, 1.68, 1.85, 2.1)
_BELOW = (PACED, 0.93, 0.88)  # of what a link carries, where that was told

# Milliseconds of a link's rate that may be on their way to it; the likeliest first. With less a sender waits for
# acknowledgements, with more the queue of the port overflows (256 KiB at 200 Mbit/s are 10 ms).
_AHEAD_MS = (10.0, 20.0, 5.0, 40.0)
_FULL = 1.25  # a link's rate in terms of what steps reach, where it was not told
_LEAST_SHARE = 16 << 10  # bytes of each link, as in `net.transport`: less is the same


class Facts(NamedTuple):
    """What the candidates follow from.

    Attributes:
        nbytes: of the parameters, which each worker sends and gets in a step.
        workers: that compute.
        servers: that have shards.
        seconds: of a step now.
        told_mbit: what the slowest link of them carries, as it was told; 0: it was not.
    """

    nbytes: int
    workers: int
    servers: int
    seconds: float
    told_mbit: float = 0.0

    @property
    def reached_mbit(self) -> float:
        """What steps make of the busiest links now. A server sends all of its shards to every worker, so with fewer
        servers than workers theirs are the busiest."""
        return self.nbytes * max(1.0, self.workers / max(1, self.servers)) * 8e-6 / self.seconds


@dataclass(frozen=True, slots=True)
class Knob:
    """What is tuned.

    Attributes:
        name: for the log, as in the configuration.
        unit: of its values, for the log.
        start: its value at the beginning; 0: as without it.
        candidates: the values to try, without `start`, in this order.
        per_unit: a value is so many of `unit`.
        rising: candidates ascend, and beyond one that changes nothing all others change nothing either.
    """

    name: str
    unit: str
    start: float
    candidates: tuple[float, ...]
    per_unit: float = 1.0
    rising: bool = False

    def phrase(self, value: float) -> str:
        """The value as the log names it. Example: ``pace_mbit 190 Mbit/s``; ``no pace_mbit`` for 0."""
        return f"{self.name} {value / self.per_unit:.4g} {self.unit}" if value else f"no {self.name}"


def pace_knob(start: float, facts: Facts) -> Knob:
    """Return the knob `pace_mbit`. Paces below what steps need now cannot help, so none is tried."""
    if facts.told_mbit:
        found = sorted(float(f"{facts.told_mbit * part:.3g}") for part in _BELOW)
    else:
        found = [float(f"{facts.reached_mbit * factor:.3g}") for factor in _ABOVE]
    return Knob("pace_mbit", "Mbit/s", start, _tried(start, found), rising=True)


def in_flight_knob(start: float, facts: Facts) -> Knob:
    """Return the knob `in_flight_bytes`. Values are powers of two: a factor of two is as near as it need be."""
    rate = (facts.told_mbit or facts.reached_mbit * _FULL) * 1e6 / 8
    least = _LEAST_SHARE * max(facts.workers, facts.servers)
    found = [max(least, 2.0 ** round(math.log2(rate * ahead / 1e3))) for ahead in _AHEAD_MS]
    return Knob("in_flight_bytes", "KiB", start, _tried(start, found), per_unit=1024.0)


# In the order in which they are tuned: what may be on its way gains more, and with it a pace may gain nothing.
KNOBS: Mapping[str, Callable[[float, Facts], Knob]] = {"in_flight_bytes": in_flight_knob, "pace_mbit": pace_knob}


def _tried(start: float, found: list[float]) -> tuple[float, ...]:
    """Each value once, without the one in force; and "none", where that is not in force.

    Floats, as they are in every member's view: a whole number has other bytes, and so another digest.
    """
    return tuple(dict.fromkeys(float(value) for value in ([0.0, *found] if start else found) if value != start))


# The seconds of the steps of a trial, and what they say for certain.


# How many of the shortest and of the longest of n steps to leave out, so that the median of all such steps is between
# the rest in at least 95 % of cases: whatever their distribution (order statistics, binomial(n, 1/2)).
_NOT_COUNTED = {6: 0, 7: 0, 8: 0, 9: 1, 10: 1, 11: 1, 12: 2, 13: 2, 14: 2, 15: 3, 16: 3}


class Window(NamedTuple):
    """The median of some steps in seconds, and bounds between which it is in 95 % of cases (from six steps on)."""

    median: float
    low: float
    high: float
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Window:
        """That of these steps. Raises ValueError if there are none."""
        if not seconds:
            raise ValueError("no step was measured")
        ordered = sorted(seconds)
        out = _NOT_COUNTED.get(len(ordered), max(0, (len(ordered) - 9) // 2) if len(ordered) > 16 else 0)
        return cls(median(ordered), ordered[out], ordered[-1 - out], len(ordered))


# Tunes one knob by trials: successive halving, then a comparison with a confidence bound.
#
#     MEASURE   12 steps with the value in force
#     SCREEN    each candidate for 4 steps (2, if both are a tenth slower); whoever is not faster than the value in
#               force is out. The faster half, at most two, stay
#     COMPARE   the first of those for 12 steps, then the value in force for 12 more: it is kept if it is surely faster
#
# After each trial that was not kept, the value in force comes back for at least as many steps, which are measured too:
# the next candidate is compared with the last 8 of them. So the job is never slower than at the start by more than 2 %
# for longer than one trial.

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
            return Tuned({}, "") if view.orders.tuned else None
        if view.aggregators or view.orders.paused is not None or view.orders.ending:
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
        names = [name for name, tried in view.orders.tuned.items() if tried.value != tried.kept]
        if not names:
            return None
        kept = {name: Tried(tried.kept, tried.kept) for name, tried in view.orders.tuned.items()}
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
        return Tuned({**view.orders.tuned, self.tuner.knob.name: Tried(decided.value, self.tuner.best)}, said)

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
        tuned, settings = view.orders.tuned, record.config.get("network", {})
        start = tuned[name].kept if name in tuned else float(settings.get(name, 0.0))
        knob = KNOBS[name](start, Facts(nbytes, workers, servers, seconds, _told_mbit(view)))
        self.tuner = Tuner(knob)
        tried = ", ".join(f"{value / knob.per_unit:.4g}" for value in knob.candidates)
        now = f"a step takes {seconds:.3g} s with {knob.phrase(start)}"
        return Tuned(view.orders.tuned, f"{name} is tuned: {now}; {tried} {knob.unit} are to be tried")

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


# How large shards are to be, where the job does not say: chosen once, by the cost model, before any step.

_SIZES = tuple(SHARD_BYTES >> power for power in range(6))  # 1 MiB to 32 KiB
_NEAR = 1.05  # of the shortest step: larger shards cost processors less
# Seconds that a message costs its two ends beside its bytes. `reduce.py --alone --loopback --workers 2 --servers 1
# --megabytes 16` took 0.65 s more with 488 shards than with 16: 0.7 ms each, of three processes on two busy cores.
_MESSAGE_S = 0.3e-3
ASSUMED_MBIT = 1000.0
_LAYERS = 8  # of equal size: the last shards of one travel while the next one's do


def shards_for(nbytes: int, workers: int, servers: int, mbit: float = 0.0) -> tuple[int, str]:
    """Choose the size of shards for a job of `nbytes` of parameters: the largest one, of 32 KiB to 1 MiB, with which
    the cost model's step without computing is at most 5 % longer than with the best. Returns it (in bytes), and why.

    `mbit` is what a link carries, as it was told; 0: 1 Gbit/s is assumed. The first shard travels up alone, and the
    last one down: what that costs depends on how many there are for each server, hardly on the rate.
    """
    rate = (mbit or ASSUMED_MBIT) * 1e6 / 8
    site = Site(workers=(Workers(max(1, workers), rate),), servers=(Servers(max(1, servers), rate),), losses=None)
    layers = layers_of([max(1, nbytes // WORD_BYTES // _LAYERS)] * _LAYERS, 0.0)
    messages = max(1.0, workers / max(1, servers)) * nbytes * _MESSAGE_S  # of the busiest process
    seconds = {
        size: step_cost(Workload(layers=layers, shard_bytes=size), site).seconds + messages / size for size in _SIZES
    }
    best = min(seconds.values())
    size = max(size for size, found in seconds.items() if found <= _NEAR * best)
    times = seconds[SHARD_BYTES] / seconds[size]
    link = f"links of {mbit:g} Mbit/s" if mbit else "links of 1 Gbit/s, which are assumed"
    return size, (
        f"shard_bytes {size >> 10} KiB, by the cost model: for {nbytes / 1e6:.3g} MB on {max(1, servers)} servers with "
        f"{link}, synchronising is {times:.2f} x as fast as with {SHARD_BYTES >> 10} KiB"
    )


def shards_on_one_host(nbytes: int, servers: int) -> int:
    """The size of shards where payloads stay in memory: 1, 2 or 4 MiB, so that each server has 4 shards at least.

    A message costs there more than a MiB (`reduce.py --loopback --workers 2 --servers 1`, 100 MB: 1 MiB 0.25 s, 4 MiB
    0.14 s, 16 MiB no less).
    """
    return next((size << 20 for size in (4, 2) if nbytes >= 4 * max(1, servers) * (size << 20)), SHARD_BYTES)
