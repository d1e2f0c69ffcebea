"""The figures of a job, from what its coordinator announces."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from rallypoint.core.cluster.terms import SnapshotPeriod, Terms, copies_of
from rallypoint.net.messages import (
    Aborted,
    Applied,
    Finished,
    Members,
    Metrics,
    Planned,
    Skipped,
    SnapshotEvery,
    Snapshotted,
    StepDone,
    Waiting,
)
from rallypoint.net.sampling.messages import Sampled
from rallypoint.watch.machines import Machines
from rallypoint.watch.metrics.measures import Histogram, Reading
from rallypoint.watch.steps import Pace, StepTimes

STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MOST_NAMES = 64  # of figures, of evaluations
_LATE_OVER = 0.95  # how much of a worker's lateness stays from step to step
_ROLES = ("worker", "standby", "server", "aggregator")


class JobFigures:
    """What Prometheus is told of a job. `take` gets each announcement, on the coordinator's own thread; any thread may
    `read`.

    `began` is the unix time at which the coordinator began. Its size has a bound, whatever the number of steps. What an
    earlier coordinator counted is not here: counters begin again, as Prometheus expects of a new process.
    """

    def __init__(self, terms: Terms, began: float) -> None:
        self._terms, self._began, self._lock = terms, began, threading.Lock()
        self._period = SnapshotPeriod(terms.snapshot_steps, terms.snapshot_seconds)
        self._plan: Planned | None = None
        self._running = False
        self._members: dict[str, tuple[str, ...]] = {}
        self._view, self._exposed = (0, 0), 0
        self._joined, self._gone = Counter[str](), Counter[str]()
        self._step = self._steps = self._items = self._again = 0
        self._last: dict[str, float] = {}  # gauges that are there once they are known
        self._figures: dict[str, float] = {}
        self._evaluations: dict[str, float] = {}
        self._seconds, self._times = Histogram(STEP_BOUNDS), StepTimes()
        self._moved = began  # when the last step was done, or the job began
        self._pace, self._machines = Pace(), Machines()
        self._cause = ""
        self._skipped, self._late = Counter[str](), dict[str, float]()
        self._snapshots, self._stored = 0, began

    def now(self, message: msgspec.Struct) -> None:
        """Take one announcement, now."""
        self.take(message, time.monotonic(), time.time())

    def take(self, message: msgspec.Struct, now: float, unix: float) -> None:
        """Take one announcement, at `now` (s) of a clock that never goes back and at `unix` time."""
        with self._lock:
            match message:
                case StepDone():
                    self._done(message, now, unix)
                case Sampled():
                    self._machines.take(message, now)
                case Applied(late=late):
                    self._lateness(late)
                case Planned():
                    self._plan, self._running = message, True
                    self._step, self._moved = message.done, unix
                    self._pace.begins()
                case Members():
                    self._viewed(message)
                case Metrics(values=values):
                    self._cause = self._cause or "evaluation"
                    _keep(self._evaluations, values)
                case Waiting():
                    self._cause = self._cause or "waiting"
                case Skipped():
                    self._cause = "skip"
                    self._skipped["contributions" if message.alone else "steps"] += 1
                case Snapshotted():
                    self._snapshots, self._stored = self._snapshots + 1, unix
                    self._last["rallypoint_snapshot_step"] = self._steps_in(message.version)
                    self._last["rallypoint_snapshot_bytes"] = message.nbytes
                    self._last["rallypoint_snapshot_duration_seconds"] = message.seconds
                case SnapshotEvery(seconds=seconds):
                    self._period = SnapshotPeriod(seconds=seconds)
                case Finished() | Aborted():
                    self._running = False
                case _:
                    pass

    def _done(self, done: StepDone, now: float, unix: float) -> None:
        assert self._plan is not None
        back = done.step + 1 <= self._step
        self._steps += self._plan.steps_per_round if back else done.step + 1 - self._step
        self._step, self._items, self._again = done.step + 1, self._items + done.items, done.again
        if done.has_loss(self._plan):
            self._last["rallypoint_loss"] = done.loss
        if done.lr is not None:
            self._last["rallypoint_learning_rate"] = done.lr
        _keep(self._figures, done.figures)
        if (seconds := self._pace.step(now)) is not None:
            self._seconds.add(seconds)
            self._times.add(done.step, seconds, self._cause or ("back" if back else "unknown"))
        self._moved, self._cause = unix, ""

    def _steps_in(self, version: int) -> int:
        return version if self._plan is None else min(self._plan.steps, version * self._plan.steps_per_round)

    def _viewed(self, view: Members) -> None:
        epoch, _, count = view.view.partition(".")
        self._view, self._exposed = (int(epoch), int(count)), view.exposed
        now = dict(zip(_ROLES, (view.workers, view.standby, view.servers, view.aggregators), strict=True))
        before, self._members = self._members, now
        if not before:
            return
        was, here = _kinds(before), _kinds(now)
        for member in here.keys() - was.keys():
            self._joined[here[member]] += 1
            self._cause = "join"
        for member in was.keys() - here.keys():
            self._gone[was[member]] += 1
            self._late.pop(member, None)
            self._cause = "loss"
        self._machines.forget(was.keys() - here.keys())

    def _lateness(self, late: Mapping[str, float]) -> None:
        for worker, seconds in late.items():
            if worker in self._members.get("worker", ()):
                self._late[worker] = _LATE_OVER * self._late.get(worker, seconds) + (1 - _LATE_OVER) * seconds

    def read(self) -> list[Reading]:
        """The figures as they are now."""
        with self._lock:
            return list(self._read())

    def _read(self) -> Iterator[Reading]:
        terms = self._terms
        yield Reading("rallypoint_job_running", float(self._running))
        yield Reading("rallypoint_job_start_timestamp_seconds", self._began)
        yield Reading("rallypoint_replication", copies_of(terms.replication, terms.servers))
        yield Reading("rallypoint_snapshot_period_seconds", self._period.seconds if terms.snapshots else 0.0)
        yield Reading("rallypoint_snapshot_period_steps", self._period.steps if terms.snapshots else 0)
        yield Reading("rallypoint_last_step_timestamp_seconds", self._moved)
        if self._plan is not None:
            yield Reading("rallypoint_job_steps", self._plan.steps)
            yield Reading("rallypoint_job_step", self._step)
            yield Reading("rallypoint_items", self._items, {"item": self._plan.item})
        yield Reading("rallypoint_steps", self._steps)
        yield Reading("rallypoint_step_seconds", self._seconds.read())
        yield from (Reading(name, value) for name, value in self._last.items())
        yield from (Reading("rallypoint_figure", value, {"name": name}) for name, value in self._figures.items())
        evaluations = self._evaluations.items()
        yield from (Reading("rallypoint_evaluation", value, {"name": name}) for name, value in evaluations)
        yield Reading("rallypoint_goodput_ratio", self._times.goodput)
        yield Reading("rallypoint_stalls", self._times.stalls)
        yield from (Reading("rallypoint_lost_seconds", s, {"cause": cause}) for cause, s in self._times.lost.items())
        yield from (Reading("rallypoint_skipped", self._skipped[what], {"what": what})
                    for what in ("steps", "contributions"))  # fmt: skip
        yield Reading("rallypoint_repeated_reports", self._again)
        yield from self._read_members()
        for name, host in self._machines.hosts.items():
            yield Reading("rallypoint_host_cpu_ratio", host.sample.cpu, {"host": name})
            yield Reading("rallypoint_host_memory_bytes", host.sample.memory, {"host": name})
        for member, sample in self._machines.members.items():
            if member in self._members.get("worker", ()):
                yield Reading("rallypoint_waited_for_data_ratio", sample.waited_for_data, {"member": member})
        if terms.snapshots:
            yield Reading("rallypoint_snapshots", self._snapshots)
            yield Reading("rallypoint_snapshot_timestamp_seconds", self._stored)

    def _read_members(self) -> Iterator[Reading]:
        for role in _ROLES:
            yield Reading("rallypoint_members", len(self._members.get(role, ())), {"role": role})
        for role in ("worker", "server", "aggregator"):
            yield Reading("rallypoint_members_joined", self._joined[role], {"role": role})
            yield Reading("rallypoint_members_gone", self._gone[role], {"role": role})
        yield Reading("rallypoint_view_epoch", self._view[0])
        yield Reading("rallypoint_view_number", self._view[1])
        yield Reading("rallypoint_exposed_shards", self._exposed)
        yield from (Reading("rallypoint_lateness_seconds", s, {"worker": worker}) for worker, s in self._late.items())


def _kinds(members: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Member -> worker, server or aggregator: a worker that stands by is a worker."""
    return {one: "worker" if role == "standby" else role for role, ones in members.items() for one in ones}


def _keep(known: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if name in known or len(known) < _MOST_NAMES:
            known[name] = value
