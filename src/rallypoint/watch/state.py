"""A run as whoever observes it sees it: made from what its coordinator announces, live or from ``events.jsonl``.

The console, the page, `top`, metrics, reports, trackers and replays show it. What an event means is decided here alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rallypoint.core.protocol import (
    Aborted,
    Accounted,
    Applied,
    AuditFound,
    Finished,
    Held,
    Members,
    Metrics,
    Ordered,
    Planned,
    Sampled,
    Say,
    ScriptAt,
    Skipped,
    SnapshotEvery,
    Snapshotted,
    StepDone,
    Waiting,
)
from rallypoint.observe.lines import Once
from rallypoint.watch.machines import Machines, by_number
from rallypoint.watch.series import Series
from rallypoint.watch.steps import Pace, StepTimes

EVALUATION = "evaluation/"  # before the names of evaluations in `RunState.row`
_MOST_MARKS, _MOST_SENTENCES, _MOST_SNAPSHOTS, _MOST_VIEWS = 1000, 300, 50, 20
_MOST_COMPUTED = 256
_MOST_NAMES = 64  # of figures, and of evaluations
_LATE_OVER = 0.95  # how much of a worker's lateness stays from step to step
_MOST_SPANS = 200  # of a member
_MOST_MEMBERS = 4096
_GONE = "gone"
_ROLES = {"computing": "worker", "standby": "worker"}  # of a member's state; else the state is the role


@dataclass(slots=True)
class Timelines:
    """For each member the times (s) at which its state changed, and to what.

    States: ``computing``, ``standby``, ``server``, ``aggregator``, ``gone``. Of a member with very many changes the
    oldest are forgotten, and of very many members those that have been gone for longest.
    """

    spans: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    revision: int = 0
    now: dict[str, str] = field(default_factory=dict)  # what the members are that are here

    def take(self, members: Members, t: float) -> tuple[list[str], list[str]]:
        """A new view, at time `t`. Returns who has come and who has gone."""
        before, self.now = self.now, dict(self._states(members))
        came, went = self.now.keys() - before.keys(), before.keys() - self.now.keys()
        for member in [*self.now, *went]:
            self._change(member, t, self.now.get(member, _GONE))
        self._forget()
        return sorted(came, key=by_number), sorted(went, key=by_number)

    @property
    def here(self) -> Set[str]:
        """The members that are here."""
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

    def _states(self, members: Members) -> Iterable[tuple[str, str]]:
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


@dataclass(slots=True)
class RunState:
    """What is known of a run. Its size has a bound, whatever the number of steps.

    `take` gets the messages in their order, each with the time `t` (s) of the coordinator that sent it: the clock of a
    new coordinator begins at 0 again, and `now` goes on. Where live messages are taken, `t` is this machine's own.
    """

    plan: Planned | None = None
    began_at: int = 0  # the steps that were done before the first thing that is known
    now: float = 0.0
    step: int = 0  # steps that are done
    reached: int = 0  # the same; before a coordinator's first step, as many as it goes on from
    steps: int = 0  # steps that were made, those included that were made again
    items: int = 0  # of them
    script: ScriptAt = field(default_factory=lambda: ScriptAt(0))  # in a job of sums: the one that has got most of them
    again: int = 0
    moved: float = -1.0  # when the last step was done, or the coordinator began; -1: not yet
    ended: str = ""  # "finished", "failed" or, while the run goes on, ""
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
    views: deque[Members] = field(default_factory=lambda: deque(maxlen=_MOST_VIEWS))
    members: Timelines = field(default_factory=Timelines)
    joined: Counter[str] = field(default_factory=Counter)  # by role: worker, server, aggregator
    gone: Counter[str] = field(default_factory=Counter)
    machines: Machines = field(default_factory=Machines)
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
    accounted: Accounted | None = None  # what the first shard's primary has counted
    late: dict[str, float] = field(default_factory=dict)  # worker -> mean seconds behind the first, of late
    skipped: Counter[str] = field(default_factory=Counter)  # "steps", "contributions"
    revision: int = 0
    _clock: float = 0.0  # the last time that the coordinator said
    _pace: Pace = field(default_factory=Pace)
    _once: Once = field(default_factory=Once)
    _cause: str = ""  # what has happened since
    _said: str = ""  # the same as a sentence

    @property
    def view(self) -> Members | None:
        """The newest view."""
        return self.views[-1] if self.views else None

    @property
    def sums(self) -> int:
        """In a job of sums: how many the scripts have got."""
        return self.script.sums

    @property
    def of_sums(self) -> bool:
        """True if the job makes sums for scripts, which decide when they end: it has no steps."""
        return self.plan is not None and self.plan.steps == 0

    def steps_in(self, version: int) -> int:
        """The steps of training that a version of the parameters has behind it."""
        return version if self.plan is None else min(self.plan.steps, version * self.plan.steps_per_round)

    def take(self, message: msgspec.Struct, t: float) -> bool:
        """Take one announcement of the coordinator. False if it says again what a coordinator before it has said."""
        self.revision += 1
        self.now += t - self._clock if t >= self._clock else 0.0
        self._clock, self.row, self.went_back = t, None, False
        match message:
            case Planned():
                self._planned(message)
            case StepDone():
                self._step(message)
            case Metrics(step=step, values=values, generation=generation):
                if not self._once.is_new((step, generation, str(values))):
                    return False  # workers have repeated it to the next coordinator
                self._evaluated(step, values)
            case Members():
                self._members(message)
            case Applied(late=late):
                self._late(late)
            case ScriptAt(sums=sums):
                self.script = message if sums > self.script.sums else self.script
            case Sampled(member=member):
                if member in self.members.here:
                    self.machines.take(message, self.now)
            case Snapshotted(version=version, nbytes=nbytes, seconds=seconds):
                self.stored += 1
                self.snapshots.append({"t": self.now, "version": version, "nbytes": nbytes, "seconds": seconds})
            case SnapshotEvery(seconds=seconds):
                self.period = seconds
            case Accounted():
                self.accounted = message
            case Skipped():
                self.skipped["contributions" if message.alone else "steps"] += 1
                self._mark("skip", f"step {message.step} skipped: not finite")
            case AuditFound():
                self._audited(message)
            case Waiting(text=text):
                self.waits = text
                self._cause, self._said = self._cause or "waiting", text
                self.sentences.append({"t": self.now, "text": text})
            case Say(text=text) | Held(text=text) | Ordered(text=text):
                self.said = text
                self.sentences.append({"t": self.now, "text": text})
            case Finished(stopped_at=at, why=why):
                self.stopped = at, why
                self._end("finished", "" if at < 0 else why if self.of_sums else f"stopped at step {at}: {why}")
            case Aborted(reason=reason):
                self._end("failed", reason)
            case _:
                pass
        return True

    def _planned(self, plan: Planned) -> None:
        if self.plan is None:
            self.began_at = plan.done
        self.ended = self.why = ""
        self._pace.begins()
        self.plan, self.reached, self.moved = plan, plan.done, self.now

    def _step(self, done: StepDone) -> None:
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
            self._mark("back", f"back to step {done.step}")
        if (seconds := self._pace.step(self.now)) is not None:
            self._curve(self.curves, "seconds a step", done.step, seconds)
            if self.times.add(done.step, seconds, self._cause or "unknown"):
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

    def _members(self, members: Members) -> None:
        begins, was = not self.members.spans, self.members.now
        came, went = self.members.take(members, self.now)
        self.views.append(members)
        if came and not begins:
            self._mark("join", f"with {', '.join(came)}")
            self.joined.update(_role(self.members.now[member]) for member in came)
        if went:
            self._mark("loss", f"without {', '.join(went)}")
            self.gone.update(_role(was[member]) for member in went)
        for member in went:
            self.late.pop(member, None)
        self.machines.forget(went)

    def _late(self, late: Mapping[str, float]) -> None:
        for worker, seconds in late.items():
            if worker not in self.members.here:
                continue  # its word came after it was gone
            self.late[worker] = _LATE_OVER * self.late.get(worker, seconds) + (1 - _LATE_OVER) * seconds

    def _audited(self, found: AuditFound) -> None:
        """Mark what an audit of a contribution has found: once, though several servers say it."""
        name, lost = f"audit of step {found.step}, replica {found.replica}", " and ".join(found.others)
        have = "has" if len(found.others) == 1 else "have"
        winners = f"other bytes than {' and '.join(found.agreed)}" if found.agreed else "different bytes"
        text = f"{name}: {lost} {have} computed {winners}"
        if all(mark["text"] != text for mark in self.marks):
            self._mark("audit", text)

    def _mark(self, kind: str, text: str) -> None:
        """Put a tick at the step that is reached."""
        self._cause, self._said = kind, self._said or text
        self.marks.append({"t": self.now, "step": self.step, "kind": kind, "text": text})

    def _end(self, how: str, why: str) -> None:
        self.over_at = self.now if self.over_at < 0 else self.over_at
        self.why, self.ended = why, how  # in this order: others may read it meanwhile
        self._pace.pause()
        self.members.over(self.now)


def _role(state: str) -> str:
    return _ROLES.get(state, state)
