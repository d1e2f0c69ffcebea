"""One process of `memory.py`: trains a GPT for some steps, and writes its memory above what imports take.

``memory_member.py VARIANT OUT BATCH BLOCK``: alone (variant "torch"), as a rank of torch's own (DDP, FSDP2), or as a
worker.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rallypoint as rp
from cluster import memory_of_others
from rallypoint.recipes.gpt_model import GPT, GPTConfig

BATCH, BLOCK, STEPS = int(sys.argv[3]), int(sys.argv[4]), 6
MODEL = GPTConfig(layers=8, heads=8, width=512, block=BLOCK)
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random bytes: what is in them does not matter here."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.randint(0, 256, (MODEL.block + 1,), generator=torch.Generator().manual_seed(at))
        return window[:-1], window[1:]


def resident(which: str) -> int:
    """VmRSS (now) or VmHWM (at most), in bytes."""
    return 1024 * int(next(line for line in STATUS.read_text().splitlines() if line.startswith(which)).split()[1])


def shard(model: GPT, ranks: int) -> Any:
    """Shard the model by FSDP2, and return the mesh."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return mesh


def torch_alone(variant: str, model: GPT) -> list[float]:
    """Train with torch's own means. Returns the seconds of each step."""
    rank, ranks, module = 0, 1, model
    if variant != "torch":
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if variant == "ddp":
            module = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)  # type: ignore[assignment]
        else:
            shard(model, ranks)
    optimizer, text, seconds = torch.optim.AdamW(model.parameters(), lr=1e-4), Text(), []
    for step in range(STEPS):
        began = time.monotonic()
        first = (step * ranks + rank) * BATCH
        tokens, targets = (torch.stack(part) for part in zip(*(text[first + i] for i in range(BATCH)), strict=True))
        logits = module(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.monotonic() - began)
    if dist.is_initialized():
        dist.destroy_process_group()
    return seconds


def as_worker(variant: str, model: GPT) -> tuple[list[float], int, int]:
    """Train as a worker of a job. Returns the seconds of each step, this process's rank, and `memory_of_others`."""
    seconds, others, began = [], 0, time.monotonic()
    more: dict[str, Any] = {"memory.recompute": "blocks"} if "recompute" in variant else {}
    with rp.join() as job:
        if job.ranks > 1:
            more["parallel"] = rp.Parallel(shard(model, job.ranks), split="dp")
        run = job.train(model, Text(), replicas=1, batch=BATCH * job.ranks, steps=STEPS, **more,
                        optimizer=rp.AdamW(lr=1e-4))  # fmt: skip
        for micro in run:
            with micro:
                micro.backward(model.loss(*micro.batch))
            seconds.append(time.monotonic() - began)
            others = memory_of_others()
            began = time.monotonic()
    return seconds[1:], job.rank, others


def main(variant: str, out: Path) -> None:
    """Train, and write the figures."""
    torch.manual_seed(0)
    imported = resident("VmRSS")
    CLEAR.write_text("5")  # VmHWM begins anew
    model = GPT(MODEL)
    if variant.startswith("worker"):
        seconds, rank, others = as_worker(variant, model)
    else:
        seconds, rank, others = torch_alone(variant, model), int(os.environ.get("RANK", "0")), 0
    figures = {
        "peak": resident("VmHWM") - others - imported, "step": statistics.median(seconds[1:]),
        "parameters": 4 * sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    (out / f"{variant}-{rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
