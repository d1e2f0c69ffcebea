"""A scheduler of torch goes on from an export, whether it is made before the checkpoint is loaded or after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from plain_training import BY_NAME, FIRST, STEPS, Net, build, data, loss_of, settings
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

import rallypoint as rp
from rallypoint.config import record_of, resolve
from rallypoint.core.decisions import Decided
from rallypoint.core.schedule import peak_of
from rallypoint.data.identity import identity_of
from rallypoint.store.checkpoints import Checkpoint, begin_from
from rallypoint.store.export import export_snapshot
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.worker.tensors import ModelTensors

PEAK = 0.02


def warm(step: int) -> float:
    return min(1.0, (step + 1) / 4) * 0.9**step


SCHEDULES: dict[str, tuple[Any, Callable[..., LRScheduler]]] = {
    "cosine": (rp.cosine(PEAK), lambda optimizer, **more: CosineAnnealingLR(optimizer, STEPS, **more)),
    "warm-up": (
        rp.tabulated(lambda step: PEAK / warm(3) * warm(step), steps=STEPS),
        lambda optimizer, **more: LambdaLR(optimizer, lambda step: warm(step) / warm(3), **more),
    ),
}  # fmt: skip


def exported(schedule: Any, folder: Path, *reduced_at: int) -> Path:
    store, config = SnapshotStore(str(folder / "s")), resolve(settings("adamw", optimizer=rp.AdamW(lr=schedule)))
    tensors = ModelTensors(build(), config)
    record = record_of(config, tensors.layout, data=identity_of(data()), tied=tensors.tied)
    moments = {
        name: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p), "step": torch.tensor(float(FIRST))}
        for name, p in build().named_parameters()
    }  # fmt: skip
    begin_from(Checkpoint(build().state_dict(), moments), FIRST, record, config, store)
    if reduced_at:
        [manifest] = store.manifests()
        evaluation = msgspec.to_builtins(rp.Evaluation(plateau=rp.ReduceOnPlateau("loss", factor=0.5)))
        changed = msgspec.structs.replace(record, config=record.config | {"evaluation": evaluation})
        store.commit(msgspec.structs.replace(
            manifest, record=msgspec.to_builtins(changed), decided=Decided(FIRST, reductions=reduced_at)
        ))  # fmt: skip
    export_snapshot(store.url, folder / "out", format="dcp")
    return folder / "out"


def load(model: Net, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer, options=BY_NAME)
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=content["optimizer"], options=BY_NAME)


def rates(model: Net, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        loss_of(model, data()[:8]).backward()
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_goes_on_with_the_rates_of_the_job(name: str, tmp_path: Path) -> None:
    schedule, of = SCHEDULES[name]
    folder = exported(schedule, tmp_path)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    expected = rates(model, optimizer, of(optimizer), STEPS)[FIRST:]

    before = build()
    optimizer = torch.optim.AdamW(before.parameters(), lr=PEAK)
    scheduler = of(optimizer)
    load(before, optimizer, folder)
    scheduler.last_epoch = FIRST
    assert rates(before, optimizer, scheduler, STEPS - FIRST) == pytest.approx(expected)

    after = build()
    optimizer = torch.optim.AdamW(after.parameters(), lr=1.0)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # torch loads only what is there
    load(after, optimizer, folder)
    assert optimizer.param_groups[0]["initial_lr"] == pytest.approx(PEAK)
    scheduler = of(optimizer, last_epoch=FIRST - 1)
    assert rates(after, optimizer, scheduler, STEPS - FIRST) == pytest.approx(expected)


@pytest.mark.parametrize(("at", "rate"), [(FIRST, PEAK / 2), (FIRST + 1, PEAK)])
def test_a_reduction_is_in_the_exported_rate_from_its_own_step_on(at: int, rate: float, tmp_path: Path) -> None:
    folder, model = exported(PEAK, tmp_path, at), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    load(model, optimizer, folder)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


@pytest.mark.parametrize(
    "schedule",
    [rp.cosine(PEAK, warmup=2, floor=0.001), rp.linear(PEAK), rp.step_decay(PEAK, every=2), SCHEDULES["warm-up"][0]],
)
def test_the_base_rate_is_the_highest(schedule: Any) -> None:
    assert peak_of(schedule) == pytest.approx(PEAK)
