"""What `python train.py` alone costs: a transformer of 10.9 M parameters, against plain PyTorch with the same loop.

    python benchmarks/alone.py                      # batches of 4 and 32 sequences, 3 rounds: about 3 minutes
    python benchmarks/alone.py --batch 4 --rounds 1 --steps 8 --json alone.json

Each round is two processes, plain PyTorch and a job, with torch's own number of threads. The figures are medians of a
step, and the process's memory at its peak.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

import rallypoint as rp

_WIDTH, _LENGTH, _WARM = 384, 64, 3


class Model(torch.nn.Module):
    """Six layers of torch's own transformer, on bytes."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer
        self.embed = torch.nn.Embedding(256, _WIDTH)
        self.layers = torch.nn.ModuleList(layer(_WIDTH, 6, 4 * _WIDTH, 0.0, batch_first=True) for _ in range(6))
        self.out = torch.nn.Linear(_WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        found: torch.Tensor = self.out(hidden)
        return found


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


def play(job: bool, batch: int, steps: int) -> dict[str, float]:
    """Train in this process: seconds a step, and MB at the peak."""
    torch.manual_seed(0)
    data = torch.randint(0, 256, (512, _LENGTH))
    model, ends = Model(), [time.perf_counter()]
    if job:
        with rp.join() as joined:
            for micro in joined.train(model, data, replicas=1, batch=batch, steps=steps, optimizer=rp.AdamW(lr=1e-3)):
                with micro:
                    micro.backward(loss_of(model, micro.batch))
                ends.append(time.perf_counter())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, data[torch.arange(step * batch, (step + 1) * batch) % len(data)])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            ends.append(time.perf_counter())
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"seconds": statistics.median(seconds[_WARM:]), "MB": round(peak)}


def main(
    batch: Annotated[list[int] | None, typer.Option(help="Sequences of a step; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Plain and job, so often.")] = 3,
    steps: Annotated[int, typer.Option(min=_WARM + 1, help="Steps of each.")] = 20,
    to: Annotated[Path | None, typer.Option("--json", help="Write the figures there too.")] = None,
    member: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure `python train.py` alone against plain PyTorch."""
    batches = batch or [4, 32]
    if member:
        print(json.dumps(play(member == "job", batches[0], steps)))
        return
    figures: dict[str, list[dict[str, float]]] = {}
    for size in batches:
        for _ in range(rounds):
            for kind in ("plain", "job"):
                command = [sys.executable, __file__, "--member", kind, "--batch", str(size), "--steps", str(steps)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                figures.setdefault(f"{kind} {size}", []).append(json.loads(done.stdout.splitlines()[-1]))
        plain, job = (figures[f"{kind} {size}"] for kind in ("plain", "job"))
        ratios = [ours["seconds"] / theirs["seconds"] for ours, theirs in zip(job, plain, strict=True)]
        print(
            f"batch {size}: plain {statistics.median(one['seconds'] for one in plain):.3f} s, "
            f"{plain[0]['MB']:.0f} MB; alone {statistics.median(one['seconds'] for one in job):.3f} s, "
            f"{job[0]['MB']:.0f} MB; {statistics.median(ratios):.2f} x [{min(ratios):.2f}..{max(ratios):.2f}]",
            flush=True,
        )
    if to is not None:
        to.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
