"""What a process holds at most while it trains, and its seconds a step: plain torch, DDP, FSDP2, Rallypoint's workers.

    python benchmarks/memory.py                          # hardly any activations: who holds what of the model
    python benchmarks/memory.py --batch 8 --block 256    # most of it is activations: what recompute saves

A GPT of 25.5 M parameters in fp32 with AdamW, on this machine's CPUs with one thread a process.
Memory is the highest resident set above what imports take, in bytes of the model's parameters (K).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

MEMBER = Path(__file__).parent / "memory_member.py"
GROUP = [sys.executable, "-m", "rallypoint.launch.engines.ranks", "2", sys.executable, str(MEMBER)]
RUN = [sys.executable, "-m", "rallypoint.cli", "run", "--workers", "1", "--servers", "1", "--snapshots", "none"]
VARIANTS = {
    "torch": ("plain torch, AdamW", [sys.executable, str(MEMBER)]),
    "ddp": ("DDP over Gloo, 2 ranks, AdamW", GROUP),
    "fsdp": ("FSDP2 over Gloo, 2 ranks, AdamW", GROUP),
    "worker": ("Rallypoint's worker", RUN),
    "worker-recompute": ('Rallypoint\'s worker, recompute="blocks"', RUN),
    "worker-ranks": ("Rallypoint's worker of 2 ranks, FSDP2", [*RUN, "--ranks", "2"]),
}


def measure(variant: str, folder: Path, shape: list[str]) -> dict[str, dict[str, float]]:
    """Run a variant once: its processes' figures, by name."""
    _, command = VARIANTS[variant]
    if command[: len(RUN)] == RUN:
        command = [*command, "--folder", str(folder / variant), str(MEMBER)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    argv = [*command, variant, str(folder), *shape]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{variant} failed:\n{done.stdout}\n{done.stderr}")
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def main() -> None:
    """Measure all variants, one after another in each round, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", default="1", help="windows of each process")
    parser.add_argument("--block", default="32", help="bytes of each")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for variant in options.only:
            with tempfile.TemporaryDirectory() as folder:
                for name, figures in measure(variant, Path(folder), [options.batch, options.block]).items():
                    found[name].append(figures)
    table = Table("", "rank", "at most, in K", "MB", "seconds a step [min..max]")
    for name, rounds in found.items():
        variant, _, rank = name.rpartition("-")
        size = rounds[0]["parameters"] if "fsdp" not in name and "ranks" not in name else _whole(found)
        peak, steps = statistics.median(one["peak"] for one in rounds), sorted(one["step"] for one in rounds)
        table.add_row(
            VARIANTS[variant][0], rank, f"{peak / size:.2f}", f"{peak / 1e6:.0f}",
            f"{statistics.median(steps):.2f} [{steps[0]:.2f}..{steps[-1]:.2f}]",
        )  # fmt: skip
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def _whole(found: dict[str, list[dict[str, float]]]) -> float:
    return max(one["parameters"] for rounds in found.values() for one in rounds)


if __name__ == "__main__":
    main()
