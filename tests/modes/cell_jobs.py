"""One small job for each cell of FEATURE x MODE: its settings, and what a worker runs."""

from __future__ import annotations

import copy
import enum
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import rallypoint as rp
from rallypoint.bridges.wrap import wrap_in
from rallypoint.config import JobConfig, resolve
from rallypoint.core.modes import Feature, ModeName
from rallypoint.core.modes.table import TABLE, Only, refusal
from rallypoint.worker.tensors import weights_hash

REPLICAS, STEPS = 4, 12
HELD_AT = 6  # the step before which workers wait until somebody has been killed
STOPS_AT = 8  # the step at which the script stops the job
ENDS_AT = 7  # the step with which the stream ends: a part has 30 items, and a step takes four of them
SPEED_STEPS = 60
POLL_S = 0.005
SLOW_S = 0.05  # what each step takes longer on the slower worker: much, also where others use the machine
SYNCS: dict[ModeName, dict[str, Any]] = {
    ModeName.SYNC: {"type": "sync"}, ModeName.QUORUM: {"type": "sync", "quorum": 3},
    ModeName.SSP: {"type": "bounded-staleness", "staleness": 2}, ModeName.ASYNC: {"type": "async"},
    ModeName.ALL_REDUCE: {"type": "all-reduce"}, ModeName.LOCAL: {"type": "local-steps", "steps": 2},
    ModeName.STAGGERED: {"type": "local-steps", "steps": 4, "fragments": 2},
    ModeName.LOCAL_QUORUM: {"type": "local-steps", "steps": 2, "over": {"type": "sync", "quorum": 3}},
    ModeName.LOCAL_ASYNC: {"type": "local-steps", "steps": 2, "over": {"type": "async"}},
}


class Play(enum.Enum):
    """What is no row of its own, and is tried all the same: most of it works in every mode."""

    SNAPSHOTS = "snapshots"
    ON_DEMAND = "a snapshot on demand"
    RESUME = "resume"
    STANDBY = "--standby"
    RESIZE = "workers that join"
    EVALUATION = "run.every"
    SYNC_EVERY = "sync_every= of a group"
    STOP_WHEN = "run.stop_when"
    BY_SPEED = "assignment by speed"

    def belongs_to(self, mode: ModeName) -> bool:
        """Is it to be tried in this mode?"""
        if self is Play.SYNC_EVERY:
            return mode in (ModeName.LOCAL, ModeName.STAGGERED)
        if self is Play.STOP_WHEN:
            return mode is ModeName.SYNC
        return self is not Play.BY_SPEED or mode is not ModeName.STAGGERED


OF_SYNC: dict[Feature, dict[str, Any]] = {
    Feature.FRESH_INNER: {"keep_inner": False},
    Feature.PARTS: {"steps": 4, "fragments": 2},
    Feature.DELAY: {"steps": 4, "delay": 1},
    Feature.FOLD: {"fold": 2},
    Feature.COMPENSATION: {"delay_compensation": 0.04},
}
OF_ASYNC = {Feature.FOLD, Feature.COMPENSATION}  # under rp.LocalSteps a setting of its `over`
SETTINGS: dict[Feature | Play, dict[str, Any]] = {
    Feature.CLIP: {"clip": 0.5},
    Feature.SKIP: {"nonfinite": "skip"},
    Feature.AVERAGE: {"average": {"type": "ema", "decay": 0.8}},
    Feature.DECIDES: {"evaluation.plateau": {"metric": "loss", "patience": 0, "threshold": 1.0}},
    Feature.MUON: {"optimizer": {"type": "muon", "lr": 0.01}},
    Feature.SUMS: {"optimizer": {"type": "sum"}},
    Feature.ACCUMULATE: {"accumulate": 2},
    Feature.GROUPS: {"groups": [{"match": ["last.*"], "lr_scale": 0.5, "weight_decay": 0.1}]},
    Feature.CODEC: {"codec": {"type": "fp16"}},
    Feature.CODEC_STATE: {"codec": {"type": "int8"}},
    Feature.DOWN: {"down": {"type": "bf16"}},
    Feature.FP16: {"precision": "fp16"},
    Feature.HOLD: {"precision": "bf16", "memory.hold": "bf16"},
    Feature.STREAMED: {"memory.parameters": "streamed", "memory.prefetch_bytes": 200},
    Feature.FINGERPRINTS: {"audit.fingerprints": 2},
    Feature.AUDIT: {"audit.share": 0.6},
    Feature.OWN_LOOP: {"reading.order": "own"},
    Feature.KEYED: {"keyed": True},
    Feature.STREAM: {"reading.order": "stream"},
    Feature.PASSES: {"reading.order": "stream", "reading.passes": 1},
    Play.SYNC_EVERY: {"groups": [{"match": ["last.*"], "sync_every": 2}]},
    Play.RESIZE: {"replicas": 6},  # more than two workers have something to do
    Play.ON_DEMAND: {"steps": 80},
    Play.BY_SPEED: {"replicas": 8, "steps": SPEED_STEPS},
}


