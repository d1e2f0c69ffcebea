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
    from rallypoint.codec.spec import DGC, Bf16, Fp16, Int4, Int8, PowerSGD, RandomK, Raw, Sign, TopK
    from rallypoint.config.tree import Audit, Evaluation, Group, JobConfig, Memory, Network, Reading
    from rallypoint.core.decisions import ReduceOnPlateau
    from rallypoint.core.optimizer import (  # isort: skip
        ASGD, EMA, SGD, SWA, Adadelta, Adagrad, Adam, Adamax, AdamW, LossScaling, Muon, NAdam, RAdam, RMSprop,
    )  # fmt: skip
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
    name: f"rallypoint.{module}"
    for module, names in {
        "bridges.wrap": "wrap",
        "codec.spec": "Bf16 DGC Fp16 Int4 Int8 PowerSGD RandomK Raw Sign TopK",
        "config.tree": "Audit Evaluation Group JobConfig Memory Network Reading",
        "core.decisions": "ReduceOnPlateau",
        "core.optimizer": "ASGD Adadelta Adagrad Adam AdamW Adamax EMA LossScaling Muon NAdam RAdam RMSprop SGD SWA",
        "core.policy": "AllReduce Async BoundedStaleness LocalSteps Sync",
        "core.schedule": "constant cosine linear scaled_lr step_decay tabulated",
        "data.cache": "Cache",
        "data.parquet": "Parquet",
        "data.spec": "Loader",
        "data.stream": "Stream",
        "data.tars": "WebDataset",
        "data.tokens": "Lanes TokenFiles",
        "launch.join": "join",
        "parallel": "Parallel",
        "worker.loop.micro": "Micro",
        "worker.loop.run": "Run",
        "worker.loop.session": "Job",
        "worker.wrapped": "WrappedOptimizer",
    }.items()
    for name in names.split()
}  # fmt: skip

__all__ = [
    "ASGD", "DGC", "EMA", "SGD", "SWA", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "AllReduce", "Async", "Audit",
    "Bf16", "BoundedStaleness", "Cache", "Evaluation", "Fp16", "Group", "Int4", "Int8", "Job", "JobConfig", "Lanes",
    "Loader", "LocalSteps", "LossScaling", "Memory", "Micro", "Muon", "NAdam", "Network", "Parallel", "Parquet",
    "PowerSGD", "RAdam", "RMSprop", "RandomK", "Raw", "Reading", "ReduceOnPlateau", "Run", "Sign", "Stream", "Sync",
    "TokenFiles", "TopK", "WebDataset", "WrappedOptimizer", "__version__", "constant", "cosine", "join", "linear",
    "scaled_lr", "step_decay", "tabulated", "wrap",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rallypoint' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
