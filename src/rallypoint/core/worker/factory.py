"""The one place where a worker asks what kind of job it is in: it picks the machine and what goes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.custody import CodecStateCustody, NoCodecStates
from rallypoint.core.worker.shell import Machine, WorkerShell
from rallypoint.core.worker.snapshots import CodecStateSnapshots, Snapshots
from rallypoint.core.worker.streaming import StreamMachine


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker has to know of its job, as far as machines and links go.

    `buffer_shards` are those to which only replica 0 contributes, `codec_state_shards` those whose codec has a
    state for each replica. `in_order`: the worker steps the optimizer, so it installs every version (AllReduce).
    """

    shards: int
    buffer_shards: frozenset[int]
    rounds: int
    streaming: bool = False
    in_order: bool = False
    cadence: Cadence = TOGETHER
    codec_state_shards: tuple[int, ...] = ()


def shell_for(me: str, plan: WorkerPlan, watch: Callable[[Machine], Machine] = lambda machine: machine) -> WorkerShell:
    """The shell, with its machine, of the worker `me`. `watch` may wrap the machine, to check or to record it."""
    states = CodecStateCustody(plan.codec_state_shards) if plan.codec_state_shards else NoCodecStates()
    if plan.streaming:
        stream = StreamMachine(me, plan.shards, plan.buffer_shards, plan.rounds)
        return WorkerShell(watch(stream), states, Snapshots())
    aligned = WorkerMachine(
        me, plan.shards, plan.buffer_shards, plan.rounds, cadence=plan.cadence, in_order=plan.in_order
    )
    snapshots = CodecStateSnapshots(aligned) if plan.codec_state_shards else Snapshots()
    return WorkerShell(watch(aligned), states, snapshots)