@dataclass(frozen=True)
class CellJob:
    """What workers train; `held` by the files in the folder `gate`, if there is one."""

    mode: ModeName
    features: tuple[Feature | Play, ...] = ()
    gate: str = ""

    def has(self, feature: Feature | Play) -> bool:
        return feature in self.features

    @property
    def settings(self) -> dict[str, Any]:
        """Of `job.train`, as data."""
        found: dict[str, Any] = {
            "replicas": REPLICAS, "batch": 2, "steps": STEPS, "seed": 3, "network.shard_bytes": 128,
            "optimizer": {"type": "sgd", "lr": 0.05}, "sync": copy.deepcopy(SYNCS[self.mode]),
        }  # fmt: skip
        for feature in self.features:
            found |= SETTINGS.get(feature, {})
            sync = found["sync"]
            (sync["over"] if feature in OF_ASYNC and "over" in sync else sync).update(OF_SYNC.get(feature, {}))
        if self.has(Play.BY_SPEED):  # one is left out: rounds still wait for most of the slow worker's replicas
            for policy in (found["sync"], found["sync"].get("over", {})):
                policy.update({"quorum": found["replicas"] - 1} if "quorum" in policy else {})
        return found

    @property
    def config(self) -> JobConfig:
        """Resolved; ConfigError where the table says so."""
        return resolve(self.settings)

    def held(self, at: Path) -> CellJob:
        """The same, its workers held by files in this folder."""
        return replace(self, gate=str(at))


def job_of(feature: Feature | Play, mode: ModeName) -> CellJob:
    """The job of a supported cell; where the cell needs another feature, with that one."""
    if isinstance(feature, Play):
        fresh = feature is Play.BY_SPEED and not refusal(mode, {Feature.FRESH_INNER})
        return CellJob(mode, (feature, Feature.FRESH_INNER) if fresh else (feature,))
    cell = TABLE[feature][mode]
    return CellJob(mode, (feature, cell.beside) if isinstance(cell, Only) else (feature,))


class Net(torch.nn.Module):
    """Two layers, with what the features ask for between them."""

    def __init__(self, job: CellJob) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(6, 10)
        self.norm = torch.nn.BatchNorm1d(10) if job.has(Feature.BUFFERS) else torch.nn.Identity()
        self.table = torch.nn.Embedding(9, 10, sparse=True, device="meta") if job.has(Feature.TABLES) else None
        self.last = torch.nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, index: torch.Tensor, before: torch.Tensor | float = 0.0) -> torch.Tensor:
        hidden = self.hidden = torch.tanh(self.norm(self.first(x)) + before)
        return self.last(hidden if self.table is None else hidden + self.table(index % 9))


@cache
def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(9)
    return torch.utils.data.TensorDataset(
        torch.randn(60, 6, generator=generator), torch.randn(60, 3, generator=generator), torch.arange(60)
    )


def items(part: int) -> Iterator[Any]:
    """A part of a stream that draws random numbers, and has all samples together with the other one."""
    for sample in range(part, 60, 2):
        x, y, index = dataset()[sample]
        yield x + torch.rand(6), y, index


def data_of(cell: CellJob) -> Any:
    """What the cell trains on."""
    if cell.has(Feature.STREAM) or cell.has(Feature.PASSES):
        return rp.Stream(items, parts=2, passes=cell.settings.get("reading.passes"))
    return dataset()


