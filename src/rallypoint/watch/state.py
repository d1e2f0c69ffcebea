"""A run as whoever observes it sees it: made from what its coordinator announces, live or from ``events.jsonl``.

The console, the page, `top`, metrics, reports, trackers and replays show it. What an event means is decided here alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from rallypoint.core import protocol
from rallypoint.observe.lines import Once

EVALUATION = "evaluation/"  # before the names of evaluations in `RunState.row`
_MOST_MARKS, _MOST_SENTENCES, _MOST_SNAPSHOTS, _MOST_VIEWS = 1000, 300, 50, 20
_MOST_COMPUTED = 256
_MOST_NAMES = 64  # of figures, and of evaluations
_LATE_OVER = 0.95  # how much of a worker's lateness stays from step to step
_MOST_SPANS = 200  # of a member
_MOST_MEMBERS = 4096
_GONE = "gone"
_ROLES = {"computing": "worker", "standby": "worker", "server": "server", "aggregator": "aggregator"}  # of states


@dataclass(slots=True)
class Timelines:
    """For each member the times (s) at which its state changed, and to what.

    States: ``computing``, ``standby``, ``server``, ``aggregator``, ``gone``. Of a member with very many changes the
    oldest are forgotten, and of very many members those that have been gone for longest.
    """

    spans: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    revision: int = 0
    now: dict[str, str] = field(default_factory=dict)  # what the members are that are here

    def take(self, members: protocol.Members, t: float) -> tuple[list[str], list[str]]:
        """A new view, at time `t`. Returns who has come and who has gone."""
        before, self.now = self.now, dict(self._states(members))
        came, went = self.now.keys() - before.keys(), before.keys() - self.now.keys()
        for member in [*self.now, *went]:
            self._change(member, t, self.now.get(member, _GONE))
        self._forget()
        return sorted(came, key=by_number), sorted(went, key=by_number)

    @property
    def here(self) -> Set[str]:
        return self.now.keys()

    def over(self, t: float) -> None:
        """The job has ended: nobody is here any more."""
        for member in self.here:
            self._change(member, t, _GONE)
        self.now = {}

    def rows(self) -> list[dict[str, object]]:
        """The members in the order of their names: servers, aggregators, workers."""
        names = sorted(self.spans, key=by_number)
        return [{"id": name, "spans": [[round(t, 2), state] for t, state in self.spans[name]]} for name in names]

    def _states(self, members: protocol.Members) -> Iterable[tuple[str, str]]:
        yield from ((worker, "computing") for worker in members.workers)
        yield from ((worker, "standby") for worker in members.standby)
        yield from ((server, "server") for server in members.servers)
        yield from ((one, "aggregator") for one in members.aggregators)

    def _change(self, member: str, t: float, state: str) -> None:
        spans = self.spans.setdefault(member, [])
        if spans and spans[-1][1] == state:
            return
        spans.append((t, state))
        del spans[:-_MOST_SPANS]
        self.revision += 1

    def _forget(self) -> None:
        while len(self.spans) > _MOST_MEMBERS:
            gone = [member for member, spans in self.spans.items() if spans[-1][1] == _GONE]
            if not gone:
                return
            del self.spans[min(gone, key=lambda member: self.spans[member][-1][0])]


_HISTORY = 40  # looks at a machine
_APART_S = 4.0  # between two of them: each member of a machine tells of it
_MOST_HOSTS, _MEASURED_MEMBERS, _MOST_LINKS = 1024, 4096, 16_384
_SHOWN_HOSTS, _SHOWN_SIDE = 64, 24  # on the page: machines; members on each side of the matrix of links


@dataclass(slots=True)
class MachineSeen:
    """A machine: its newest sample, when that was (s), and shares of processor and memory over time, in percent."""

    sample: protocol.Sampled
    t: float
    cpu: deque[int] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    memory: deque[int] = field(default_factory=lambda: deque(maxlen=_HISTORY))


@dataclass(slots=True)
class MachinesSeen:
    """The newest samples by machine, by member and by pair of members. Its size has a bound."""

    hosts: dict[str, MachineSeen] = field(default_factory=dict)
    members: dict[str, protocol.Sampled] = field(default_factory=dict)
    links: dict[tuple[str, str], protocol.LinkSample] = field(default_factory=dict)  # who dialed, whom
    revision: int = 0

    def take(self, sample: protocol.Sampled, t: float) -> None:
        """A member's sample, at time `t` (s)."""
        self.revision += 1
        if sample.member in self.members or len(self.members) < _MEASURED_MEMBERS:
            self.members[sample.member] = sample
        for old in [pair for pair in self.links if pair[0] == sample.member]:
            del self.links[old]
        for other, link in sample.links.items():
            if len(self.links) < _MOST_LINKS:
                self.links[sample.member, other] = link
        host = self.hosts.get(sample.host)
        if host is None:
            if len(self.hosts) >= _MOST_HOSTS:
                return
            host = self.hosts[sample.host] = MachineSeen(sample, float("-inf"))
        if t - host.t >= _APART_S or t < host.t:
            host.t, host.sample = t, sample
            host.cpu.append(round(100 * sample.cpu))
            host.memory.append(round(100 * sample.memory / max(1, sample.memory_total)))

    def forget(self, gone: Collection[str]) -> None:
        """These members are gone, and machines on which nobody is left."""
        for member in gone:
            self.members.pop(member, None)
        self.links = {pair: link for pair, link in self.links.items() if not set(pair) & set(gone)}
        here = {sample.host for sample in self.members.values()}
        self.hosts = {name: host for name, host in self.hosts.items() if name in here}
        self.revision += bool(gone)

    def told(self) -> dict[str, Any]:
        """What the page shows, for JSON: the machines with the busiest processors, and the pairs that talk most."""
        names = sorted(self.hosts, key=lambda name: -self.hosts[name].sample.cpu)[:_SHOWN_HOSTS]
        own: dict[str, list[protocol.Sampled]] = {name: [] for name in names}
        for sample in self.members.values():
            if sample.host in own:
                own[sample.host].append(sample)
        return {"hosts": [_told(name, self.hosts[name], own[name]) for name in sorted(names)],
                "more": len(self.hosts) - len(names), **self._matrix()}  # fmt: skip

    def _matrix(self) -> dict[str, Any]:
        bytes_of: dict[int, dict[str, float]] = {0: {}, 1: {}}
        for pair, link in self.links.items():
            for side, member in enumerate(pair):
                bytes_of[side][member] = bytes_of[side].get(member, 0.0) + link.sent + link.received
        sides = [
            sorted(sorted(those, key=lambda member: -those[member])[:_SHOWN_SIDE], key=by_number)
            for those in bytes_of.values()
        ]
        # Round trip (s), bytes a second to the column's member and from it; None if they have no link
        found = [[self.links.get((row, column)) for column in sides[1]] for row in sides[0]]
        cells = [[link and [link.round_trip, link.sent, link.received] for link in row] for row in found]
        return {"links": {"rows": sides[0], "columns": sides[1], "cells": cells,
                          "members": [len(bytes_of[0]), len(bytes_of[1])]}}  # fmt: skip


