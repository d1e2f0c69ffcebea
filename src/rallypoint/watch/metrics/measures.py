"""What is measured: each name, what kind it is and what it says. Names follow Prometheus' conventions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram", "summary"]


class Measure(NamedTuple):
    """What a name stands for. A counter's name here has no ``_total``: the text format appends it."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


MEASURES: dict[str, Measure] = {
    # ---- every process ----
    "rallypoint_process_info": Measure("gauge", "1, with the process's role and name.", ("role", "member")),
    "rallypoint_ready": Measure("gauge", "1 while the process takes part in its job, as /readyz says."),
    "rallypoint_network_sent_bytes": Measure("counter", "Bytes sent over the links of this process."),
    "rallypoint_network_received_bytes": Measure("counter", "Bytes received over the links of this process."),
    # ---- the coordinator: the job ----
    "rallypoint_job_running": Measure("gauge", "1 from the job's beginning to its end, which its last word tells."),
    "rallypoint_job_start_timestamp_seconds": Measure("gauge", "Unix time at which this coordinator began."),
    "rallypoint_job_steps": Measure("gauge", "Steps that the job has in all."),
    "rallypoint_job_step": Measure("gauge", "Steps that are done. It goes down when the job goes back to a snapshot."),
    "rallypoint_steps": Measure("counter", "Steps done, those that were done again after a roll-back included."),
    "rallypoint_step_seconds": Measure("histogram", "Seconds between two rounds that are done (usually: two steps)."),
    "rallypoint_last_step_timestamp_seconds": Measure(
        "gauge", "Unix time of the last step that was done; before the first, when the job began."),
    "rallypoint_items": Measure("counter", "Samples (or tokens) of the steps done.", ("item",)),
    "rallypoint_loss": Measure("gauge", "The last step's loss, the mean over its replicas."),
    "rallypoint_learning_rate": Measure("gauge", "The last step's learning rate."),
    "rallypoint_figure": Measure("gauge", "What micro.log said in the last step.", ("name",)),
    "rallypoint_evaluation": Measure("gauge", "The newest result of run.every.", ("name",)),
    "rallypoint_goodput_ratio": Measure("gauge", "The share of the time that was not lost to stalls."),
    "rallypoint_stalls": Measure("counter", "Steps that took more than three medians."),
    "rallypoint_lost_seconds": Measure("counter", "Seconds lost to stalls, by what happened meanwhile.", ("cause",)),
    "rallypoint_skipped": Measure("counter", "What was skipped because it was not finite.", ("what",)),
    "rallypoint_repeated_reports": Measure("counter", "Steps of replicas that were computed twice, and reported."),
    "rallypoint_members": Measure("gauge", "Members of the newest view.", ("role",)),
    "rallypoint_members_joined": Measure("counter", "Members that have joined.", ("role",)),
    "rallypoint_members_gone": Measure("counter", "Members that have died or left.", ("role",)),
    "rallypoint_view_epoch": Measure("gauge", "The newest view's epoch: which coordinator published it."),
    "rallypoint_view_number": Measure("gauge", "The newest view's number in its epoch."),
    "rallypoint_replication": Measure("gauge", "On how many servers each shard is to be."),
    "rallypoint_exposed_shards": Measure("gauge", "Shards without a backup that has all that was published."),
    "rallypoint_lateness_seconds": Measure(
        "gauge", "How far behind the first worker's a worker's contribution comes, of late.", ("worker",)),
    "rallypoint_host_cpu_ratio": Measure("gauge", "The share of a machine's processors that is in use.", ("host",)),
    "rallypoint_host_memory_bytes": Measure("gauge", "Memory of a machine that is in use.", ("host",)),
    "rallypoint_waited_for_data_ratio": Measure(
        "gauge", "The share of its time in which a member's script waited for data.", ("member",)),
    "rallypoint_snapshots": Measure("counter", "Snapshots that are complete."),
    "rallypoint_snapshot_timestamp_seconds": Measure(
        "gauge", "Unix time of the newest complete snapshot; before the first, when this coordinator began."),
    "rallypoint_snapshot_step": Measure("gauge", "Steps that were done in the newest complete snapshot."),
    "rallypoint_snapshot_bytes": Measure("gauge", "The newest complete snapshot's size."),
    "rallypoint_snapshot_duration_seconds": Measure("gauge", "How long the newest complete snapshot took."),
    "rallypoint_snapshot_period_seconds": Measure("gauge", "A snapshot is due every so many seconds; 0: not by time."),
    "rallypoint_snapshot_period_steps": Measure("gauge", "A snapshot is due every so many steps; 0: not by steps."),
    # ---- a server ----
    "rallypoint_server_shards": Measure("gauge", "Shards held here, as primary or as backup.", ("holds",)),
    "rallypoint_server_unprotected_shards": Measure(
        "gauge", "Shards whose primary is here, and whose backup is missing or has not caught up."),
    "rallypoint_server_version": Measure("gauge", "The lowest version of the shards whose primary is here."),
    "rallypoint_server_waiting_events": Measure("gauge", "Frames and messages that wait for the owner of the shards."),
    "rallypoint_contributions": Measure(
        "counter", "Contributions to the shards whose primary is here, by what became of them.", ("fate",)),
    "rallypoint_audits": Measure(
        "counter", "Audited contributions to the shards whose primary is here: agreed, or only a third decided.",
        ("result",)),
    "rallypoint_staleness_updates": Measure(
        "histogram", "Updates between a contribution's own and the version that it was computed from (streaming)."),
    # ---- an aggregator ----
    "rallypoint_aggregator_taken": Measure("counter", "Contributions that workers have sent to this aggregator."),
    "rallypoint_aggregator_sent": Measure("counter", "Sums that this aggregator has sent to servers."),
    # ---- a worker ----
    "rallypoint_worker_step": Measure("gauge", "The step that this worker is at."),
    "rallypoint_worker_phase_seconds": Measure(
        "summary", "Seconds of each phase, and how often it came: wait, load, backward, ...", ("phase",)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counts:
    """A histogram's value: for each bound how many values were at most that high, of all, and their sum."""

    bounds: Sequence[float]
    cumulative: Sequence[int]
    count: int
    total: float


@dataclass(frozen=True, slots=True)
class Several:
    """A summary's value."""

    count: int
    total: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One value, as it is now."""

    name: str
    value: float | Counts | Several
    labels: Mapping[str, str] = field(default_factory=dict)


class Histogram:
    """Counts values by bounds. One thread adds, any may read: a reading may lack the value that is being added."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts, self._total = [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> Counts:
        """The counts until now."""
        cumulative, seen = list[int](), 0
        for count in list(self._counts):
            seen += count
            cumulative.append(seen)
        return Counts(self._bounds, cumulative[:-1], seen, self._total)
