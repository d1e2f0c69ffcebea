"""What a run begins with where its script does not say it."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.nn.parameter import is_lazy

from rallypoint.config import ClusterFacts, JobConfig, with_start_values
from rallypoint.core.layout import WORD_BYTES
from rallypoint.net.messages import Welcome


def started(
    config: JobConfig, model: torch.nn.Module, given: Container[str], welcome: Welcome, *, alone: bool
) -> tuple[JobConfig, str]:
    """Choose what `config.start_values` may choose for `model`; `given` are the settings that were said.

    Returns the configuration, and a sentence that says why, or "". Nothing new is chosen for a rank of a group (not
    `alone`), which has a part of the model, and for models with tables, whose parts depend on the size of shards.
    """
    words = _words_of(model) if alone else 0
    cluster = ClusterFacts(welcome.workers, welcome.servers, welcome.link_mbit, welcome.shard_bytes)
    return with_start_values(config, given, WORD_BYTES * words, cluster)


def _words_of(model: torch.nn.Module) -> int:
    """How many numbers of `model` are trained; 0 if it has tables, or cannot be trained (which is said later)."""
    if not isinstance(model, torch.nn.Module) or any(getattr(one, "sparse", False) for one in model.modules()):
        return 0
    trained = [p for p in model.parameters() if p.requires_grad]
    return 0 if any(is_lazy(p) for p in trained) else sum(p.numel() for p in trained)
