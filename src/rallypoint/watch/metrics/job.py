"""The figures of a job, from what its coordinator announces."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec

from rallypoint.core.cluster.terms import Terms, copies_of
from rallypoint.watch.metrics.measures import Reading
from rallypoint.watch.state import RunState


class JobFigures:
    """What Prometheus is told of a job. `take` gets each announcement, on the coordinator's own thread; any thread may
    `read`.

    `began` is the unix time at which the coordinator began. What an earlier coordinator counted is not here: counters
    begin again, as Prometheus expects of a new process.
    """

    def __init__(self, terms: Terms, began: float) -> None:
        self._terms, self._began, self._lock, self._run = terms, began, threading.Lock(), RunState()
        self._ahead = 0.0  # the unix time less the state's own

    def now(self, message: msgspec.Struct) -> None:
        """Take one announcement, now."""
        self.take(message, time.monotonic(), time.time())

    def take(self, message: msgspec.Struct, now: float, unix: float) -> None:
        """Take one announcement, at `now` (s) of a clock that never goes back and at `unix` time."""
        with self._lock:
            self._run.take(message, now)
            self._ahead = unix - self._run.now

    def read(self) -> list[Reading]:
        """The figures as they are now."""
        with self._lock:
            return list(self._read())

    def _read(self) -> Iterator[Reading]:
        terms, run = self._terms, self._run
        yield Reading("rallypoint_job_running", float(run.plan is not None and not run.ended))
        yield Reading("rallypoint_job_start_timestamp_seconds", self._began)
        yield Reading("rallypoint_replication", copies_of(terms.replication, terms.servers))
        moved = run.moved + self._ahead if run.moved >= 0 else self._began
        yield Reading("rallypoint_last_step_timestamp_seconds", moved)
        if run.plan is not None:
            yield Reading("rallypoint_job_steps", run.plan.steps)
            yield Reading("rallypoint_job_step", run.reached)
            yield Reading("rallypoint_items", run.items, {"item": run.plan.item})
        yield Reading("rallypoint_steps", run.steps)
        yield Reading("rallypoint_step_seconds", run.times.histogram.read())
        if run.loss is not None:
            yield Reading("rallypoint_loss", run.loss)
        if run.lr is not None:
            yield Reading("rallypoint_learning_rate", run.lr)
        yield from (Reading("rallypoint_figure", value, {"name": name}) for name, value in run.figures.items())
        yield from (Reading("rallypoint_evaluation", value, {"name": name}) for name, value in run.results.items())
        yield Reading("rallypoint_goodput_ratio", run.times.goodput)
        yield Reading("rallypoint_stalls", run.times.stalls)
        yield from (Reading("rallypoint_lost_seconds", s, {"cause": cause}) for cause, s in run.times.lost.items())
        yield from (Reading("rallypoint_skipped", run.skipped[what], {"what": what})
                    for what in ("steps", "contributions"))  # fmt: skip
        yield Reading("rallypoint_repeated_reports", run.again)
        yield Reading("rallypoint_server_mismatches", run.mismatches)
        yield from self._read_members()
        yield from self._read_snapshots()

    def _read_members(self) -> Iterator[Reading]:
        run, view = self._run, self._run.view
        workers = () if view is None else view.workers
        counts = {"worker": len(workers), "standby": 0, "server": 0, "aggregator": 0}
        epoch, count, exposed = "0", "0", 0
        if view is not None:
            counts |= {"standby": len(view.standby), "server": len(view.servers), "aggregator": len(view.aggregators)}
            (epoch, _, count), exposed = view.view.partition("."), view.exposed
        for role, number in counts.items():
            yield Reading("rallypoint_members", number, {"role": role})
        for role in ("worker", "server", "aggregator"):
            yield Reading("rallypoint_members_joined", run.joined[role], {"role": role})
            yield Reading("rallypoint_members_gone", run.gone[role], {"role": role})
        yield Reading("rallypoint_view_epoch", int(epoch))
        yield Reading("rallypoint_view_number", int(count))
        yield Reading("rallypoint_exposed_shards", exposed)
        yield from (Reading("rallypoint_lateness_seconds", s, {"worker": worker}) for worker, s in run.late.items())
        for name, host in run.machines.hosts.items():
            yield Reading("rallypoint_host_cpu_ratio", host.sample.cpu, {"host": name})
            yield Reading("rallypoint_host_memory_bytes", host.sample.memory, {"host": name})
        for member, sample in run.machines.members.items():
            if member in workers:
                yield Reading("rallypoint_waited_for_data_ratio", sample.waited_for_data, {"member": member})

    def _read_snapshots(self) -> Iterator[Reading]:
        terms, run = self._terms, self._run
        seconds, steps = terms.snapshot_seconds, terms.snapshot_steps
        if run.period is not None:
            seconds, steps = run.period.seconds, run.period.steps
        yield Reading("rallypoint_snapshot_period_seconds", seconds if terms.snapshots else 0.0)
        yield Reading("rallypoint_snapshot_period_steps", steps if terms.snapshots else 0)
        newest = run.snapshots[-1] if run.snapshots else None
        if newest is not None:
            yield Reading("rallypoint_snapshot_step", run.steps_in(newest["version"]))
            yield Reading("rallypoint_snapshot_bytes", newest["nbytes"])
            yield Reading("rallypoint_snapshot_duration_seconds", newest["seconds"])
        if terms.snapshots:
            yield Reading("rallypoint_snapshots", run.stored)
            stored = self._began if newest is None else newest["t"] + self._ahead
            yield Reading("rallypoint_snapshot_timestamp_seconds", stored)
