"""The layout of a simulated job, and the settings of several models that are updated alternately."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

from rallypoint.core.layout import Layout, Shard, TensorSpec, carried_by
from rallypoint.core.optimizer import AdamW
from rallypoint.core.table import Part

Alternate = tuple[tuple[int, ...], ...]  # the numbers of the models that step t updates: entry t % len


def layout_of(
    count: int, buffers: Collection[int], tables: Sequence[int], groups: Sequence[int], carried: int = 0
) -> Layout:
    """Return a layout of `count` shards of 16 words, those of parameters in these optimizer groups, one after another.

    `buffers` and `tables` are shards: buffers, and the parts of a table. The last of them are what so many replicas
    carry, a shard each.
    """
    of = [-1 if i in buffers else groups[i % len(groups)] for i in range(count)]
    for replica in range(carried):
        of[count - carried + replica] = carried_by(replica)
    parts = {i: Part(0, part, len(tables), 1) for part, i in enumerate(tables)}
    shards = tuple(
        Shard(i, group, 16 * i, 16 * i + 16) if i not in parts else Shard(i, group, 0, 0, 16, parts[i])
        for i, group in enumerate(of)
    )
    specs = (TensorSpec("table", (len(tables), 16), "float32", 0),) if tables else ()
    return Layout((), shards, 16 * count, "simulated", specs)


def models_in(alternate: Alternate) -> list[int]:
    """Return the numbers of the models."""
    return sorted({model for models in alternate for model in models})


def some_alternate(seed: int, most: int) -> Alternate:
    """Return two or three models in any order, and up to two steps more (`most` in all) that update one or two of them.
    """
    rng = random.Random(seed * 7919 + 15)
    models = range(rng.randint(2, 3))
    steps: list[tuple[int, ...]] = [(model,) for model in models]
    steps += [tuple(rng.sample(models, rng.randint(1, 2))) for _ in range(rng.randint(0, min(2, most - len(models))))]
    return tuple(rng.sample(steps, len(steps)))


def several_models(alternate: Alternate) -> dict[str, Any]:
    """Return the settings of a job whose steps update these models."""
    return {
        "optimizers": {f"model{model}": AdamW() for model in models_in(alternate)},
        "alternate": tuple(tuple(f"model{model}" for model in models) for models in alternate),
    }
