"""What a store is made of: the names, shapes and optimizers of its keys, as a configuration and a layout."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from rallypoint.config import Group, JobConfig, group_of, resolve
from rallypoint.core.layout import Layout, TensorSpec, build_layout
from rallypoint.core.optimizer import Optimizer
from rallypoint.core.policy import Async, BoundedStaleness, Sync
from rallypoint.errors import ConfigError

NOT_OF_RANKS = "job.store is for workers of one process: leave --ranks out"
MOST_PUSHES = 1 << 30  # of a contributor to a key

KeyShape = torch.Tensor | Sequence[int]


class KeySettings(TypedDict, total=False):
    """The settings of `job.store`.

    `contributors` (R) push to each key; a round of ``rp.Sync()`` has one push of each. `optimizer` steps each key with
    what is pushed: one for all keys, or a dict by the part of a key's name before its first dot. `steps`: a contributor
    pushes to a key at most so often; schedules of rates reach over so many. `shard_bytes`: a key of at most so many
    bytes is one piece, so a push to it counts wholly or not at all.
    """

    contributors: int
    sync: Sync | BoundedStaleness | Async
    optimizer: Optimizer | Mapping[str, Optimizer]
    steps: int
    seed: int
    shard_bytes: int


def declared(
    keys: Mapping[str, KeyShape], settings: KeySettings, overrides: Mapping[str, Any]
) -> tuple[JobConfig, Layout]:
    """Return the configuration and the layout of a store with these keys. Raises ConfigError or ModelError.

    Each key is an optimizer group of its own, so that no shard has two keys: keys go on independently.
    """
    given: dict[str, Any] = {key: value for key, value in settings.items() if key != "contributors"}
    if unknown := sorted(given.keys() - KeySettings.__annotations__.keys()):
        raise ConfigError(f"job.store has no setting {unknown[0]!r}: it has {', '.join(KeySettings.__annotations__)}")
    if not keys:
        raise ConfigError("a store without keys: give job.store a dict of names and shapes")
    names = sorted(keys)
    groups = tuple(Group(match=(glob.escape(name),)) for name in names)
    ours = {"replicas": settings.get("contributors", 1), "groups": groups, "keyed": True}
    config = resolve({"steps": MOST_PUSHES, "batch": 1, **given, **ours}, overrides)
    specs = [TensorSpec(name, _shape(keys[name]), "float32", group_of(config, name, 2)) for name in names]
    return config, build_layout(specs, config.shard_bytes)


def first_values(keys: Mapping[str, KeyShape]) -> dict[str, torch.Tensor]:
    """The first values that `job.store` was given with the keys' names."""
    return {name: value for name, value in keys.items() if isinstance(value, torch.Tensor)}


def _shape(given: KeyShape) -> tuple[int, ...]:
    return tuple(given.shape if isinstance(given, torch.Tensor) else (int(size) for size in given))