def train_cell(job: rp.Job, cell: CellJob) -> str:
    """The weights' hash at the end."""
    if cell.has(Feature.OWN_LOOP):
        return _train_own_loop(job, cell)
    model = Net(cell)
    own = [torch.optim.Adagrad(model.parameters(), lr=0.05)] if cell.has(Feature.OWN_OPTIMIZER) else []
    settings = {key: value for key, value in cell.settings.items() if key != "optimizer" or not own}
    first = {"hidden": torch.zeros(2, 10), "steps": torch.tensor(0)} if cell.has(Feature.CARRY) else None
    run = job.train(model, data_of(cell), own_optimizer=own, carry=first, **settings)
    wait = _gate(job, cell)
    hash_of = _hash_in_evaluation(run, model, cell) if cell.has(Feature.STREAMED) else lambda: weights_hash(model)
    if cell.has(Play.STOP_WHEN):
        run.stop_when("loss", below=1e9)
    if any(map(cell.has, (Play.EVALUATION, Feature.DECIDES, Play.STOP_WHEN))):

        @run.every(4)
        def evaluate(step: int) -> dict[str, float]:
            return {"loss": float(loss_of(model, dataset()[:]))}

    for micro in run:
        with micro:
            wait(micro.step)
            loss = loss_of(model, micro.batch) if first is None else carried_loss(model, micro)
            is_bad = cell.has(Feature.SKIP) and (micro.step, micro.replica) == (2, 1)
            micro.backward(loss * math.nan if is_bad else loss)
        if cell.has(Feature.STOP) and micro.step >= STOPS_AT:
            run.stop("the cell says so")
    return hash_of()


def _train_own_loop(job: rp.Job, cell: CellJob) -> str:
    model, data, wait = Net(cell), dataset(), _gate(job, cell)
    steps_here = cell.mode is ModeName.ALL_REDUCE
    inner = torch.optim.SGD(model.parameters(), lr=0.05) if steps_here else rp.SGD(lr=0.05)
    optimizer = wrap_in(job, model, inner, steps=STEPS, replicas=2, **{"network.shard_bytes": 128})
    for step in range(optimizer.position, STEPS):
        wait(step)
        start = 4 * step + 2 * optimizer.replica
        loss_of(model, data[start : start + 2]).backward()
        optimizer.step()
    return weights_hash(model)


def _hash_in_evaluation(run: rp.Run, model: torch.nn.Module, cell: CellJob) -> Callable[[], str]:
    """After the job the parameters are on the servers only: the last evaluation tells all workers the hash."""
    found: list[str] = []

    @run.every(STEPS)
    def evaluate(step: int) -> None:
        found.append(weights_hash(model))
        if cell.gate:
            (Path(cell.gate) / "hash").write_text(found[-1])

    return lambda: found[-1] if found else (Path(cell.gate) / "hash").read_text()


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y, index = batch
    return torch.nn.functional.mse_loss(model(x, index), y)


def carried_loss(model: Net, micro: rp.Micro) -> torch.Tensor:
    """The replica goes on from what its step before has left."""
    (x, y, index), before = micro.batch, micro.carry
    assert int(before["steps"]) == micro.step
    output = model(x, index, before["hidden"])
    micro.carry = {"hidden": model.hidden, "steps": before["steps"] + 1}
    return torch.nn.functional.mse_loss(output, y)


def _gate(job: rp.Job, cell: CellJob) -> Callable[[int], None]:
    """What a worker does before each of its steps: wait where the test says so, and say where it is."""
    folder = Path(cell.gate)
    if not cell.gate:
        return lambda step: None

    def wait(step: int) -> None:
        if cell.has(Play.BY_SPEED):
            if job.id == "worker1" and not (folder / "open").exists():
                time.sleep(SLOW_S)
            return
        if cell.has(Feature.BACKUP_TASKS) and job.id != "worker1":
            (folder / f"{job.id} is at {step}").touch()
            return
        while step >= HELD_AT and not (folder / "open").exists():
            (folder / f"{job.id} waits").touch()
            time.sleep(POLL_S)
        if cell.has(Play.ON_DEMAND) and step > HELD_AT and not (folder / "stored").exists():
            time.sleep(POLL_S)  # the snapshot is of a step ahead: it shall not be the last one

    return wait
