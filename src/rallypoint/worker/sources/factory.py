"""The one place where a worker chooses the source of its contributions, by the job's mode."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rallypoint.config import JobConfig
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.sources.fragments import DelayedSource, FragmentsSource
from rallypoint.worker.sources.hooks import GradientHooks, StreamedGradients
from rallypoint.worker.sources.local import LocalStepsSource
from rallypoint.worker.sources.source import DeltaSource
from rallypoint.worker.sources.staging import Staging
from rallypoint.worker.tensors import ModelTensors


def source_for(
    model: torch.nn.Module, tensors: ModelTensors, config: JobConfig, exchange: Exchange, staging: Staging,
    say: Callable[[str], None],
) -> DeltaSource:  # fmt: skip
    """Return the source of this job's contributions: gradients, or what local steps have changed.

    `say` gets messages for the user.
    """
    if config.streamed:
        return StreamedGradients(tensors, exchange, staging)
    if config.local is None:
        return GradientHooks(
            tensors, exchange, staging, clip=None if config.clips_on_servers else config.clip
        )
    if not config.staggered:
        return LocalStepsSource(model, tensors, config, exchange, staging, say)
    kind = DelayedSource if config.local.delay else FragmentsSource
    return kind(model, tensors, config, exchange, staging, say)
