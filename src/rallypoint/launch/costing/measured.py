"""What a run that is over, or goes on, tells the planner: its model by module, its settings, its times, its losses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.codec.spec import CodecSpec
from rallypoint.config import JobConfig
from rallypoint.coordinator.journal import kept_state
from rallypoint.core.cluster.terms import copies_of
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Entry, Layout
from rallypoint.core.modes import Feature
from rallypoint.core.plan.workload import SENT_BYTES, Layer, Workload
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.plan import read_plan
from rallypoint.watch.follow import Follower, check_log
from rallypoint.watch.state import RunState

_SPARSE_BYTES = 6.0  # of each word that top-k and DGC send


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run as the planner sees it.

    Attributes:
        name: of its folder.
        sizes: words of each module, in the order of the forward pass.
        config: the job's settings, as data.
        workers, servers, replication: of the job, the members at the most.
        step: the median step, in seconds; 0 before there are enough.
        computed: seconds that the slowest replica of a step computed, the median; 0: not recorded.
        busiest: bytes a second that a machine has sent, or received, at the most; 0: unknown, or one machine only.
        losses: members that were lost, and `seconds_long` of what the run has lasted.
    """

    name: str
    sizes: tuple[int, ...]
    config: Mapping[str, Any]
    workers: int
    servers: int
    replication: int
    step: float
    computed: float
    busiest: float
    losses: int
    seconds_long: float

    @property
    def mtbf(self) -> float:
        """Seconds between two failures of one machine, counting each member as one."""
        return self.seconds_long * (self.workers + self.servers) / max(1, self.losses)


def measured_run(folder: Path) -> MeasuredRun:
    """Read the run in `folder`. UsageError if there is none, or nothing is known of its model yet."""
    check_log(folder)
    state = kept_state(folder)
    if state is None or state.record is None:
        raise UsageError(f"{folder} does not say what is trained: its job has not begun, or its journal is gone")
    follower = Follower(folder)
    follower.look()
    seen, record = follower.run, state.record
    counts = {kind: _most(seen, kind) for kind in ("computing", "server")}
    return MeasuredRun(
        name=folder.resolve().name, sizes=sizes_of(record.layout), config=record.config,
        workers=counts["computing"] or 1, servers=counts["server"] or 1, replication=_replication_of(folder, record),
        step=seen.times.quantile(0.5), computed=statistics.median(seen.computed) if seen.computed else 0.0,
        busiest=_busiest(seen),
        losses=sum(mark["kind"] == "loss" for mark in seen.marks), seconds_long=seen.now,
    )  # fmt: skip


def sizes_of(layout: Layout) -> tuple[int, ...]:
    """The words of each module that has parameters of its own, about in the order of the forward pass.

    Each optimizer group lies in backward order (`core.layout`), so a module stands where its largest tensor is, in
    parts of that group. What only servers hold (tables) is left out: it is pulled row by row.
    """
    held = [entry for entry in layout.entries if entry.spec.group >= 0 and entry.spec.numel]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    modules: dict[str, list[Entry]] = {}
    for entry in held:
        group = entry.spec.group
        first[group] = min(first.get(group, entry.start), entry.start)
        last[group] = max(last.get(group, 0), entry.stop)
        modules.setdefault(entry.spec.name.rpartition(".")[0], []).append(entry)

    def depth(own: list[Entry]) -> float:
        largest = max(own, key=lambda entry: entry.spec.numel)
        group = largest.spec.group
        return (last[group] - largest.stop) / (last[group] - first[group])

    return tuple(sum(entry.spec.numel for entry in own) for own in sorted(modules.values(), key=depth))


def workload_of(config: JobConfig, layers: Sequence[Layer]) -> Workload:
    """What a job with these settings does in a step."""
    return Workload(
        layers=tuple(layers), shard_bytes=config.shard_bytes, up=_bytes_of(config.codec), down=_bytes_of(config.down),
        clip=config.clip is not None or config.nonfinite == "skip", steps=config.steps_per_round, early=config.overlap,
    )  # fmt: skip


def _bytes_of(codec: CodecSpec) -> float:
    """What a word takes with this codec; 4 for one that the planner does not know."""
    told = msgspec.to_builtins(codec)
    return _SPARSE_BYTES * told["ratio"] if "ratio" in told else SENT_BYTES.get(told["type"], 4.0)


def _replication_of(folder: Path, record: JobRecord) -> int:
    try:
        plan = read_plan(folder)
        return copies_of(plan.replication, plan.servers, supported=record.supports(Feature.REPLICATION))
    except RallypointError:
        return 1  # a run by hand


def _most(run: RunState, state: str) -> int:
    """How many members had this state at once, at the most."""
    changes = sorted(
        (t, new == state, member) for member, spans in run.members.spans.items() for t, new in spans
    )  # fmt: skip
    here: set[str] = set()
    most = 0
    for _, comes, member in changes:
        here = here | {member} if comes else here - {member}
        most = max(most, len(here))
    return most


def _busiest(run: RunState) -> float:
    """Between machines; on one machine nothing is measured, because loopback is not a link."""
    samples = [host.sample for host in run.machines.hosts.values()]
    if len(samples) < 2:
        return 0.0
    return max(max(sample.network_sent, sample.network_received) for sample in samples)