def _told(name: str, host: MachineSeen, own: list[protocol.Sampled]) -> dict[str, Any]:
    sample = host.sample
    return {
        "name": name, "members": len(own), "cpu": list(host.cpu), "memory": list(host.memory),
        "used": sample.memory, "total": sample.memory_total, "own_cpu": round(sum(one.own_cpu for one in own), 2),
        "own_memory": sum(one.own_memory for one in own), "disk": [sample.disk_read, sample.disk_written],
        "network": [sample.network_sent, sample.network_received],
        "waited": max((one.waited_for_data for one in own), default=0.0),
        "gpus": [[gpu.busy, gpu.used, gpu.total] for gpu in sample.gpus],
    }  # fmt: skip


def by_number(name: str) -> tuple[str, int, str]:
    """A key that sorts worker2 before worker10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :][:18] or 0), name


_RATIO = 1.02  # of the bounds of two neighbouring classes: quantiles are right to 2 %
_SHORTEST_S = 1e-5
_STALL = 3.0  # a step that takes so many times the median is a stall
_OFTEN = 64  # the median is computed anew after so many steps, and in the first ones at each
_AT_ONCE_S = 1e-3  # steps that are announced so close together were done before
_MOST_AT_ONCE = 1000
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_ENOUGH = 10  # steps, before there is a median to compare with


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram's value: for each bound how many values were at most that high, of all, and their sum."""

    bounds: Sequence[float]
    cumulative: Sequence[int]
    count: int
    total: float


