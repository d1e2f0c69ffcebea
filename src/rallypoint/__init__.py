"""Rallypoint: data-parallel training for PyTorch with stateless workers and stateful servers.

A gradient's way through the code: `worker.sources.hooks` catches it during backward, `worker.exchange.links` pushes it,
`server.service` receives it, `core.shard.machine` decides, `server.reducer` and `server.shard` add and
apply, and the new version comes back to `worker.loop.run`, which installs it. docs/architecture.md walks the whole way.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rallypoint.bridges.wrap import wrap as wrap
    from rallypoint.codec.spec import DGC as DGC
    from rallypoint.codec.spec import Bf16 as Bf16
    from rallypoint.codec.spec import Fp16 as Fp16
    from rallypoint.codec.spec import Int4 as Int4
    from rallypoint.codec.spec import Int8 as Int8
    from rallypoint.codec.spec import PowerSGD as PowerSGD
    from rallypoint.codec.spec import RandomK as RandomK
    from rallypoint.codec.spec import Raw as Raw
    from rallypoint.codec.spec import Sign as Sign
    from rallypoint.codec.spec import TopK as TopK
    from rallypoint.config.tree import Audit as Audit
    from rallypoint.config.tree import Evaluation as Evaluation
    from rallypoint.config.tree import Group as Group
    from rallypoint.config.tree import JobConfig as JobConfig
    from rallypoint.config.tree import Memory as Memory
    from rallypoint.config.tree import Network as Network
    from rallypoint.config.tree import Reading as Reading
    from rallypoint.core.decisions import ReduceOnPlateau as ReduceOnPlateau
    from rallypoint.core.optimizer import ASGD as ASGD
    from rallypoint.core.optimizer import EMA as EMA
    from rallypoint.core.optimizer import SGD as SGD
    from rallypoint.core.optimizer import SWA as SWA
    from rallypoint.core.optimizer import Adadelta as Adadelta
    from rallypoint.core.optimizer import Adagrad as Adagrad
    from rallypoint.core.optimizer import Adam as Adam
    from rallypoint.core.optimizer import Adamax as Adamax
    from rallypoint.core.optimizer import AdamW as AdamW
    from rallypoint.core.optimizer import LossScaling as LossScaling
    from rallypoint.core.optimizer import Muon as Muon
    from rallypoint.core.optimizer import NAdam as NAdam
    from rallypoint.core.optimizer import RAdam as RAdam
    from rallypoint.core.optimizer import RMSprop as RMSprop
    from rallypoint.core.policy import AllReduce as AllReduce
    from rallypoint.core.policy import Async as Async
    from rallypoint.core.policy import BoundedStaleness as BoundedStaleness
    from rallypoint.core.policy import LocalSteps as LocalSteps
    from rallypoint.core.policy import Sync as Sync
    from rallypoint.core.schedule import constant as constant
    from rallypoint.core.schedule import cosine as cosine
    from rallypoint.core.schedule import linear as linear
    from rallypoint.core.schedule import scaled_lr as scaled_lr
    from rallypoint.core.schedule import step_decay as step_decay
    from rallypoint.core.schedule import tabulated as tabulated
    from rallypoint.data.cache import Cache as Cache
    from rallypoint.data.parquet import Parquet as Parquet
    from rallypoint.data.spec import Loader as Loader
    from rallypoint.data.stream import Stream as Stream
    from rallypoint.data.tars import WebDataset as WebDataset
    from rallypoint.data.tokens import Lanes as Lanes
    from rallypoint.data.tokens import TokenFiles as TokenFiles
    from rallypoint.launch.join import join as join
    from rallypoint.parallel import Parallel as Parallel
    from rallypoint.worker.loop.micro import Micro as Micro
    from rallypoint.worker.loop.run import Run as Run
    from rallypoint.worker.loop.session import Job as Job
    from rallypoint.worker.wrapped import WrappedOptimizer as WrappedOptimizer

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

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rallypoint' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
