"""What a store is made of: the names, shapes and optimizers of its keys, as a configuration and a layout."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from rallypoint.config import Group, JobConfig, group_of, of_group, resolve
from rallypoint.core.layout import Layout, TensorSpec, build_layout
from rallypoint.core.optimizer import Optimizer
from rallypoint.core.policy import Async, BoundedStaleness, Sync
from rallypoint.errors import ConfigError
from rallypoint.optim import refusal

NOT_OF_RANKS = "job.store is for workers of one process: leave --ranks out"
MOST_PUSHES = 1 << 30  # of a contributor to a key

KeyShape = torch.Tensor | Sequence[int]


class KeySettings(TypedDict, total=False):
    """The settings of `job.store`.

    `contributors` (R) push to each key; a round of ``rp.Sync()`` has one push of each. `optimizer` steps each key with
    what is pushed: one for all keys, or a dict by the part of a key's name before its first dot. `steps`: a contributor
    pushes to a key at most so often; schedules of rates reach over so many. `shard_bytes`: a key of at most so many
    bytes is one piece, so a push to it counts wholly or not at all. `table_std`: servers make the first rows of tables,
    normal(0, table_std).
    """

    contributors: int
    sync: Sync | BoundedStaleness | Async
    optimizer: Optimizer | Mapping[str, Optimizer]
    steps: int
    seed: int
    shard_bytes: int
    table_std: float


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
    optimizers = _optimizers(given, names, overrides)
    groups = tuple(Group(match=(glob.escape(name),), optimizer=optimizers.get(name)) for name in names)
    ours = {"replicas": settings.get("contributors", 1), "groups": groups, "keyed": True}
    config = resolve({"steps": MOST_PUSHES, "batch": 1, **given, **ours}, overrides)
    specs = {name: TensorSpec(name, _shape(name, keys[name]), "float32", group_of(config, name, 2)) for name in names}
    tables = [specs.pop(name) for name in names if is_table(keys[name])]
    for table in tables:
        _check_table(table, config)
    return config, build_layout(list(specs.values()), config.shard_bytes, tables=tables)


def _optimizers(
    given: dict[str, Any], names: Sequence[str], overrides: Mapping[str, Any]
) -> dict[str, Optimizer]:  # fmt: skip
    """Take an `optimizer` that is a dict out of what is `given`; return that of each key."""
    if not isinstance(by_part := given.get("optimizer"), Mapping):
        return {}
    del given["optimizer"]
    if "optimizer" in overrides:
        raise ConfigError(
            "optimizer is set, and the script gives each key an optimizer of its own: change it in the script"
        )
    parts = {name: name.partition(".")[0] for name in names}
    if others := sorted(set(parts.values()) ^ by_part.keys()):
        what = "is the first part of no key's name" if others[0] in by_part else "has no optimizer"
        raise ConfigError(f"{others[0]!r} {what}: give each key one, by the part of its name before its first dot")
    return {name: by_part[part] for name, part in parts.items()}


def first_values(keys: Mapping[str, KeyShape]) -> dict[str, torch.Tensor]:
    """The first values that `job.store` was given with the keys' names."""
    return {name: value for name, value in keys.items() if isinstance(value, torch.Tensor) and not is_table(value)}


def is_table(given: KeyShape) -> bool:
    """Is this key declared as a table? A tensor on the meta device has a shape and no values."""
    return isinstance(given, torch.Tensor) and given.is_meta


def _shape(name: str, given: KeyShape) -> tuple[int, ...]:
    shape = tuple(given.shape if isinstance(given, torch.Tensor) else (int(size) for size in given))
    if not all(size > 0 for size in shape):
        raise ConfigError(f"key {name} of shape {list(shape)} has no values: leave it out")
    return shape


def _check_table(table: TensorSpec, config: JobConfig) -> None:
    if len(table.shape) != 2:
        raise ConfigError(
            f"key {table.name} is declared on the meta device, as a table: that has rows and columns, not {table.shape}"
        )
    if why := refusal(of_group(config, table.group).optimizer):
        raise ConfigError(f"key {table.name} cannot be a table: {why}")
