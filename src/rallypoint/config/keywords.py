"""The keywords of `job.train`, for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from rallypoint.codec.spec import CodecSpec
from rallypoint.config.tree import DownSpec, Group
from rallypoint.core.decisions import ReduceOnPlateau
from rallypoint.core.optimizer import EMA, SWA, LossScaling, Optimizer
from rallypoint.core.policy import Mode


class Settings(TypedDict, total=False):
    """The keywords of `job.train`: the fields of JobConfig, for type checkers."""

    replicas: int
    batch: int
    steps: int
    optimizer: Optimizer
    sync: Mode
    accumulate: int
    clip: float | None
    average: EMA | SWA | None
    plateau: ReduceOnPlateau | None
    keep_best: str
    best_is: Literal["min", "max"]
    seed: int
    order: Literal["shuffled", "sequential", "windowed", "own", "stream"]
    passes: int
    mixed_shards: int
    precision: Literal["fp32", "bf16", "fp16"]
    loss_scale: LossScaling
    hold: Literal["fp32", "bf16"]
    recompute: Literal["none", "blocks"]
    nonfinite: Literal["stop", "skip", "continue"]
    decay_1d: bool
    groups: Sequence[Group]
    codec: CodecSpec
    down: DownSpec
    table_std: float
    shard_bytes: int
    window: int
    parameters: Literal["local", "streamed"]
    prefetch_bytes: int
    presum_bytes: int
    overlap: bool
    hold_bytes: int
    in_flight_bytes: int
    pace_mbit: float
    pacing: Literal["auto", "off"]
    item: str
    items_per_sample: int
    fingerprints: int
    audit: float
    audit_action: Literal["drain", "stop", "tell"]
    tune: Literal["off", "auto"]
