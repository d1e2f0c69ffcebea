"""The rows of `benchmarks/strategies.py`: ways to synchronise as settings, their rates, the least time a step can take.

Learning rates. Every row has the same schedule, a warm-up over a tenth of the steps and half a cosine to zero. The
peak rates in `OPTIMIZERS` are the best of a grid of factors of two by the last validation loss (the baselines': by the
mean of two or three seeds); a row that is not there takes its baseline's. That goes for SSP and Async too: servers
give each of the R contributions of a batch, which are updates of their own there, a share of 1/R of the rate. Whether a
row deserves another rate is seen in short runs without limited links::

    python benchmarks/strategies.py --tune 0.5,1,2 --rows NAME
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

import rallypoint as rp
from cluster import Case
from rallypoint.codec.build import build_stateless
from rallypoint.codec.spec import DGC, Bf16, CodecSpec, Fp16, Int8, PowerSGD, Raw, TopK, has_state
from rallypoint.core.optimizer import Optimizer
from rallypoint.core.policy import server_policy
from rallypoint.core.schedule import Schedule
from rallypoint.core.view import assign_replicas
from strategies_member import Hook

BASELINE = "ddp"
SGD_BASELINE = "ddp-sgd"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to synchronise.

    Attributes:
        title: how the table calls it.
        settings: what it sets of `job.train`'s. A `sync` whose quorum is 0 means all but one.
        hook: DDP's communication hook, or None where it is not DDP.
        sgd: belongs to plain SGD with momentum, whatever the workload's usual optimizer is.
    """

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    hook: Hook | None = None
    sgd: bool = False

    @property
    def sync(self) -> Any:
        """The policy."""
        return self.settings.get("sync", rp.Sync())

    @property
    def sticky(self) -> bool:
        """Do replicas leave something on their worker, so that none is moved for speed's sake?"""
        kept = isinstance(self.sync, rp.LocalSteps) and self.sync.keep_inner
        return self.hook is not None or kept or has_state(self.settings.get("codec", Raw()))

    def sync_of(self, replicas: int) -> Any:
        """The policy with its quorum for that many replicas."""
        most = rp.Sync(quorum=max(1, replicas - 1))
        match self.sync:
            case rp.Sync(quorum=0):
                return most
            case rp.LocalSteps(over=rp.Sync(quorum=0)):
                return msgspec.structs.replace(self.sync, over=most)
            case _:
                return self.sync

    @property
    def leaves_one_out(self) -> bool:
        """Does nobody wait for the last replica?"""
        return isinstance(policy := server_policy(self.sync), rp.Sync) and policy.quorum is not None


