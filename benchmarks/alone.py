"""What `python train.py` alone costs: a transformer of 10.9 M parameters, against plain PyTorch with the same loop.

    python benchmarks/alone.py                      # batches of 4 and 32 sequences, 3 rounds: about 5 minutes
    python benchmarks/alone.py --batch 4 --rounds 1 --steps 8 --json alone.json

Each round is plain PyTorch, a job alone in its process, and `rallypoint run` with one worker and one server, each with
torch's own number of threads. The figures are medians of a step, and the process's memory at its peak.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
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


def measured(kind: str, batch: int, steps: int) -> dict[str, float]:
    """One of the programs, in processes of its own."""
    member = [__file__, "--member", "plain" if kind == "plain" else "job", "--batch", str(batch), "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        run = ["-m", "rallypoint.cli", "run", "--folder", f"{folder}/run", "--workers", "1", "--servers", "1"]
        run += ["--threads", str(torch.get_num_threads())]
        command = [sys.executable, *(run if kind == "run" else ()), *member]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"seconds"'))
    found: dict[str, float] = json.loads(line)
    return found


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
            for kind in ("plain", "job", "run"):
                figures.setdefault(f"{kind} {size}", []).append(measured(kind, size, steps))
        plain = figures[f"plain {size}"]
        for kind in ("plain", "job", "run"):
            ours = figures[f"{kind} {size}"]
            ratios = [own["seconds"] / theirs["seconds"] for own, theirs in zip(ours, plain, strict=True)]
            print(
                f"batch {size}, {kind}: {statistics.median(one['seconds'] for one in ours):.3f} s, "
                f"{ours[0]['MB']:.0f} MB; {statistics.median(ratios):.2f} x plain "
                f"[{min(ratios):.2f}..{max(ratios):.2f}]",
                flush=True,
            )
    if to is not None:
        to.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
