"""Builds a worker's shell from the mode's description. No other file of `core/worker` reads that description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rallypoint.core.audits import Audits
from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.modes import ModeTraits, Pace, StateHolder
from rallypoint.core.sums import Presum
from rallypoint.core.worker.aligned import OverlapMachine, WorkerMachine
from rallypoint.core.worker.handover import CodecStateCustody, NoCodecStates
from rallypoint.core.worker.rolling import RollingMachine
from rallypoint.core.worker.shell import CodecStateSnapshots, Machine, ModelShares, WorkerShell, WorkerSnapshots
from rallypoint.core.worker.streaming import StreamMachine


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker's machine and links need to know of the job.

    Attributes:
        shards: the number of shards.
        buffer_shards: the shards to which only one replica contributes: replica 0, or the one in `carried`.
        rounds: the job's last version.
        mode: the description of the mode.
        cadence: the shards that each round updates.
        codec_state_shards: the shards whose codec has a state for each replica.
        presum: what the worker adds up before it sends it.
        overlaps: a forward pass may begin before all of its version is here.
        audits: the contributions that a second worker computes too; None: there are none.
        carried: by shard of carried state, the replica that carries it.
        sums: a version of a shard is a sum, and each shard goes on by itself (`RollingMachine`).
    """

    shards: int
    buffer_shards: frozenset[int]
    rounds: int
    mode: ModeTraits
    cadence: Cadence = TOGETHER
    codec_state_shards: tuple[int, ...] = ()
    presum: tuple[frozenset[int], int, int] = (frozenset(), 1, 1)  # see `core/sums.py`: Presum
    overlaps: bool = False
    audits: Audits | None = None
    carried: Mapping[int, int] = field(default_factory=dict)
    sums: bool = False


def shell_for(me: str, plan: WorkerPlan, watch: Callable[[Machine], Machine] = lambda machine: machine) -> WorkerShell:
    """Build the shell and machine of the worker `me`. `watch` may wrap the machine, to check or to record it."""
    states = CodecStateCustody(plan.codec_state_shards) if plan.codec_state_shards else NoCodecStates()
    match plan.mode.pace:
        case Pace.OWN:
            stream = StreamMachine(me, plan.shards, plan.buffer_shards, plan.rounds)
            return WorkerShell(watch(stream), states, WorkerSnapshots())
        case Pace.ROUNDS if plan.sums:
            rolling = RollingMachine(me, plan.shards, plan.buffer_shards, plan.rounds)
            return WorkerShell(watch(rolling), states, WorkerSnapshots())
        case Pace.ROUNDS:
            kind = OverlapMachine if plan.overlaps else WorkerMachine
            aligned = kind(
                me, plan.shards, plan.buffer_shards, plan.rounds, cadence=plan.cadence,
                in_order=plan.mode.holder is StateHolder.WORKERS, presum=Presum(*plan.presum),
                audits=plan.audits, carried=plan.carried,
            )  # fmt: skip
            if plan.mode.holder is StateHolder.WORKERS:
                return WorkerShell(watch(aligned), states, ModelShares())
            copied = CodecStateSnapshots(aligned, plan.codec_state_shards) if states.kept else WorkerSnapshots()
            return WorkerShell(watch(aligned), states, copied)