class Histogram:
    """Counts values by bounds. One thread adds, any may read: a reading may lack the value that is being added."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts, self._total = [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> HistogramCounts:
        *cumulative, seen = accumulate(list(self._counts))
        return HistogramCounts(self._bounds, cumulative, seen, self._total)


@dataclass(slots=True)
class StepPace:
    """Measures the seconds between two steps that a coordinator announces.

    One that takes over from another announces at once the steps that were done meanwhile: those say nothing of how long
    a step takes, and are not measured.
    """

    _stepped: float | None = None  # when the last step was announced
    _catching_up: int = 0  # so many more steps may come at once
    first: bool = False  # the next step is the first that this coordinator announces

    def begins(self) -> None:
        """A coordinator begins to announce steps. It may have taken over."""
        self._catching_up, self.first = _MOST_AT_ONCE, True

    def pause(self) -> None:
        """The next step cannot be measured: the job has ended, and may go on later."""
        self._stepped = None

    def step(self, now: float) -> float | None:
        """A step is announced at `now` (s). Returns how long it took; None if nobody knows."""
        before, self._stepped = self._stepped, now
        first, self.first = self.first, False
        if before is None:
            return None
        if self._catching_up and now - before < _AT_ONCE_S:
            self._catching_up -= 1
            return None
        self._catching_up *= first  # the first one ends the pause; those that were done in it come now
        return now - before


@dataclass(slots=True)
class StepTimes:
    """A histogram of the seconds between two steps, and the stalls among them."""

    total: float = 0.0  # the seconds of all steps
    # Cause -> the seconds by which stalls were longer than the median
    lost: Counter[str] = field(default_factory=Counter)
    stalls: int = 0  # the number of stalls
    longest: tuple[float, int, str] = (0.0, -1, "")  # (seconds, step, cause) of the longest stall
    # How many steps took at most so long, by BOUNDS_S
    histogram: Histogram = field(default_factory=lambda: Histogram(BOUNDS_S))
    _classes: Counter[int] = field(default_factory=Counter)
    _count: int = 0
    _median: float = 0.0

    def add(self, step: int, seconds: float, cause: str) -> bool:
        """A step has taken so long; return whether that is a stall. `cause`: what happened meanwhile."""
        if self._count <= _OFTEN or self._count % _OFTEN == 0:
            self._median = self.quantile(0.5)
        median = self._median
        stall = self._count >= _ENOUGH and seconds > _STALL * median
        if stall:
            self.stalls += 1
            self.lost[cause] += seconds - median  # type: ignore[assignment]
            self.longest = max(self.longest, (seconds, step, cause))
        self.total += seconds
        self.histogram.add(seconds)
        self._count += 1
        self._classes[math.ceil(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S, _RATIO))] += 1
        return stall

    def quantile(self, share: float) -> float:
        """The seconds that this share of the steps took at most, to 2 %; 0 without steps."""
        seen, wanted = 0, share * self._count
        for number in sorted(self._classes):
            seen += self._classes[number]
            if seen >= wanted:
                return _SHORTEST_S * _RATIO**number
        return 0.0

    @property
    def goodput(self) -> float:
        """The share of the time that was not lost to stalls."""
        return 1.0 - sum(self.lost.values()) / self.total if self.total > 0 else 1.0


MOST_POINTS = 2048


@dataclass(slots=True)
class Point:
    """The values of the steps from `step` on, up to the next point."""

    step: int
    count: int
    total: float
    low: float
    high: float

    def add(self, other: Point) -> None:
        """Take in the values of a later point."""
        self.count += other.count
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass(slots=True)
class Series:
    """At most `most` points of values by step: each has the mean, the lowest and the highest value of `width` steps.

    Values that are not finite are left out: JSON has none, and no axis can show them. A step that comes again replaces
    all points from it on: a run that went back computes them anew.
    """

    most: int = MOST_POINTS
    width: int = 1  # the steps of each point, a power of two
    points: list[Point] = field(default_factory=list)
    revision: int = 0  # rises with every change
    whole: int = 0  # the revision in which a point other than the last ones was changed
    _last: int = -1  # the highest step that has come

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        self.revision += 1
        if step <= self._last:  # forget what came from it on; the point that begins before it keeps what it has
            while self.points and self.points[-1].step >= step:
                self.points.pop()
            self.whole = self.revision
        self._last = step
        start = step - step % self.width
        new = Point(start, 1, value, value, value)
        if self.points and self.points[-1].step == start:
            self.points[-1].add(new)
        else:
            self.points.append(new)
        if len(self.points) > self.most:
            self._halve()

    def columns(self, start: int = 0) -> dict[str, list[float]]:
        """The points from step `start` on, as columns: step, mean, low, high."""
        shown = [point for point in self.points if point.step >= start]
        return {
            "step": [point.step for point in shown], "mean": [_short(point.total / point.count) for point in shown],
            "low": [_short(point.low) for point in shown], "high": [_short(point.high) for point in shown],
        }  # fmt: skip

    @property
    def means(self) -> list[float]:
        return [point.total / point.count for point in self.points]

    @property
    def end(self) -> int:
        """The step of the last point, which may still change; 0 if there is none."""
        return self.points[-1].step if self.points else 0

    def _halve(self) -> None:
        self.width *= 2
        merged: list[Point] = []
        for point in self.points:
            start = point.step - point.step % self.width
            if merged and merged[-1].step == start:
                merged[-1].add(point)
            else:
                point.step = start
                merged.append(point)
        self.points, self.whole = merged, self.revision


def _short(value: float) -> float:
    """The value with six digits: a page shows no more, and half as much has to be sent."""
    return float(f"{value:.6g}")


@dataclass(slots=True)
class RunState:
    """What is known of a run. Its size has a bound, whatever the number of steps.

    `take` gets the messages in their order, each with the time `t` (s) of the coordinator that sent it: the clock of a
    new coordinator begins at 0 again, and `now` goes on. Where live messages are taken, `t` is this machine's own.
    """

    plan: protocol.Planned | None = None
    began_at: int = 0  # the steps that were done before the first thing that is known
    now: float = 0.0
    step: int = 0  # steps that are done
    reached: int = 0  # the same; before a coordinator's first step, as many as it goes on from
    steps: int = 0  # steps that were made, those included that were made again
    items: int = 0  # of them
    # In a job of sums: the one that has got most of them
    script: protocol.ScriptAt = field(default_factory=lambda: protocol.ScriptAt(0))
    again: int = 0
    moved: float = -1.0  # when the last step was done, or the coordinator began; -1: not yet
    ended: str = ""  # "finished", "failed", "interrupted" or, while the run goes on, ""
    why: str = ""  # the reason of a failure, or which script has stopped the job, and why
    stopped: tuple[int, str] = (-1, "")  # the step with which a script has stopped the job, and why
    over_at: float = -1.0  # when it ended
    row: tuple[int, dict[str, float]] | None = None  # the figures of the last message, by name, and their step
    went_back: bool = False  # the last message is of a step that was made before
    loss: float | None = None  # the newest, and so are these:
    lr: float | None = None
    figures: dict[str, float] = field(default_factory=dict)  # of `micro.log`
    results: dict[str, float] = field(default_factory=dict)  # of evaluations
    evaluation: tuple[int, dict[str, float]] = (-1, {})  # the last one, and the version that was evaluated
    curves: dict[str, Series] = field(default_factory=dict)  # by step: loss, lr, seconds, what `micro.log` said
    evaluations: dict[str, Series] = field(default_factory=dict)
    views: deque[protocol.Members] = field(default_factory=lambda: deque(maxlen=_MOST_VIEWS))
    members: Timelines = field(default_factory=Timelines)
    joined: Counter[str] = field(default_factory=Counter)  # by role: worker, server, aggregator
    gone: Counter[str] = field(default_factory=Counter)
    machines: MachinesSeen = field(default_factory=MachinesSeen)
    marks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
    sentences: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_SENTENCES))
    waits: str = ""  # the last sentence about what the job waits for, if no step was done since
    said: str = ""  # the last sentence of another kind
    snapshots: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_SNAPSHOTS))
    stored: int = 0  # how many snapshots are complete
    period: float | None = None  # s between two, if the job has chosen that
    times: StepTimes = field(default_factory=StepTimes)
    computed: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_COMPUTED))  # s, of slowest replicas
    stalled: dict[str, Any] | None = None  # the last stall, with what was said or has happened meanwhile
    accounted: protocol.Accounted | None = None  # what the first shard's primary has counted
    late: dict[str, float] = field(default_factory=dict)  # worker -> mean seconds behind the first, of late
    skipped: Counter[str] = field(default_factory=Counter)  # "steps", "contributions"
    revision: int = 0
    _clock: float = 0.0  # the last time that the coordinator said
    _pace: StepPace = field(default_factory=StepPace)
    _once: Once = field(default_factory=Once)
    _cause: str = ""  # what has happened since
    _said: str = ""  # the same as a sentence

    @property
    def view(self) -> protocol.Members | None:
        return self.views[-1] if self.views else None

    @property
    def sums(self) -> int:
        """In a job of sums: how many the scripts have got."""
        return self.script.sums

    @property
    def of_sums(self) -> bool:
        """True if the job makes sums for scripts, which decide when they end: it has no steps."""
        return self.plan is not None and self.plan.steps == 0 and self.plan.loss != "never"

    def steps_in(self, version: int) -> int:
        """The steps of training that a version of the parameters has behind it."""
        return version if self.plan is None else min(self.plan.steps or self.step, version * self.plan.steps_per_round)

    def take(self, message: msgspec.Struct, t: float) -> bool:
        """Take one announcement of the coordinator. False if it says again what a coordinator before it has said."""
        self.revision += 1
        self.now += t - self._clock if t >= self._clock else 0.0
        self._clock, self.row, self.went_back = t, None, False
        match message:
            case protocol.Planned():
                self._planned(message)
            case protocol.StepDone():
                self._step(message)
            case protocol.Metrics(step=step, values=values, generation=generation):
                if not self._once.is_new((step, generation, str(values))):
                    return False  # workers have repeated it to the next coordinator
                self._evaluated(step, values)
            case protocol.Members():
                self._members(message)
            case protocol.Applied(late=late):
                for worker, seconds in late.items():
                    if worker in self.members.here:  # else its word came after it was gone
                        known = self.late.get(worker, seconds)
                        self.late[worker] = _LATE_OVER * known + (1 - _LATE_OVER) * seconds
            case protocol.ScriptAt(sums=sums):
                self.script = message if sums > self.script.sums else self.script
            case protocol.Sampled(member=member):
                if member in self.members.here:
                    self.machines.take(message, self.now)
            case protocol.Snapshotted(version=version, nbytes=nbytes, seconds=seconds):
                self.stored += 1
                self.snapshots.append({"t": self.now, "version": version, "nbytes": nbytes, "seconds": seconds})
            case protocol.SnapshotEvery(seconds=seconds):
                self.period = seconds
            case protocol.Accounted():
                self.accounted = message
            case protocol.Skipped():
                self.skipped["contributions" if message.alone else "steps"] += 1
                self._mark("skip", f"step {message.step} skipped: not finite")
            case protocol.AuditFound():
                self._audited(message)
            case protocol.Waiting(text=text):
                self.waits = text
                self._cause, self._said = self._cause or "waiting", text
                self.sentences.append({"t": self.now, "step": self.reached, "text": text})
            case protocol.Say(text=text) | protocol.Held(text=text) | protocol.Ordered(text=text):
                self.said = text
                self.sentences.append({"t": self.now, "text": text})
            case protocol.Finished(stopped_at=at, why=why):
                self.stopped = at, why
                self._end("finished", "" if at < 0 else why if self.of_sums else f"stopped at step {at}: {why}")
            case protocol.Aborted(reason=reason):
                self._end("failed", reason)
            case _:
                pass
        return True

    def _planned(self, plan: protocol.Planned) -> None:
        if self.plan is None:
            self.began_at = plan.done
        self.ended = self.why = ""
        self._pace.begins()
        self.plan, self.reached, self.moved = plan, plan.done, self.now

    def _step(self, done: protocol.StepDone) -> None:
        self.went_back = done.step + 1 <= self.step
        made = done.step + 1 - self.reached
        self.steps += made if made > 0 or self.plan is None else self.plan.steps_per_round
        self.step = self.reached = done.step + 1
        self.items, self.again, self.moved = self.items + done.items, done.again, self.now
        self.waits = self.ended = self.why = ""
        if done.computed > 0.0:
            self.computed.append(done.computed)
        known = {} if self.plan is not None and not done.has_loss(self.plan) else {"loss": done.loss}
        if done.lr is not None:
            known["lr"] = done.lr
        self.loss, self.lr = known.get("loss", self.loss), known.get("lr", self.lr)
        self._keep(self.figures, done.figures)
        for name, value in {**known, **done.figures}.items():
            self._curve(self.curves, name, done.step, value)
        self.row = done.step, {**done.figures, **known}
        if self.went_back:
            begun = self.plan is not None and 0 < self.plan.done == done.step + 1 - self.plan.steps_per_round
            if resumed := self._pace.first and begun:  # a coordinator that took over says that 0 are done
                self._pace.pause()  # nobody knows how long nothing ran
            self._mark("back", f"{'resumed from' if resumed else 'back to'} step {done.step}")
        if (seconds := self._pace.step(self.now)) is not None:
            self._curve(self.curves, "seconds a step", done.step, seconds)
            most = max((len(view.workers) for view in self.views), default=0)
            nothing = "fewer workers" if self.view and len(self.view.workers) < most else "slow steps"
            if self.times.add(done.step, seconds, self._cause or nothing):
                self.stalled = {"step": done.step, "seconds": seconds, "text": self._said or self._cause}
        self._cause = self._said = ""

    def _evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._cause = self._cause or "evaluation"
        self.evaluation = step, dict(values)
        self.row = step, {f"{EVALUATION}{name}": value for name, value in values.items()}
        self._keep(self.results, values)
        for name, value in values.items():
            self._curve(self.evaluations, name, step, value)

    def _curve(self, curves: dict[str, Series], name: str, step: int, value: float) -> None:
        if name in curves or len(curves) < _MOST_NAMES:
            curves.setdefault(name, Series()).add(step, value)

    def _keep(self, known: dict[str, float], values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name in known or len(known) < _MOST_NAMES:
                known[name] = value

    def _members(self, members: protocol.Members) -> None:
        begins, was = not self.members.spans, self.members.now
        came, went = self.members.take(members, self.now)
        if (before := self.view) is not None and not self._cause:
            covered = "new backup" if members.exposed < before.exposed else ""
            self._cause = "new view" if members.view != before.view else covered
        self.views.append(members)
        if came and not begins:
            self._mark("join", f"with {', '.join(came)}")
            self.joined.update(_ROLES[self.members.now[member]] for member in came)
        if went:
            self._mark("loss", f"without {', '.join(went)}")
            self.gone.update(_ROLES[was[member]] for member in went)
        for member in went:
            self.late.pop(member, None)
        self.machines.forget(went)

    def _audited(self, found: protocol.AuditFound) -> None:
        """Mark what an audit of a contribution has found: once, though several servers say it."""
        name, lost = f"audit of step {found.step}, replica {found.replica}", " and ".join(found.others)
        have = "has" if len(found.others) == 1 else "have"
        winners = f"other bytes than {' and '.join(found.agreed)}" if found.agreed else "different bytes"
        text = f"{name}: {lost} {have} computed {winners}"
        if all(mark["text"] != text for mark in self.marks):
            self._mark("audit", text)

    def _mark(self, kind: str, text: str) -> None:
        """Put a tick at the step that is reached."""
        self._cause = {"loss": "members gone", "back": "roll-back"}.get(kind, kind)
        self._said = self._said or text
        self.marks.append({"t": self.now, "step": self.step, "kind": kind, "text": text})

    def left(self, why: str) -> None:
        """The run was interrupted: its log does not go on."""
        self._end("interrupted", why)
        self.revision += 1

    def _end(self, how: str, why: str) -> None:
        self.over_at = self.now if self.over_at < 0 else self.over_at
        self.why, self.ended = why, how  # in this order: others may read it meanwhile
        self._pace.pause()
        self.members.over(self.now)


_LONG = 200  # characters


def differing(settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """For each run the settings that are not the same in all of them; of a long one, as a table of rates, the ends."""
    names = {name for own in settings.values() for name in own}
    differ = sorted(name for name in names if len({own.get(name, "") for own in settings.values()}) > 1)
    return {run: {name: _ends(own.get(name, "")) for name in differ} for run, own in settings.items()}


def _ends(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG // 2]} ... {text[-_LONG // 2 :]}"
