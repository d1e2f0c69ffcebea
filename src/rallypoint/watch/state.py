"""A run as its observers see it: everything that the page shows, made from what the coordinator has announced."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rallypoint.net.messages import (
    Aborted,
    Accounted,
    Applied,
    AuditFound,
    Finished,
    Held,
    Members,
    Message,
    Metrics,
    Ordered,
    Planned,
    Say,
    Skipped,
    Snapshotted,
    StepDone,
    Waiting,
)
from rallypoint.net.sampling.messages import Sampled, ScriptAt
from rallypoint.watch.machines import Machines
from rallypoint.watch.members import Timelines
from rallypoint.watch.series import Series
from rallypoint.watch.steps import Pace, StepTimes

_MOST_MARKS, _MOST_SENTENCES, _MOST_SNAPSHOTS = 1000, 300, 50
_MOST_COMPUTED = 256
_MOST_CURVES = 64  # names of figures and metrics
_LATE_OVER = 0.95  # how much of a worker's lateness stays from step to step


@dataclass(slots=True)
class RunState:
    """What is known of a run. Its size has a bound, whatever the number of steps.

    `take` gets the messages in their order, each with the time `t` (s) of the coordinator that sent it: the clock of a
    new coordinator begins at 0 again, and `now` goes on.
    """

    plan: Planned | None = None
    now: float = 0.0
    step: int = 0  # steps that are done
    sums: int = 0  # in a job of sums, which has no steps: how many the scripts have got
    again: int = 0
    ended: str = ""  # "finished", "failed" or, while the run goes on, ""
    why: str = ""
    curves: dict[str, Series] = field(default_factory=dict)  # by step: loss, lr, seconds, what `micro.log` said
    evaluations: dict[str, Series] = field(default_factory=dict)
    members: Timelines = field(default_factory=Timelines)
    machines: Machines = field(default_factory=Machines)
    marks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
    sentences: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_SENTENCES))
    snapshots: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_SNAPSHOTS))
    times: StepTimes = field(default_factory=StepTimes)
    computed: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_COMPUTED))  # s, of slowest replicas
    stalled: dict[str, Any] | None = None  # the last stall, with what was said or has happened meanwhile
    accounted: Accounted | None = None  # what the first shard's primary has counted
    late: dict[str, float] = field(default_factory=dict)  # worker -> mean seconds behind the first, of late
    skipped: Counter[str] = field(default_factory=Counter)
    revision: int = 0
    _clock: float = 0.0  # the last time that the coordinator said
    _pace: Pace = field(default_factory=Pace)
    _cause: str = ""  # what has happened since
    _said: str = ""  # the same as a sentence

    def take(self, message: Message, t: float) -> None:
        """Take one announcement of the coordinator."""
        self.revision += 1
        self.now += t - self._clock if t >= self._clock else 0.0
        self._clock = t
        match message:
            case Planned():
                self._pace.begins()
                self.plan, self.ended, self.why = message, "", ""
            case StepDone():
                self._step(message)
            case Metrics(step=step, values=values):
                self._cause = self._cause or "evaluation"
                for name, value in values.items():
                    self._curve(self.evaluations, name, step, value)
            case Members():
                self._members(message)
            case Applied(late=late):
                self._late(late)
            case ScriptAt(sums=sums):
                self.sums = max(self.sums, sums)
            case Sampled(member=member):
                if member in self.members.here:
                    self.machines.take(message, self.now)
            case Snapshotted(version=version, nbytes=nbytes, seconds=seconds):
                self.snapshots.append({"t": self.now, "version": version, "nbytes": nbytes, "seconds": seconds})
            case Accounted():
                self.accounted = message
            case Skipped():
                self.skipped["contributions" if message.alone else "steps"] += 1
                self._mark("skip", f"step {message.step} skipped: not finite")
            case AuditFound():
                self._audited(message)
            case Say(text=text) | Waiting(text=text) | Held(text=text) | Ordered(text=text):
                self.sentences.append({"t": self.now, "text": text})
                if isinstance(message, Waiting):
                    self._cause, self._said = self._cause or "waiting", text
            case Finished(stopped_at=at, why=why):
                steps = self.plan is None or self.plan.steps > 0  # a job of sums has none
                self._end("finished", "" if at < 0 else f"stopped at step {at}: {why}" if steps else why)
            case Aborted(reason=reason):
                self._end("failed", reason)
            case _:
                pass

    def _step(self, done: StepDone) -> None:
        back = done.step + 1 <= self.step
        if done.computed > 0.0:
            self.computed.append(done.computed)
        self.step, self.again = done.step + 1, done.again
        loss = done.loss if self.plan is None or done.has_loss(self.plan) else None
        for name, value in {"loss": loss, "lr": done.lr, **done.figures}.items():
            if value is not None:
                self._curve(self.curves, name, done.step, value)
        if back:
            self._mark("back", f"back to step {done.step}")
        if (seconds := self._pace.step(self.now)) is not None:
            self._curve(self.curves, "seconds a step", done.step, seconds)
            if self.times.add(done.step, seconds, self._cause or "unknown"):
                self.stalled = {"step": done.step, "seconds": seconds, "text": self._said or self._cause}
        self._cause = self._said = ""

    def _curve(self, curves: dict[str, Series], name: str, step: int, value: float) -> None:
        if name in curves or len(curves) < _MOST_CURVES:
            curves.setdefault(name, Series()).add(step, value)

    def _members(self, members: Members) -> None:
        begins = not self.members.spans
        came, went = self.members.take(members, self.now)
        if came and not begins:
            self._mark("join", f"with {', '.join(came)}")
        if went:
            self._mark("loss", f"without {', '.join(went)}")
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
        self.ended, self.why = how, why
        self._pace.pause()
        self.members.over(self.now)
