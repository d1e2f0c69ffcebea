"""What evaluations cost a step: none, on a standby (an evaluation lease), and by the lead in its training loop.

    python benchmarks/evaluation.py                 # 5 rounds of about 40 s for each variant

Two workers, a server, one standby in every variant, on this machine's loopback. Computing is played by sleeps, as if
each worker had an accelerator: a step of 0.2 s, and every 10 steps an evaluation of 1 s. So nothing but the product's
own work on the versions (pinning one, pulling it, reporting) can make a step longer. Variants take turns; a figure is
the mean step from step 20 to step 150 (with all steps in it that wait for something), then the median of the rounds
with the least and the greatest; the ratio is to "none" of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

MEMBER = Path(__file__).parent / "evaluation_member.py"
RUN = [sys.executable, "-m", "rallypoint.cli", "run", "--workers", "2", "--servers", "1", "--snapshots", "none"]
VARIANTS = {"none": "no evaluations", "standby": "on a standby", "lead": "by the lead"}
FIRST, LAST = 20, 150


def measure(variant: str, every: int) -> tuple[float, int]:
    """The mean step in seconds, and how many results came."""
    with tempfile.TemporaryDirectory() as folder:
        standby = [] if variant == "lead" else ["--standby", "1"]
        command = [*RUN, *standby, "--folder", f"{folder}/run", str(MEMBER), variant, folder, str(every)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{variant} failed:\n{done.stdout}\n{done.stderr}")
        began = dict(json.loads((Path(folder) / "began.json").read_text()))
        return (began[LAST] - began[FIRST]) / (LAST - FIRST), done.stdout.count("val_loss")


def show(values: list[float], digits: int) -> str:
    """The median, with the least and the greatest."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"


def main() -> None:
    """Measure all variants in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    options = parser.parse_args()
    steps: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    results: dict[str, int] = {}
    for round in range(options.rounds):
        for variant in VARIANTS if round % 2 == 0 else reversed(VARIANTS):  # a machine's speed drifts
            seconds, results[variant] = measure(variant, options.every)
            steps[variant].append(seconds)
            print(f"round {round + 1}: {VARIANTS[variant]}: {seconds:.4f} s a step", flush=True)
    table = Table("", "seconds a step", "to none", "results")
    for variant, name in VARIANTS.items():
        ratios = [mine / none for mine, none in zip(steps[variant], steps["none"], strict=True)]
        table.add_row(name, show(steps[variant], 4), show(ratios, 3), str(results[variant]))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
