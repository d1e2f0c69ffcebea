"""Kills the process that evaluates, in the middle of its evaluation: is a result lost, or tied to another version?

    python benchmarks/evaluation_kills.py             # 20 kills in 40 evaluations, about three minutes

Two workers, two that stand by, two servers with replication. Every 25 steps of 0.1 s an evaluation of 1.5 s is due; who
evaluates step 50, 100, 150, ... is killed (SIGKILL) half a second into it, once for each of these steps. The result of
an evaluation is a number that belongs to that version's parameters and no other: the sum of their squares, in float64.
Then the same job runs undisturbed: every due step must have one result, and each must have the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from rallypoint.launch.console import RunConsole
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import ClusterRun, launch

EVERY, STEP_S, EVALUATION_S, INTO_S = 25, 0.1, 1.5, 0.5
SCRIPT = """
import os, sys, time, torch, rallypoint as rp
from pathlib import Path
steps, step_s, evaluation_s, home = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randn(512, 64))
with rp.join() as job:
    run = job.train(
        model, data, steps=steps, replicas=2, batch=8, optimizer=rp.AdamW(lr=1e-3),
        network=rp.Network(shard_bytes=16 << 10)
    )
    @run.every(EVERY)
    def evaluate(step):
        begun = home / f"begun-{step}-{os.getpid()}"
        begun.touch()
        squares = 0.0
        for parameter in model.parameters():
            time.sleep(evaluation_s / 4)
            squares += float(parameter.detach().double().square().sum())
        begun.unlink()
        return {"squares": squares}
    for micro in run:
        with micro:
            x, y = micro.batch
            time.sleep(step_s)
            micro.backward(torch.nn.functional.mse_loss(model(x), y))
"""


class Killer:
    """Kills whoever evaluates one of `steps`, once for each."""

    def __init__(self, home: Path, steps: set[int]) -> None:
        self._home, self._left = home, steps
        self.killed: list[int] = []

    def intervene(self, run: ClusterRun) -> None:
        """Called again and again while the job runs."""
        for begun in self._home.glob("begun-*"):
            _, step, pid = begun.name.split("-")
            if int(step) in self._left and time.time() - begun.stat().st_mtime >= INTO_S:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    begun.unlink()  # it has not ended yet
                    os.kill(int(pid), signal.SIGKILL)
                    self._left.remove(int(step))
                    self.killed.append(int(step))


def results(
    home: Path, kills: set[int], steps: int, step_s: float, evaluation_s: float
) -> tuple[Killer, list[tuple[int, float]]]:
    """Run the job: what was killed, and every result with its step."""
    home.mkdir()
    script = home / "script.py"
    script.write_text(SCRIPT.replace("EVERY", str(EVERY)))
    folder = home / "run"
    plan = Launch(
        worker=(sys.executable, str(script), str(steps), str(step_s), str(evaluation_s), str(home)), script=str(script),
        workers=(2, 2), workers_start=2, standby=2, servers=2, replication=2, folder=str(folder),
        snapshots=str(folder / "snapshots"), snapshot_seconds=0.0,
    )  # fmt: skip
    killer = Killer(home, set(kills))
    with (home / "console.txt").open("w") as log:
        status = launch(plan, RunConsole(Console(file=log, highlight=False)), killer.intervene)
    if status:
        raise SystemExit(f"the run failed: {(home / 'console.txt').read_text()[-2000:]}")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return killer, [(event["step"], event["values"]["squares"]) for event in events if event["type"] == "Metrics"]


def main() -> None:
    """Run both jobs and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    steps = 2 * EVERY * options.kills
    due = list(range(EVERY, steps + 1, EVERY))
    with tempfile.TemporaryDirectory() as folder:
        killer, found = results(Path(folder) / "killed", set(due[1::2]), steps, STEP_S, EVALUATION_S)
        _, expected = results(Path(folder) / "undisturbed", set(), steps, 0.0, 0.0)
    lost = sorted(set(due) - {step for step, _ in found})
    wrong = sorted({step for step, value in found if value != dict(expected).get(step)})
    print(f"{len(killer.killed)} kills in {len(due)} evaluations")
    print(f"lost: {lost or 'none'}; with other bits: {wrong or 'none'}")
    print(f"results that came twice: {len(found) - len(set(found))}")
    if lost or wrong or len(killer.killed) < options.kills or sorted(expected) != expected or len(expected) != len(due):
        sys.exit(1)


if __name__ == "__main__":
    main()
