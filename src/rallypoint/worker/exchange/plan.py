"""The worker's plan of its job, from the configuration and the layout.

It needs no torch, because the simulation uses it too.
"""

from __future__ import annotations

from rallypoint.config import JobConfig, cadence_of
from rallypoint.core.layout import Layout
from rallypoint.core.worker.factory import WorkerPlan


def worker_plan(config: JobConfig, layout: Layout, codec_state_shards: tuple[int, ...] = ()) -> WorkerPlan:
    """Return the plan for `shell_for`. `codec_state_shards` are the shards whose codec has a state for each replica."""
    shards = layout.shards
    return WorkerPlan(
        shards=len(shards), rounds=config.rounds, mode=config.mode,
        buffer_shards=frozenset(shard.index for shard in shards if config.contributors(shard.role) == 1),
        cadence=cadence_of(config, shards), codec_state_shards=codec_state_shards,
    )  # fmt: skip
