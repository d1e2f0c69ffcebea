"""Rallypoint: data-parallel training for PyTorch with stateless workers and stateful servers.

A gradient's way through the code: `worker.sources.hooks` catches it during backward, `worker.exchange.links` pushes it,
`server.service` receives it, `core.shard.machine` decides, `server.reducer` and `server.shard` add and
apply, and the new version comes back to `worker.loop.run`, which installs it. docs/architecture.md walks the whole way.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rallypoint.bridges.wrap import wrap
    from rallypoint.config.tree import Audit, Evaluation, Group, JobConfig, Memory, Network, Reading
    from rallypoint.core.decisions import ReduceOnPlateau
    from rallypoint.core.optimizer import (
        ASGD,
        EMA,
        SGD,
        SWA,
        Adadelta,
        Adagrad,
        Adam,
        Adamax,
        AdamW,
        LossScaling,
        Muon,
        NAdam,
        RAdam,
        RMSprop,
    )
    from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Sync
    from rallypoint.core.schedule import constant, cosine, linear, scaled_lr, step_decay, tabulated
    from rallypoint.data.cache import Cache
    from rallypoint.data.parquet import Parquet
    from rallypoint.data.spec import Loader
    from rallypoint.data.stream import Stream
    from rallypoint.data.tars import WebDataset
    from rallypoint.data.tokens import Lanes, TokenFiles
    from rallypoint.launch.join import join
    from rallypoint.parallel import Parallel
    from rallypoint.worker.loop.micro import Micro
    from rallypoint.worker.loop.run import Run
    from rallypoint.worker.loop.session import Job
    from rallypoint.worker.wrapped import WrappedOptimizer

__version__ = "0.1.0"

# Names are looked up when first used: the command line and the coordinator need no torch, and start in no time.
_HOMES = {
    "ASGD": "rallypoint.core.optimizer",
    "Adadelta": "rallypoint.core.optimizer",
    "Adagrad": "rallypoint.core.optimizer",
    "Adam": "rallypoint.core.optimizer",
    "AdamW": "rallypoint.core.optimizer",
    "Adamax": "rallypoint.core.optimizer",
    "AllReduce": "rallypoint.core.policy",
    "Async": "rallypoint.core.policy",
    "Audit": "rallypoint.config.tree",
    "BoundedStaleness": "rallypoint.core.policy",
    "Cache": "rallypoint.data.cache",
    "EMA": "rallypoint.core.optimizer",
    "Evaluation": "rallypoint.config.tree",
    "Group": "rallypoint.config.tree",
    "Job": "rallypoint.worker.loop.session",
    "JobConfig": "rallypoint.config.tree",
    "Lanes": "rallypoint.data.tokens",
    "Loader": "rallypoint.data.spec",
    "LocalSteps": "rallypoint.core.policy",
    "LossScaling": "rallypoint.core.optimizer",
    "Memory": "rallypoint.config.tree",
    "Micro": "rallypoint.worker.loop.micro",
    "Muon": "rallypoint.core.optimizer",
    "NAdam": "rallypoint.core.optimizer",
    "Network": "rallypoint.config.tree",
    "Parallel": "rallypoint.parallel",
    "Parquet": "rallypoint.data.parquet",
    "RAdam": "rallypoint.core.optimizer",
    "RMSprop": "rallypoint.core.optimizer",
    "ReduceOnPlateau": "rallypoint.core.decisions",
    "Reading": "rallypoint.config.tree",
    "Run": "rallypoint.worker.loop.run",
    "SGD": "rallypoint.core.optimizer",
    "SWA": "rallypoint.core.optimizer",
    "Stream": "rallypoint.data.stream",
    "Sync": "rallypoint.core.policy",
    "TokenFiles": "rallypoint.data.tokens",
    "WebDataset": "rallypoint.data.tars",
    "WrappedOptimizer": "rallypoint.worker.wrapped",
    "constant": "rallypoint.core.schedule",
    "cosine": "rallypoint.core.schedule",
    "join": "rallypoint.launch.join",
    "linear": "rallypoint.core.schedule",
    "scaled_lr": "rallypoint.core.schedule",
    "step_decay": "rallypoint.core.schedule",
    "tabulated": "rallypoint.core.schedule",
    "wrap": "rallypoint.bridges.wrap",
}

__all__ = [
    "ASGD",
    "EMA",
    "SGD",
    "SWA",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "AllReduce",
    "Async",
    "Audit",
    "BoundedStaleness",
    "Cache",
    "Evaluation",
    "Group",
    "Job",
    "JobConfig",
    "Lanes",
    "Loader",
    "LocalSteps",
    "LossScaling",
    "Memory",
    "Micro",
    "Muon",
    "NAdam",
    "Network",
    "Parallel",
    "Parquet",
    "RAdam",
    "RMSprop",
    "Reading",
    "ReduceOnPlateau",
    "Run",
    "Stream",
    "Sync",
    "TokenFiles",
    "WebDataset",
    "WrappedOptimizer",
    "__version__",
    "constant",
    "cosine",
    "join",
    "linear",
    "scaled_lr",
    "step_decay",
    "tabulated",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rallypoint' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
