"""What Prometheus is told: the names, a job's figures from what its coordinator announces, a member's own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from rallypoint.core.cluster.terms import Terms, copies_of
from rallypoint.core.protocol import Members
from rallypoint.core.shard.audited import AuditedShard
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.view import View
from rallypoint.observe.trace import Tracer
from rallypoint.watch.state import Histogram, HistogramCounts, RunState

Kind = Literal["gauge", "counter", "histogram", "summary"]


class Metric(NamedTuple):
    """What a name stands for. A counter's name here has no ``_total``: the text format appends it."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


MEASURES: dict[str, Metric] = {
    # ---- every process ----
    "rallypoint_process_info": Metric("gauge", "1, with the process's role and name.", ("role", "member")),
    "rallypoint_ready": Metric("gauge", "1 while the process takes part in its job, as /readyz says."),
    "rallypoint_network_sent_bytes": Metric("counter", "Bytes sent over the links of this process."),
    "rallypoint_network_received_bytes": Metric("counter", "Bytes received over the links of this process."),
    # ---- the coordinator: the job ----
    "rallypoint_job_running": Metric("gauge", "1 from the job's beginning to its end, which its last word tells."),
    "rallypoint_job_start_timestamp_seconds": Metric("gauge", "Unix time at which this coordinator began."),
    "rallypoint_job_steps": Metric("gauge", "Steps that the job has in all."),
    "rallypoint_job_step": Metric("gauge", "Steps that are done. It goes down when the job goes back to a snapshot."),
    "rallypoint_steps": Metric("counter", "Steps done, those that were done again after a roll-back included."),
    "rallypoint_step_seconds": Metric("histogram", "Seconds between two rounds that are done (usually: two steps)."),
    "rallypoint_last_step_timestamp_seconds": Metric(
        "gauge", "Unix time of the last step that was done; before the first, when the job began."),
    "rallypoint_items": Metric("counter", "Samples (or tokens) of the steps done.", ("item",)),
    "rallypoint_loss": Metric("gauge", "The last step's loss, the mean over its replicas."),
    "rallypoint_learning_rate": Metric("gauge", "The last step's learning rate."),
    "rallypoint_figure": Metric("gauge", "What micro.log said in the last step.", ("name",)),
    "rallypoint_evaluation": Metric("gauge", "The newest result of run.every.", ("name",)),
    "rallypoint_goodput_ratio": Metric("gauge", "The share of the time that was not lost to stalls."),
    "rallypoint_stalls": Metric("counter", "Steps that took more than three medians."),
    "rallypoint_lost_seconds": Metric("counter", "Seconds lost to stalls, by what happened meanwhile.", ("cause",)),
    "rallypoint_skipped": Metric("counter", "What was skipped because it was not finite.", ("what",)),
    "rallypoint_repeated_reports": Metric("counter", "Steps of replicas that were computed twice, and reported."),
    "rallypoint_members": Metric("gauge", "Members of the newest view.", ("role",)),
    "rallypoint_members_joined": Metric("counter", "Members that have joined.", ("role",)),
    "rallypoint_members_gone": Metric("counter", "Members that have died or left.", ("role",)),
    "rallypoint_view_epoch": Metric("gauge", "The newest view's epoch: which coordinator published it."),
    "rallypoint_view_number": Metric("gauge", "The newest view's number in its epoch."),
    "rallypoint_replication": Metric("gauge", "On how many servers each shard is to be."),
    "rallypoint_exposed_shards": Metric("gauge", "Shards without a backup that has all that was published."),
    "rallypoint_lateness_seconds": Metric(
        "gauge", "How far behind the first worker's a worker's contribution comes, of late.", ("worker",)),
    "rallypoint_host_cpu_ratio": Metric("gauge", "The share of a machine's processors that is in use.", ("host",)),
    "rallypoint_host_memory_bytes": Metric("gauge", "Memory of a machine that is in use.", ("host",)),
    "rallypoint_waited_for_data_ratio": Metric(
        "gauge", "The share of its time in which a member's script waited for data.", ("member",)),
    "rallypoint_snapshots": Metric("counter", "Snapshots that are complete."),
    "rallypoint_snapshot_timestamp_seconds": Metric(
        "gauge", "Unix time of the newest complete snapshot; before the first, when this coordinator began."),
    "rallypoint_snapshot_step": Metric("gauge", "Steps that were done in the newest complete snapshot."),
    "rallypoint_snapshot_bytes": Metric("gauge", "The newest complete snapshot's size."),
    "rallypoint_snapshot_duration_seconds": Metric("gauge", "How long the newest complete snapshot took."),
    "rallypoint_snapshot_period_seconds": Metric("gauge", "A snapshot is due every so many seconds; 0: not by time."),
    "rallypoint_snapshot_period_steps": Metric("gauge", "A snapshot is due every so many steps; 0: not by steps."),
    # ---- a server ----
    "rallypoint_server_shards": Metric("gauge", "Shards held here, as primary or as backup.", ("holds",)),
    "rallypoint_server_unprotected_shards": Metric(
        "gauge", "Shards whose primary is here, and whose backup is missing or has not caught up."),
    "rallypoint_server_version": Metric("gauge", "The lowest version of the shards whose primary is here."),
    "rallypoint_server_waiting_events": Metric("gauge", "Frames and messages that wait for the owner of the shards."),
    "rallypoint_contributions": Metric(
        "counter", "Contributions to the shards whose primary is here, by what became of them.", ("fate",)),
    "rallypoint_audits": Metric(
        "counter", "Audited contributions to the shards whose primary is here: agreed, or only a third decided.",
        ("result",)),
    "rallypoint_staleness_updates": Metric(
        "histogram", "Updates between a contribution's own and the version that it was computed from (streaming)."),
    # ---- an aggregator ----
    "rallypoint_aggregator_taken": Metric("counter", "Contributions that workers have sent to this aggregator."),
    "rallypoint_aggregator_sent": Metric("counter", "Sums that this aggregator has sent to servers."),
    # ---- a worker ----
    "rallypoint_worker_step": Metric("gauge", "The step that this worker is at."),
    "rallypoint_worker_phase_seconds": Metric(
        "summary", "Seconds of each phase, and how often it came: wait, load, backward, ...", ("phase",)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Several:
    """A summary's value."""

    count: int
    total: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One value, as it is now."""

    name: str
    value: float | HistogramCounts | Several
    labels: Mapping[str, str] = field(default_factory=dict)


STALENESS_BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


def of_view(view: View | None) -> Iterator[Figure]:
    if view is not None:
        yield Figure("rallypoint_view_epoch", view.number.epoch)
        yield Figure("rallypoint_view_number", view.number.count)


def of_server(machine: ServerMachine | None, waiting: int) -> Iterator[Figure]:
    """A server's shards. Any thread may ask: a shard that comes or goes meanwhile is in this reading or in the next.

    `waiting`: how many events wait for the owner of the shards.
    """
    yield Figure("rallypoint_server_waiting_events", waiting)
    if machine is None:
        return
    held = [shard for index in machine.held if (shard := machine.machine(index)) is not None]
    primaries = [shard for shard in held if shard.primary]
    yield Figure("rallypoint_server_shards", len(primaries), {"holds": "primary"})
    yield Figure("rallypoint_server_shards", len(held) - len(primaries), {"holds": "backup"})
    exposed = sum(not shard.copies.backup.caught_up for shard in primaries)
    yield Figure("rallypoint_server_unprotected_shards", exposed)
    if primaries:
        yield Figure("rallypoint_server_version", min(shard.version for shard in primaries))
    fates, staleness = Counter[str](), Counter[int]()
    for tally in [shard.tally for shard in primaries]:
        fates.update(applied=tally.applied, folded=tally.folded, dropped=tally.dropped, repeated=tally.repeats)
        staleness.update(dict(tally.staleness))
    yield from (Figure("rallypoint_contributions", count, {"fate": fate}) for fate, count in fates.items())
    if audited := [shard.opinions for shard in primaries if isinstance(shard, AuditedShard)]:
        lost = sum(opinions.lost for opinions in audited)
        yield Figure("rallypoint_audits", sum(opinions.accepted for opinions in audited) - lost, {"result": "agreed"})
        yield Figure("rallypoint_audits", lost, {"result": "lost"})
    if staleness:
        histogram = Histogram(STALENESS_BOUNDS)
        for updates, times in staleness.items():
            histogram.add(updates, times)
        yield Figure("rallypoint_staleness_updates", histogram.read())


def of_aggregator(counts: tuple[int, int]) -> Iterator[Figure]:
    """An aggregator's counts: contributions taken, and sums sent."""
    yield Figure("rallypoint_aggregator_taken", counts[0])
    yield Figure("rallypoint_aggregator_sent", counts[1])


def of_worker(step: int | None, tracer: Tracer) -> Iterator[Figure]:
    """A worker's step (None: its run has not begun), and how long its phases took."""
    if step is not None:
        yield Figure("rallypoint_worker_step", step)
    for phase, (count, seconds) in tracer.phases.items():
        yield Figure("rallypoint_worker_phase_seconds", Several(count, seconds), {"phase": phase})


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
        self.take(message, time.monotonic(), time.time())

    def take(self, message: msgspec.Struct, now: float, unix: float) -> None:
        """Take one announcement, at `now` (s) of a clock that never goes back and at `unix` time."""
        with self._lock:
            self._run.take(message, now)
            self._ahead = unix - self._run.now

    def read(self) -> list[Figure]:
        with self._lock:
            return list(self._read())

    def _read(self) -> Iterator[Figure]:
        terms, run = self._terms, self._run
        yield Figure("rallypoint_job_running", float(run.plan is not None and not run.ended))
        yield Figure("rallypoint_job_start_timestamp_seconds", self._began)
        yield Figure("rallypoint_replication", copies_of(terms.replication, terms.servers))
        moved = run.moved + self._ahead if run.moved >= 0 else self._began
        yield Figure("rallypoint_last_step_timestamp_seconds", moved)
        if run.plan is not None:
            yield Figure("rallypoint_job_steps", run.plan.steps)
            yield Figure("rallypoint_job_step", run.reached)
            yield Figure("rallypoint_items", run.items, {"item": run.plan.item})
        yield Figure("rallypoint_steps", run.steps)
        yield Figure("rallypoint_step_seconds", run.times.histogram.read())
        if run.loss is not None:
            yield Figure("rallypoint_loss", run.loss)
        if run.lr is not None:
            yield Figure("rallypoint_learning_rate", run.lr)
        yield from (Figure("rallypoint_figure", value, {"name": name}) for name, value in run.figures.items())
        yield from (Figure("rallypoint_evaluation", value, {"name": name}) for name, value in run.results.items())
        yield Figure("rallypoint_goodput_ratio", run.times.goodput)
        yield Figure("rallypoint_stalls", run.times.stalls)
        yield from (Figure("rallypoint_lost_seconds", s, {"cause": cause}) for cause, s in run.times.lost.items())
        yield from (Figure("rallypoint_skipped", run.skipped[what], {"what": what})
                    for what in ("steps", "contributions"))  # fmt: skip
        yield Figure("rallypoint_repeated_reports", run.again)
        yield from self._read_members()
        yield from self._read_snapshots()

    def _read_members(self) -> Iterator[Figure]:
        run, view = self._run, self._run.view or Members("0.0", (), (), ())
        epoch, _, count = view.view.partition(".")
        members = {"worker": view.workers, "standby": view.standby, "server": view.servers,
                   "aggregator": view.aggregators}  # fmt: skip
        for role, names in members.items():
            yield Figure("rallypoint_members", len(names), {"role": role})
        for role in ("worker", "server", "aggregator"):
            yield Figure("rallypoint_members_joined", run.joined[role], {"role": role})
            yield Figure("rallypoint_members_gone", run.gone[role], {"role": role})
        yield Figure("rallypoint_view_epoch", int(epoch))
        yield Figure("rallypoint_view_number", int(count))
        yield Figure("rallypoint_exposed_shards", view.exposed)
        yield from (Figure("rallypoint_lateness_seconds", s, {"worker": worker}) for worker, s in run.late.items())
        for name, host in run.machines.hosts.items():
            yield Figure("rallypoint_host_cpu_ratio", host.sample.cpu, {"host": name})
            yield Figure("rallypoint_host_memory_bytes", host.sample.memory, {"host": name})
        for member, sample in run.machines.members.items():
            if member in view.workers:
                yield Figure("rallypoint_waited_for_data_ratio", sample.waited_for_data, {"member": member})

    def _read_snapshots(self) -> Iterator[Figure]:
        terms, run = self._terms, self._run
        seconds, steps = terms.snapshot_seconds, terms.snapshot_steps
        if run.period is not None:
            seconds, steps = run.period, 0
        yield Figure("rallypoint_snapshot_period_seconds", seconds if terms.snapshots else 0.0)
        yield Figure("rallypoint_snapshot_period_steps", steps if terms.snapshots else 0)
        newest = run.snapshots[-1] if run.snapshots else None
        if newest is not None:
            yield Figure("rallypoint_snapshot_step", run.steps_in(newest["version"]))
            yield Figure("rallypoint_snapshot_bytes", newest["nbytes"])
            yield Figure("rallypoint_snapshot_duration_seconds", newest["seconds"])
        if terms.snapshots:
            yield Figure("rallypoint_snapshots", run.stored)
            stored = self._began if newest is None else newest["t"] + self._ahead
            yield Figure("rallypoint_snapshot_timestamp_seconds", stored)
