"""A GPT of 200 M parameters: a worker that holds them, and one that streams them within 400 MB.

    python benchmarks/streamed.py                  # one worker, one server; 9 GB of memory, a few minutes
    python benchmarks/streamed.py --layers 2       # 25 M parameters

fp32, AdamW on the server, on this machine's CPUs with one thread a process. The streaming worker's memory is limited
(RLIMIT_DATA) to 400 MB more than it has after its imports; glibc is told to give large pieces of memory back at once
(MALLOC_MMAP_THRESHOLD_). K is the bytes of the parameters; bytes up and down are a step's. What a step has to move is
K up and K down for a worker that holds the model, and K up and 2 K down for one that streams it. "Here in time" is said
of the uses of parameters from the second step on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

MEMBER = Path(__file__).parent / "streamed_member.py"
RUN = [sys.executable, "-m", "rallypoint.cli", "run", "--workers", "1", "--servers", "1", "--snapshots", "none"]
VARIANTS = {
    "local": 'parameters="local"',
    "streamed": 'parameters="streamed"',
    "recompute": 'the same, recompute="blocks"',
}


def measure(variant: str, layers: int, limit: int) -> dict[str, float | str]:
    """Run a variant once and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [*RUN, "--folder", f"{folder}/run", str(MEMBER), variant, str(out), str(layers), str(limit)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{variant} failed:\n{done.stdout}\n{done.stderr}")
        figures: dict[str, float | str] = json.loads(out.read_text())
        return figures


def main() -> None:
    """Measure all variants, one after another, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="of 12.6 M parameters each")
    parser.add_argument("--limit", type=int, default=400, help="MB above imports, for the workers that stream")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {variant: measure(variant, options.layers, options.limit) for variant in options.only}
    table = Table("", "limit", "at most, MB", "seconds a step", "up, K", "down, K", "here in time", "sha256")
    for variant, figures in found.items():
        uses = float(figures["uses"])
        table.add_row(
            VARIANTS[variant], "none" if variant == "local" else f"{options.limit} MB",
            f"{float(figures['peak']) / 1e6:.0f}", f"{float(figures['step']):.1f}",
            f"{float(figures['up']) / float(figures['K']):.2f}", f"{float(figures['down']) / float(figures['K']):.2f}",
            f"{float(figures['ready']) / uses:.1%} of {uses:.0f}" if uses else "", str(figures["sha256"])[:12],
        )  # fmt: skip
    Console(width=130).print(table)
    whole, hashes = next(iter(found.values()))["K"], {figures["sha256"] for figures in found.values()}
    print(f"K = {float(whole) / 1e6:.0f} MB; equal bytes: {len(hashes) == 1}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
