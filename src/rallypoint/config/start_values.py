"""What a job begins with where nobody has said it (`tune="auto"`): the size of its shards. It cannot change later."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import msgspec

from rallypoint.codec.spec import Bf16, Fp16, Raw
from rallypoint.config.tree import JobConfig
from rallypoint.core.optimizer import Muon, Sum
from rallypoint.core.plan.tuning import shards_for
from rallypoint.core.policy import AllReduce, Sync

_BY_WORD = Raw | Fp16 | Bf16  # each word by itself, wherever its shard begins


class ClusterFacts(NamedTuple):
    """How many workers and servers a job begins with, what a server's link carries (Mbit/s; 0: not told), and the size
    of the shards that the job has already; -1: it has none yet."""

    workers: int
    servers: int
    link_mbit: float
    shard_bytes: int


def with_start_values(
    config: JobConfig, given: Container[str], nbytes: int, cluster: ClusterFacts
) -> tuple[JobConfig, str]:
    """Choose `shard_bytes` for a model of which `nbytes` are trained, if it is not among the settings that are `given`.
    With 0 bytes nothing new is chosen.

    Returns the configuration, and a sentence that says why; "": nothing was chosen. A job that has shards keeps them:
    a worker that comes later, and a run that is resumed, have the same. Every worker chooses the same.
    """
    if "shard_bytes" in given:
        return config, ""
    if cluster.shard_bytes >= 0:
        return msgspec.structs.replace(config, shard_bytes=cluster.shard_bytes), ""
    if config.tune != "auto" or not nbytes or not _free(config):
        return config, ""
    size, why = shards_for(nbytes, cluster.workers, cluster.servers, cluster.link_mbit)
    return msgspec.structs.replace(config, shard_bytes=size), why


def _free(config: JobConfig) -> bool:
    """True if the bytes of the result do not depend on where shards are cut: every word is treated by itself."""
    codecs = [config.codec, config.down, *(group.codec for group in config.groups if group.codec is not None)]
    whole = config.clip is not None or config.keyed or config.parameters == "streamed"
    by_word = isinstance(config.sync, Sync | AllReduce) and not isinstance(config.optimizer, Muon | Sum)
    return by_word and not whole and all(isinstance(codec, _BY_WORD) for codec in codecs)
