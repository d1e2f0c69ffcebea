"""The worker's plan of its job, from the configuration and the layout.

It needs no torch, because the simulation uses it too.
"""

from __future__ import annotations

from rallypoint.codec.spec import Raw
from rallypoint.config import JobConfig, audits_of, cadence_of, codec_of
from rallypoint.core.layout import Layout, carried_in
from rallypoint.core.optimizer import Sum
from rallypoint.core.worker.factory import WorkerPlan


def worker_plan(
    config: JobConfig, layout: Layout, codec_state_shards: tuple[int, ...] = (), *, early: bool = True
) -> WorkerPlan:
    """Return the plan for `shell_for`. `codec_state_shards` are the shards whose codec has a state for each replica.

    `early`: a forward pass may begin before all of its version is here, if the settings allow it.
    """
    shards = layout.shards
    return WorkerPlan(
        shards=len(shards), rounds=config.rounds, mode=config.mode,
        buffer_shards=frozenset(shard.index for shard in shards if config.contributors(shard.role) == 1),
        cadence=cadence_of(config, shards), codec_state_shards=codec_state_shards, presum=_presum(config, layout),
        # Rows of tables are pulled at a version that exists everywhere
        overlaps=early and config.overlaps and not layout.tables, audits=audits_of(config),
        carried=carried_in(shards),
        sums=isinstance(config.applied, Sum),
    )  # fmt: skip


def _presum(config: JobConfig, layout: Layout) -> tuple[frozenset[int], int, int]:
    """The shards whose contributions a worker adds up, how many replicas contribute, and the most to add up.

    A lossy codec encodes each replica by itself, so that the bytes do not depend on the cluster. Rows of tables differ
    from replica to replica: their sum would be hardly smaller.
    """
    shards = frozenset(
        shard.index for shard in layout.shards
        if shard.role == "parameters" and shard.part is None and codec_of(config, shard.group) == Raw()
    )  # fmt: skip
    if not config.policy.tree or config.streamed:  # (a sum of replicas would be as large as the model)
        return frozenset(), 1, 1
    nbytes = sum(layout.shards[shard].nbytes for shard in shards)
    copies = min(config.presum_bytes // max(1, nbytes), 32)
    return (shards if copies else frozenset(), config.replicas, 1 << copies)
