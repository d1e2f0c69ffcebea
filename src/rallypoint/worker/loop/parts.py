"""The parts of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rallypoint.config import JobConfig
from rallypoint.core.view import ViewNumber
from rallypoint.data.loader import MicroBatches
from rallypoint.net.member import CoordinatorLink
from rallypoint.observe.trace import Tracer
from rallypoint.worker.evaluations import EvaluationReports
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.loop.allreduce import WorkerOptimizer
from rallypoint.worker.ranks.followers import Followers, NoFollowers
from rallypoint.worker.sources.source import DeltaSource
from rallypoint.worker.sources.staging import Staging
from rallypoint.worker.stopping import Stopping
from rallypoint.worker.streamed.parameters import StreamedParameters
from rallypoint.worker.tensors import ModelTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one run on this worker.

    Attributes:
        optimizer: the optimizer that steps on this worker; None where the servers step.
        streamed: the model's parameters, where they stay on the servers; else None.
        followers: the other ranks of this worker, if it is a group.
        leases: evaluations are leased, to this worker or another. Else the lead makes them.
        decides_not: the sentence that refuses `run.stop_when`; "" if the job's mode supports it.
        done: tells the coordinator that this worker holds the last version, in which generation, and which that is.
        leads: true on the worker that evaluates (now) and saves (when the job is over).
        say: shows a line to the user.
        reports: tells the coordinator of evaluations.
        stopping: tells the coordinator that the script stops the job.
    """

    model: torch.nn.Module
    tensors: ModelTensors
    config: JobConfig
    batches: MicroBatches
    exchange: Exchange
    source: DeltaSource
    staging: Staging
    coordinator: CoordinatorLink
    tracer: Tracer
    done: Callable[[ViewNumber, int], None]
    leads: Callable[[], bool]
    say: Callable[[str], None]
    reports: EvaluationReports
    stopping: Stopping
    optimizer: WorkerOptimizer | None = None
    streamed: StreamedParameters | None = None
    followers: Followers = field(default_factory=NoFollowers)
    leases: bool = False
    decides_not: str = ""

    def forget_gradients(self) -> None:
        """Drop the gradients that the script's own passes have left."""
        for placed in self.tensors.parameters:
            placed.tensor.grad = None

    @property
    def alone(self) -> bool:
        """True if this worker is one process."""
        return isinstance(self.followers, NoFollowers)