_INT8_AT_RANDOM = Int8(stochastic=True, error_feedback=False)  # leaves nothing on the worker: replicas may move
_TOPK = TopK(ratio=0.05)
_DGC = DGC(ratio=0.01, warmup_steps=32)
_MEAN = rp.SGD(lr=1.0)  # plain averaging of the parameters
_OUTER = rp.SGD(lr=0.7, momentum=0.5, nesterov=True)  # of ten rounds or so: for the usual 0.9 they are too few
ROWS: Mapping[str, Row] = {
    "ddp": Row("DDP, Gloo", hook="none"),
    "ddp-fp16": Row("DDP, fp16 hook", hook="fp16"),
    "sync": Row("Sync"),
    "bf16": Row("Sync, bf16", {"codec": Bf16(), "down": Bf16()}),
    "int8": Row("Sync, int8 up, bf16 down", {"codec": Int8(), "down": Bf16()}),
    "int8-random": Row("Sync, int8 at random both ways", {"codec": _INT8_AT_RANDOM, "down": _INT8_AT_RANDOM}),
    "topk": Row("Sync, top-k 5 % up, bf16 down", {"codec": _TOPK, "down": Bf16()}),
    "topk-int8": Row("Sync, top-k 5 % up, int8 at random down", {"codec": _TOPK, "down": _INT8_AT_RANDOM}),
    "int8-both": Row("Sync, int8 both ways", {"codec": Int8(), "down": Int8()}),
    "powersgd": Row("Sync, PowerSGD up, bf16 down", {"codec": PowerSGD(rank=4), "down": Bf16()}),
    "powersgd-int8": Row(
        "Sync, PowerSGD up, int8 at random down", {"codec": PowerSGD(rank=4), "down": _INT8_AT_RANDOM}
    ),
    "quorum": Row("Sync, quorum of all but one", {"sync": rp.Sync(quorum=0)}),
    "quorum-int8": Row(
        "Sync, quorum, int8 at random both ways",
        {"sync": rp.Sync(quorum=0), "codec": _INT8_AT_RANDOM, "down": _INT8_AT_RANDOM},
    ),
    "ssp": Row("SSP(3)", {"sync": rp.BoundedStaleness(3)}),
    "async": Row("Async", {"sync": rp.Async()}),
    "async-fp16": Row("Async, fp16", {"sync": rp.Async(), "codec": Fp16(), "down": Fp16()}),
    "async-topk": Row("Async, top-k 5 % up, bf16 down", {"sync": rp.Async(), "codec": _TOPK, "down": Bf16()}),
    "local": Row("Local SGD(4), bf16", {"sync": rp.LocalSteps(4, outer=_MEAN), "codec": Bf16(), "down": Bf16()}),
    "local-quorum": Row(
        "Local SGD(2), quorum, int8 at random both ways",
        {
            "sync": rp.LocalSteps(2, outer=_MEAN, over=rp.Sync(quorum=0)),
            "codec": _INT8_AT_RANDOM, "down": _INT8_AT_RANDOM,
        },
    ),
    "diloco": Row("DiLoCo(16)", {"sync": rp.LocalSteps(16, outer=_OUTER)}),
    "diloco-streaming": Row("DiLoCo(16), 4 fragments", {"sync": rp.LocalSteps(16, outer=_OUTER, fragments=4)}),
    "ddp-sgd": Row("DDP, Gloo; SGD, clip 1", {"clip": 1.0}, hook="none", sgd=True),
    "dgc": Row("DGC 1 % up, bf16 down; SGD", {"codec": _DGC, "down": Bf16()}, sgd=True),
}  # fmt: skip
QUICK = ("ddp", "sync", "bf16", "int8", "topk", "ddp-sgd", "dgc")


def _adamw(lr: Schedule) -> Optimizer:
    return rp.AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def _momentum(lr: Schedule) -> Optimizer:
    return rp.SGD(lr=lr, momentum=0.9, weight_decay=5e-4)


def _plain(lr: Schedule) -> Optimizer:
    return rp.SGD(lr=lr, weight_decay=5e-4)


OPTIMIZERS: Mapping[str, Mapping[str, tuple[Any, float]]] = {
    "gpt": {
        "ddp": (_adamw, 1e-3), "ddp-sgd": (_momentum, 0.1), "dgc": (_plain, 0.1),
    },
    "resnet": {
        "ddp": (_momentum, 0.05), "dgc": (_plain, 0.05),
    },
}  # fmt: skip
"""The optimizer and its peak rate, by workload and row; what is not here takes its baseline's."""


def rows_of(workload: str) -> tuple[str, ...]:
    """The rows there are for a workload: where the usual optimizer is SGD, it needs no second baseline for that."""
    return tuple(name for name in ROWS if name != SGD_BASELINE or name in OPTIMIZERS[workload])


def baseline_of(workload: str, name: str) -> str:
    """The row whose last loss is this one's goal."""
    return SGD_BASELINE if ROWS[name].sgd and SGD_BASELINE in OPTIMIZERS[workload] else BASELINE


def optimizer(workload: str, name: str, steps: int, factor: float) -> Optimizer:
    """A row's optimizer, its peak rate times `factor`."""
    table = OPTIMIZERS[workload]
    make, peak = table.get(name) or table[baseline_of(workload, name)]
    made: Optimizer = make(rp.cosine(peak * factor, warmup=max(1, steps // 10)))
    return made


def settings_with(row: Row, replicas: int) -> dict[str, Any]:
    """A row's own settings, as data, for that many replicas."""
    settings = {**row.settings, "sync": row.sync_of(replicas)}
    return {key: msgspec.to_builtins(value) for key, value in settings.items()}


# ---- the least time ------------------------------------------------------------------------------------------------


def choose_replicas(row: Row, case: Case, slow: float, seconds: float, model: Sequence[tuple[int, ...]]) -> int:
    """R: as many as workers, or twice as many with half the batch, whichever the limit says is faster.

    Twice as many can be assigned more evenly when a worker is slow, but each sends its own contribution. DDP and those
    whose replicas stay where they are have nothing of that, and a quorum is about workers.
    """
    if row.sticky or row.leaves_one_out:
        return case.workers
    counts = (case.workers, 2 * case.workers)
    return min(counts, key=lambda count: least_seconds(row, case, count, slow, seconds, model))


def least_seconds(
    row: Row, case: Case, replicas: int, slow: float, seconds: float, model: Sequence[tuple[int, ...]]
) -> float:
    """The least that a step of the whole batch can take, when computing, sending and receiving overlap perfectly.

    `seconds` is what the whole batch takes one usual worker, `model` the parameters' shapes. The greater of computing
    and the busiest link (K/B and the like, without headers).
    """
    local = row.sync.steps if isinstance(row.sync, rp.LocalSteps) else 1
    assigned = _assigned(row, case.workers, replicas, slow)
    wire = case.wire_seconds(_busiest(row, case, assigned, model)) / local
    return max(_computing(row, assigned, slow, seconds / replicas), wire)


def _assigned(row: Row, workers: int, replicas: int, slow: float) -> list[int]:
    """How many replicas each worker computes; the last worker is the slow one."""
    names = [str(index) for index in range(workers)]
    speeds = {**dict.fromkeys(names, 1.0), names[-1]: 1.0 if row.sticky else 1.0 / slow}
    return [len(own) for own in assign_replicas(replicas, names, speeds).values()]


def _computing(row: Row, assigned: Sequence[int], slow: float, seconds: float) -> float:
    """Seconds until all whom a step waits for are through with it, `seconds` being those of a replica.

    Under Async no step waits, but every replica makes all its steps: over the whole training it comes to the same.
    """
    times = sorted([count * seconds for count in assigned[:-1]] + [assigned[-1] * seconds * slow])
    if row.leaves_one_out:
        return times[-2]
    return times[-1]


def _busiest(row: Row, case: Case, assigned: Sequence[int], model: Sequence[tuple[int, ...]]) -> int:
    """Bytes that the busiest direction of the busiest link carries for a synchronisation."""
    words = sum(_words(shape) for shape in model)
    if row.hook is not None:
        return 2 * (case.workers - 1) * _up_bytes(_HOOKS[row.hook], model) // case.workers
    up, down = _up_bytes(row.settings.get("codec", Raw()), model), _bytes(row.settings.get("down", Raw()), (words,))
    followers = sum(assigned) if _streaming(row) else case.workers
    most = max(assigned)
    per_worker_down = most * down if _streaming(row) else down
    return max(most * up, per_worker_down, sum(assigned) * up // case.servers, followers * down // case.servers)


_HOOKS: Mapping[Hook, CodecSpec] = {"none": Raw(), "fp16": Fp16()}


def _streaming(row: Row) -> bool:
    return isinstance(row.sync, rp.Async | rp.BoundedStaleness)


def _up_bytes(codec: CodecSpec, model: Sequence[tuple[int, ...]]) -> int:
    """Bytes of a whole gradient."""
    after_warm_up = TopK(ratio=codec.ratio) if isinstance(codec, DGC) else codec
    return sum(_bytes(after_warm_up, shape) for shape in model)


def _bytes(codec: CodecSpec, shape: tuple[int, ...]) -> int:
    return build_stateless(codec, shape).bytes_for(_words(shape))


def _words(shape: tuple[int, ...]) -> int:
    words = 1
    for size in shape:
        words *= size
    return words
